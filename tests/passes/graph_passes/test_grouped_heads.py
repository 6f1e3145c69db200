"""Attention reads the heads of keys and values that exist, not repeated ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from capture_models import hf_batch, small_llama
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.graph_passes.masks import SDPA
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.programs.interpret import run
from autoparallel.planner.graph.graph import Node

HEADS, GROUPS = 6, 2


def expanded(x: Tensor, dim: int = 2) -> Tensor:
    rows, heads, length, size = x.shape
    count = HEADS // heads
    if dim == 2:
        wide = x[:, :, None].expand(rows, heads, count, length, size)
    else:
        wide = x[:, None].expand(rows, count, heads, length, size)
    return wide.reshape(rows, HEADS, length, size)


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(HEADS // x.shape[1], 1)


class Attention(nn.Module):
    """Attention of six heads of queries; ``repeat`` makes six heads of keys and values of two."""

    def __init__(self, repeat: Callable[[Tensor], Tensor], *, masked: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.repeat, self.masked = repeat, masked

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.project(x), self.project(x[:, :GROUPS])
        mask = torch.ones(5, 5, dtype=torch.bool).triu() if self.masked else None
        y = functional.scaled_dot_product_attention(q, self.repeat(k), self.repeat(k), mask)
        return (y * y).sum()


def attention(repeat: Callable[[Tensor], Tensor], *, masked: bool = False) -> Node:
    """Return the captured attention node; assert that the captured loss is the model's."""
    torch.manual_seed(0)
    x = torch.randn(2, HEADS, 5, 4, dtype=torch.float64)
    model = Attention(repeat, masked=masked).double()
    program = capture(model, (x,), dtype="float64")
    loss = run(program.graph, {"input_0": x, **dict(model.named_parameters())})
    torch.testing.assert_close(loss, model(x), rtol=1e-12, atol=0)
    return next(node for node in program.graph if node.op == SDPA)


@pytest.mark.parametrize("repeat", [expanded, interleaved])
def test_attention_reads_each_head_for_its_group(repeat: Callable[[Tensor], Tensor]) -> None:
    node = attention(repeat)
    assert node.kwargs["enable_gqa"]
    assert len({ref.name for ref in node.args[1:3]}) == 1


@pytest.mark.parametrize(
    "repeat",
    [partial(expanded, dim=1), lambda x: interleaved(x.flip(1)).flip(1), lambda x: expanded(x) + 1],
)
def test_heads_in_another_order_or_with_other_values_stay_as_they_are(
    repeat: Callable[[Tensor], Tensor],
) -> None:
    assert not attention(repeat).kwargs.get("enable_gqa")


def test_masked_attention_keeps_repeated_heads() -> None:
    """PyTorch's GPU kernel for masks needs a head of keys for each head of queries."""
    assert not attention(expanded, masked=True).kwargs.get("enable_gqa")


def test_attention_of_a_hugging_face_llama_reads_unrepeated_heads() -> None:
    program = capture(record_build(small_llama).model, hf_batch())
    nodes = [node for node in program.graph if node.op == SDPA]
    heads = [[program.graph.spec(ref).shape[1] for ref in node.inputs] for node in nodes]
    assert heads == [[4, 2, 2]] * 2
