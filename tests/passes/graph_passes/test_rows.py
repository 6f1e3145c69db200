"""Rows looked up by their own number, so that the batch can be followed through the look-up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.interpret import run_nodes


class Last(nn.Module):
    """The value at a position of each row, as a classifier picks its last token's."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0]), labels].square().mean()


class Mask(nn.Module):
    """A mask laid out by broadcast indices, as transformers' mask functions do."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        columns = torch.arange(x.shape[1])
        columns = columns.flip(0) if self.reverse else columns
        rows = torch.arange(x.shape[0])[:, None, None]
        picked = x[rows, columns[None, None]]
        return (picked * labels[:, None, None, None]).square().mean()


@pytest.mark.parametrize(
    ("model", "op"),
    [
        (Last(), "aten.gather.default"),
        (Mask(reverse=False), "aten.reshape.default"),
        (Mask(reverse=True), "aten.index.Tensor"),
    ],
)
def test_a_look_up_by_row_numbers_keeps_the_batch_and_the_values(model: nn.Module, op: str) -> None:
    batch = {"x": torch.randn(2, 5, 3), "labels": torch.tensor([1, 4])}
    program = capture(model, batch)
    graph = program.graph
    assert graph.batch_dims
    assert op in {node.op for node in graph}
    nodes = [node for node in graph if node.kind in ("op", "constant")]
    found = run_nodes(graph, nodes, batch, keep=(graph.loss.name,), device="cpu")
    torch.testing.assert_close(found[graph.loss.name][0], model(**batch))
