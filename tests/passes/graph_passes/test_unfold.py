"""Rows repeated once per expert keep experts and rows apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.interpret import run


class Repeated(nn.Module):
    """Every row through every expert, laid out one expert after another (as Llama 4 does)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        scores = self.router(rows).sigmoid()
        inputs = rows.repeat(3, 1) * scores.transpose(0, 1).reshape(-1, 1)
        made = torch.bmm(inputs.view(3, -1, 8), self.weight).view(-1, 8)
        return made.reshape(3, -1, 8).sum(0).square().mean()


def test_a_batch_goes_through_experts_that_take_every_row() -> None:
    torch.manual_seed(0)
    model = Repeated().double()
    program = capture(model, {"x": torch.randn(2, 4, 8)}, dtype="float64")
    graph = program.graph
    assert graph.batch_dims
    assert not any(node.op == "aten.repeat.default" for node in graph)
    for rows in (2, 6):
        x = torch.randn(rows, 4, 8, dtype=torch.float64)
        values = {**dict(model.named_parameters()), "x": x}
        assert torch.allclose(run(graph.with_batch_size(rows), values), model(x))
