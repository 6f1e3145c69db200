"""A backward that an error ends leaves nothing behind that a later one would add."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

import autoparallel


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2000, 2000) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, y)


def _after_failures() -> float:
    """The worst gradient of backwards that follow one that an error ended under way."""
    torch.manual_seed(0)
    alone = Wide()
    x, y = torch.randn(2, 8, 2000)
    alone(x, y).backward()
    set_torchrun_variables()
    plan = "dp=2,zero=0,microbatches=1"
    model = autoparallel.parallelize(
        copy.deepcopy(alone),
        example_batch=(x, y),
        global_batch=8,
        parallel=plan,
        profile="analytic",
    )
    leaf = model.join().model.parameters["layers.0.weight"].leaf  # its gradient comes last
    worst = 0.0
    for _ in range(4):
        model.zero_grad()

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError

        handle = leaf.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model(3 * x, y).backward()
        handle.remove()
        model(x, y).backward()
        for own, other in zip(model.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((own.grad - other.grad).abs().max() / other.grad.abs().max()))
    return worst


def test_sums_that_a_failed_backward_has_begun_reach_no_later_gradient() -> None:
    assert max(run_processes(2, _after_failures)) < 1e-4
