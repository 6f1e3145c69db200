"""The optimizers that a plan names: what trains is what memory was counted for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoparallel.cost_model.ops.memory import OPTIMIZER_STATES
from autoparallel.options.plan_options import OPTIMIZERS
from autoparallel.runtime.update.optimizer import default_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_as_many_tensors_as_the_cost_model_counts(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = default_optimizer([parameter], name)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    kept = [
        value
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    assert len(kept) == OPTIMIZER_STATES[name]


def test_momentum_is_heavy_ball() -> None:
    """Gradients of 1: the second step is 1 + 0.9 times the first, as torch's SGD has it."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = default_optimizer([parameter], "sgd-momentum")
    places = []
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        places.append(-float(parameter.detach()))
    assert places == pytest.approx([0.01, 0.01 * (1 + 1.9)])
