"""Scripts that balance experts by a bias, from counts of tokens: under a plan as alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from kept_captures import ranks_share_captures
from marks import slow
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

import autoparallel
from autoparallel.target.load import load_target

ROUTED = "tests/models/routed_experts.py"
STEPS, RATE = 3, 0.05
State = dict[str, list[Any]]


def model(counts: str) -> nn.Module:
    torch.manual_seed(0)
    return load_target(ROUTED, {"counts": counts}).build_model().double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            name: torch.randn(8, 6, width, generator=generator, dtype=torch.float64)
            for name, width in (("inputs", 4), ("targets", 3))
        }
        for _ in range(STEPS)
    ]


def balance(trained: nn.Module) -> None:
    """Move each bias towards experts with few tokens, as a script does after a step. Under a
    pipeline a rank has the counts of its own stage alone."""
    for router in trained.modules():
        counts = getattr(router, "tokens_per_expert", None)
        if counts is not None:
            load = autoparallel.whole(counts).double()
            router.bias += RATE * torch.sign(load.mean() - load)
            counts.zero_()


def state_of(trained: nn.Module) -> State:
    found = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
    return {name: value.tolist() for name, value in found.items()}


@cache
def alone(counts: str) -> State:
    trained = model(counts)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        trained(**batch).backward()
        optimizer.step()
        balance(trained)
    return state_of(trained)


def trained_by(plan: str, counts: str) -> State:
    """On a rank: the state after the script's own loop, or ``Step`` for a plan with a pipeline."""
    set_torchrun_variables()
    examples = batches()
    with ranks_share_captures(f"balanced {counts}"):
        trained = autoparallel.parallelize(
            model(counts), example_batch=examples[0], parallel=plan, cluster="cpu:2"
        )
        if "pp" in plan:
            step = autoparallel.Step(
                trained, build_optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2)
            )
            for batch in examples:
                step(batch)
                balance(trained)
        else:
            with torch.no_grad():
                trained.eval()(**examples[0])
            trained.train()
            optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
            optimizer.register_step_post_hook(lambda *_: balance(trained))
            for batch in examples:
                optimizer.zero_grad()
                trained(**batch).backward()
                optimizer.step()
    with trained.unsharded():
        return state_of(trained)


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        ("pp=2,microbatches=4", "integer"),
        ("dp=2,zero=1,microbatches=2", "real"),
        slow("dp=2,zero=3", "integer"),
        slow("tp=2,microbatches=2", "integer"),
        slow("dp=2,zero=0,microbatches=4", "integer"),
        slow("dp=2,zero=2", "real"),
    ],
)
def test_a_bias_that_a_script_moves_by_counts_is_that_of_one_device(plan: str, counts: str) -> None:
    expected = alone(counts)
    assert any(expected["layers.0.router.bias"])
    for found in run_processes(2, trained_by, plan, counts):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            pair = (torch.tensor(each, dtype=torch.float64) for each in (found[name], value))
            torch.testing.assert_close(*pair, rtol=0, atol=1e-9, msg=name)
