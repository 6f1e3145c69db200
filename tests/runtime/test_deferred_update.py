"""Updates left to the next forward: the same weights bit for bit, whoever reads them when."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from processes import run_processes
from test_verification import batches, captured, planned
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from autoparallel.planner.plan_file import loads
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.update.deferred_update import why_not_deferred
from autoparallel.runtime.update.update import UpdateOptions

OPTIMIZERS = {
    "adam": None,
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}
STEPS = 3


def _weights(
    model: str, text: str, precision: Any, *, build: str, overlaps: bool, per_update: int
) -> tuple[dict[str, bytes], list[float], list[float]]:
    """Weights after some steps of a GPT, their losses, and the norms of their gradients."""
    plan = loads(text)
    plan = replace(plan, model=replace(plan.model, precision=precision))
    deferred, program = captured(model, "fp32")
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"), build=OPTIMIZERS[build])
    trainer.overlaps_steps = overlaps
    trainer.use_update(
        UpdateOptions(accumulate=per_update), lambda optimizer: StepLR(optimizer, 1, 0.5)
    )
    assert (trainer.runner._deferred is not None) == overlaps
    data = [
        {
            name: value if value.dtype == torch.int64 else value.float()
            for name, value in batch.items()
        }
        for batch in batches(model)
    ]
    results = [trainer.step(*data[:per_update])]
    read = float(results[0].gradient_norm)  # completes the update
    results += [trainer.step(*data[:per_update]) for _ in range(STEPS - 1)]
    assert read == float(results[0].gradient_norm)
    trainer.steps.finish()
    found = {p.name: p.local.contiguous().numpy().tobytes() for p in trainer.model.all_parameters()}
    return found, [float(r.loss) for r in results], [float(r.gradient_norm) for r in results]


def _both(cases: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    runs = [partial(_weights, **case) for case in cases]
    return [(run(overlaps=False), run(overlaps=True)) for run in runs]


def test_weights_are_equal_bit_for_bit_to_those_of_updates_at_the_end_of_steps() -> None:
    """With a scheduler that halves the learning rate; of the second model the embedding is tied."""
    text = {m: planned(m, "dp=2,gradients=priority,microbatches=2") for m in ("gpt", "gpt-tied")}
    cases: list[dict[str, Any]] = [
        {
            "model": model,
            "text": text[model],
            "precision": precision,
            "build": build,
            "per_update": per_update,
        }
        for model, precision, build, per_update in (
            ("gpt", "fp32", "adam", 1),
            ("gpt-tied", "bf16", "momentum", 2),
        )
    ]
    by_rank = run_processes(2, _both, cases)
    for found in by_rank:
        for at_end, in_forward in found:
            assert at_end[0] == in_forward[0]
            assert at_end[1] == in_forward[1]
            assert at_end[2] == pytest.approx(in_forward[2], rel=1e-12)
            assert len(set(in_forward[1])) == STEPS  # the weights have changed
    assert by_rank[0][0][1][0] == by_rank[1][0][1][0]


def test_updates_that_need_all_gradients_are_made_at_the_end_of_a_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    adam, plain = Adam([parameter]), UpdateOptions()
    for hook in (adam.register_step_pre_hook, adam.register_step_post_hook):
        hook(lambda *arguments: None)  # as the trainer's own

    class Whole(Optimizer):
        pass

    assert why_not_deferred(plain, adam) == ""
    assert why_not_deferred(UpdateOptions(accumulate=4), adam) == ""
    assert "clipping" in why_not_deferred(UpdateOptions(max_norm=1.0), adam)
    assert "on_nan" in why_not_deferred(UpdateOptions(on_nan="skip"), adam)
    assert "Whole" in why_not_deferred(plain, Whole([parameter], {}))
    adam.register_step_post_hook(lambda *arguments: None)
    assert "hooks" in why_not_deferred(plain, adam)
