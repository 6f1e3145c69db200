"""Unequal shares of the batch on real processes, held to one device in float64.

As ``test_verification``: two AdamW steps, losses, gradients and weights to 1e-9 of their
magnitude. Means, sums, counts over all rows, dropout; ZeRO 0 to 3; a mesh of two axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from kept_captures import capture_once
from one_device import build_optimizer, reference_of
from processes import RankError, run_processes

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference
from autoparallel.runtime.verify.verify import Verification, verify
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

SEQ = 16
LOSSES = ("mean", "weighted", "sum", "masked", "normalized", "nll")


@dataclass(frozen=True)
class Case:
    """``rows`` of each coordinate of "dp" in one of ``count`` micro-batches."""

    model: str
    rows: tuple[int, ...]
    count: int = 1
    parallel: str = ""

    @property
    def forced(self) -> str:
        extra = f",{self.parallel}" if self.parallel else ""
        return f"dp={len(self.rows)},pp=1{extra}"


QUICK = {
    2: (Case("square", (3, 5), 1),),
    3: (
        Case("gpt", (1, 4, 3), 1),
        Case("square", (1, 2, 1), 4),
        Case("square", (1, 4, 3), 2, "zero=3"),
    ),
}
MORE = {
    2: (
        Case("gpt", (3, 5), 1),
        Case("gpt", (3, 5), 4),
        Case("square", (3, 5), 4),
        Case("dropout", (1, 3), 1),
        Case("masked", (5, 3), 1),
        Case("normalized", (7, 1), 1),
    ),
    3: (
        Case("gpt", (3, 3, 2), 1),
        Case("gpt", (1, 2, 1), 4),
        Case("square", (1, 4, 3), 1),
        *(Case("gpt", (1, 4, 3), 2, f"zero={zero}") for zero in (1, 2, 3)),
        *(Case("square", (1, 4, 3), 2, f"zero={zero}") for zero in (1, 2)),
        *(Case(loss, (3, 4, 1), 2) for loss in LOSSES),
        *(Case(f"{loss} at random", (3, 4, 1), 2) for loss in ("mean", "masked")),
        Case("dropout", (3, 4, 1), 2),
        Case("gpt", (3, 4, 1), 2, "recompute=full"),
    ),
    4: (Case("gpt", (3, 5), 2, "tp=2"), Case("gpt", (1, 3), 2, "tp=2,zero=3")),
}
"""Rows by number of ranks."""


@cache
def target(model: str) -> Target:
    """A small GPT, with dropout too, a regression, or a model with some other loss."""
    if model == "gpt":
        sizes = {"n_layer": 2, "d_model": 32, "n_head": 4, "seq": SEQ}
        return load_target("examples/gpt.py", sizes)
    if model == "dropout":
        return load_target("tests/models/gpt_dropout.py", {})
    if model == "square":
        return load_target("tests/models/regression.py", {})
    loss = model.removesuffix(" at random")
    return load_target("tests/models/masked_lm.py", {"loss": loss, "is_random": loss != model})


@cache
def captured(model: str, precision: str) -> tuple[Deferred, Program]:
    found = target(model)
    batch = found.example_batch(2, SEQ if model in ("gpt", "dropout") else None)
    return capture_once(found, batch, precision)  # type: ignore[arg-type]


def planned(case: Case) -> str:
    """The plan of an even split, with the shares of the case."""
    forced = parse_parallel(case.forced)
    devices = (forced.dp or 1) * (forced.tp or 1)
    rows = len(case.rows) * case.count
    _, program = captured(case.model, "fp32")
    options = PlanOptions(global_batch=rows, forced=replace(forced, num_microbatches=case.count))
    plan = plan_program(program, target(case.model), parse_cluster(f"cpu:{devices}"), options)
    total = sum(case.rows) * case.count
    stages = (replace(plan.stages[0], shares=case.rows),)
    return dumps(replace(plan, model=replace(plan.model, global_batch=total), stages=stages))


def reference(model: str, batches: Any) -> Reference:
    """Two steps of the plain module on one device."""
    return reference_of(target(model), captured(model, "fp64")[1], batches)


def batch_of(program: Program, rows: int, step: int) -> dict[str, torch.Tensor]:
    """Random rows; of labels some are ignored, of later rows more."""
    batch = random_batch(program.graph.with_batch_size(rows), seed=step, dtype="float64")
    for name, tensor in batch.items():
        if "labels" in name:
            batch[name] = tensor.clone()
            for row in range(rows):
                batch[name][row, : row % tensor.shape[1]] = -100
    return batch


def verify_all(cases: list[tuple[str, str]]) -> list[Verification]:
    """On a rank: each (model, plan file) verified in turn."""
    found = []
    for model, text in cases:
        plan = loads(text, "test")
        plan = replace(plan, model=replace(plan.model, precision="fp64"))
        deferred, program = captured(model, "fp64")
        trainer = Trainer(
            program, plan, deferred, device=torch.device("cpu"), build=build_optimizer
        )
        batches = [batch_of(program, plan.model.global_batch, step) for step in range(2)]
        found.append(verify(trainer, batches, lambda: reference(model, batches)))  # noqa: B023
    return found


@cache
def results(num_ranks: int, quick: bool) -> dict[Case, Verification]:
    cases = (QUICK if quick else MORE)[num_ranks]
    plans = [(case.model, planned(case)) for case in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=200)
    return dict(zip(cases, found[0], strict=True))


def check(found: Verification) -> None:
    assert found.passed, found.failures[:5]
    assert found.tolerance == 1e-9
    assert {d.quantity for d in found.differences} == {"loss", "gradient", "weight"}
    assert found.worst("weight") > 0.0


@pytest.mark.parametrize(("ranks", "case"), [(n, c) for n in QUICK for c in QUICK[n]], ids=str)
def test_shares_of_unequal_ranks_equal_one_device(ranks: int, case: Case) -> None:
    check(results(ranks, True)[case])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), [(n, c) for n in MORE for c in MORE[n]], ids=str)
def test_more_shares_of_unequal_ranks_equal_one_device(ranks: int, case: Case) -> None:
    """Every sort of loss, dropout, all ZeRO stages, and beside tensor parallelism."""
    check(results(ranks, False)[case])


def test_a_plan_whose_shares_are_not_the_batch_is_refused() -> None:
    plan = loads(planned(Case("square", (3, 5))), "test")
    wrong = replace(plan, model=replace(plan.model, global_batch=10))
    with pytest.raises(RankError, match="AP526"):
        run_processes(2, verify_all, [("square", dumps(wrong))])
