"""Evaluation between steps of training, and words about what a plan computes apart."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from forced_plans import adopting
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

import autoparallel

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()


def _network(*sizes: int) -> nn.Module:
    first, inner, last = sizes
    return nn.Sequential(nn.Linear(first, inner), nn.Tanh(), nn.Linear(inner, last)).double()


def _evaluated_on_one_rank(plan: str) -> list[float]:
    """Evaluate on rank 0 alone under dp=2, on both ranks under ZeRO 3, where weights are spread.

    Returns the sum of the outputs and the number of groups in which this rank waited.
    """
    set_torchrun_variables()
    torch.manual_seed(0)
    model: Any = adopting(plan)(_network(6, 16, 4), (X,))
    model(X).sum().backward()
    waits: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "barrier", lambda group: waits.append(group))
        model.eval()
        if plan == "dp=2" and torch.distributed.get_rank():
            return [0.0, 0.0]
        return [float(model(X).sum()), float(len(set(waits) - {None}))]


def test_ranks_wait_for_each_other_before_an_evaluation_that_needs_all() -> None:
    torch.manual_seed(0)
    expected = float(_network(6, 16, 4)(X).sum())
    (alone, no_waits), _ = run_processes(2, _evaluated_on_one_rank, "dp=2")
    assert alone == pytest.approx(expected)
    assert no_waits == 0
    for found, waits in run_processes(2, _evaluated_on_one_rank, "dp=2,zero=3"):
        assert found == pytest.approx(expected)
        assert waits == 1


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)).square().mean()


def _told(plan: str) -> str:
    set_torchrun_variables()
    words = io.StringIO()
    with contextlib.redirect_stderr(words):
        adopting(plan)(Normalized(), (X.float(),))(X.float()).backward()
    return words.getvalue()


def test_micro_batches_that_batch_norm_sees_apart_are_told() -> None:
    first, second = run_processes(2, _told, "dp=2,microbatches=2")
    assert "samples meet in batch norm of norm" in first
    assert "each of the 2 micro-batches is computed for itself" in first
    assert second == ""
    assert "micro-batches" not in run_processes(2, _told, "dp=2")[0]


class Converting(nn.Module):
    """Its forward asks the last layer, of another stage, for a dtype and a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_network(6, 6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.layers[-1]
        x = x.to(last[0].weight.dtype)[:, : last[0].weight.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return x


def _evaluated_in_a_pipeline(plan: str) -> float:
    set_torchrun_variables()
    torch.manual_seed(0)
    model: Any = adopting(plan)(Converting(), (X,))
    step = autoparallel.Step(model, loss_fn=lambda outputs, batch: outputs.square().mean())
    model.eval()
    found = float(model(X).sum())
    model.train()
    step((X,))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_an_evaluation_may_ask_for_the_shape_of_what_another_stage_holds(schedule: str) -> None:
    """With chimera each rank holds both stages."""
    torch.manual_seed(0)
    expected = float(Converting()(X).sum())
    plan = f"pp=2,microbatches=4,schedule={schedule}"
    assert run_processes(2, _evaluated_in_a_pipeline, plan) == pytest.approx([expected] * 2)
