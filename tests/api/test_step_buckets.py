"""``Step(buckets=...)`` in a script on four ranks: sequences of several lengths and rows."""

from __future__ import annotations

import pytest
import torch
from forced_plans import settled
from processes import run_processes, set_torchrun_variables
from torch import Tensor

import autoparallel
from examples.gpt import GPT

SIZES = {"n_layer": 2, "d_model": 32, "n_head": 4, "seq": 32, "vocab": 64, "tied": False}
SHAPES = ((2, 32), (8, 8), (2, 32), (8, 5), (4, 16), (2, 20))
"""Rows and positions of each step."""


def batch(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (rows, length + 1), generator=drawn)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def trained() -> tuple[list[float], list[float], float]:
    """Losses by the plan and alone, and the largest difference of weights after all steps."""
    set_torchrun_variables()
    torch.manual_seed(0)
    alone, planned = (GPT(**SIZES).double() for _ in range(2))
    planned.load_state_dict(alone.state_dict())
    model = autoparallel.parallelize(
        planned,
        example_batch=batch(2, 32, 0),
        global_batch=2,
        precision="fp64",
        profile="analytic",
        parallel=settled("cp=4,zero=2"),
    )
    step = autoparallel.Step(
        model, build_optimizer=lambda own: torch.optim.SGD(own, 0.1), buckets={8: 8, 16: 4}
    )
    optimizer, losses = torch.optim.SGD(alone.parameters(), 0.1), ([], [])
    for seed, shape in enumerate(SHAPES):
        losses[0].append(float(step(batch(*shape, seed))))
        optimizer.zero_grad()
        loss = alone(**batch(*shape, seed))
        loss.backward()
        optimizer.step()
        losses[1].append(float(loss))
    step.finish()
    found = model.state_dict()
    apart = max(
        float((whole_tensor(found[name]) - own).abs().max())
        for name, own in alone.state_dict().items()
    )
    return *losses, apart


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_a_script_trains_on_batches_of_several_shapes_as_one_device() -> None:
    for own, alone, apart in run_processes(4, trained):
        assert own == pytest.approx(alone, rel=1e-12)
        assert apart < 1e-12
