"""What a step is given: shares and global batches, whole and smaller ones, unequal ones.

Each case is two AdamW steps in float64, held to one process on the same rows: losses,
gradients and weights to 1e-9 of their magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from one_device import build_optimizer, reference_of
from processes import RankError, run_processes
from test_verification_shares import batch_of, captured, target

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.batch import Example
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import Blocks, Graph, Ref
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.data.batches import RankInputs, named_inputs
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import Verification, verify

PLANNED = 8


@dataclass(frozen=True)
class Case:
    """Steps on global batches of so many ``rows``; each rank is given its own, or all."""

    model: str
    parallel: str
    rows: tuple[int, int] = (PLANNED, PLANNED)
    is_share: bool = True
    shares: tuple[int, ...] = ()


DP, PP, BOTH = "dp=2,microbatches=2,pp=1", "pp=2,microbatches=2", "dp=2,pp=2,microbatches=2"
SPLIT, REPLICAS = "pp=2,microbatches=4,schedule=zb-h1", "pp=2,microbatches=4,schedule=chimera"
PARTS = "dp=2,pp=1,microbatches=2,zero=3"
QUICK = {
    2: (
        Case("masked", PP),
        Case("masked", DP, shares=(3, 1)),
        Case("dropout", DP, (PLANNED, 3)),
        Case("sum", DP, (PLANNED, 7), is_share=False),
        Case("masked", PARTS, (PLANNED, 1)),
        Case("dropout", PP, (PLANNED, 5), is_share=False),
        Case("masked", SPLIT, (6, 4), is_share=False),
        Case("masked", REPLICAS, (PLANNED, 4), is_share=False),
    ),
    4: (
        Case("masked", BOTH, (PLANNED, 6)),
        Case("masked", "dp=4,pp=1,microbatches=2", (PLANNED, 5)),
    ),
}
MORE = {
    2: (
        Case("gpt", DP),
        Case("mean", DP),
        Case("gpt", PARTS),
        Case("masked", DP),
        Case("dropout", DP),
        Case("masked", DP, (PLANNED, 1)),
        Case("masked", PARTS, (PLANNED, 3)),
        Case("gpt", "tp=2,pp=1,microbatches=2"),
        Case("dropout", PP),
        Case("masked", DP, (PLANNED, 6)),
        Case("masked", DP, (PLANNED, 7), is_share=False),
        Case("mean", DP, (PLANNED, 5)),
        Case("sum", DP, (PLANNED, 3)),
        Case("normalized", DP, (PLANNED, 1), is_share=False),
        Case("nll", DP, (PLANNED, 3)),
        Case("dropout", DP, (PLANNED, 6), is_share=False),
        Case("dropout", DP, (PLANNED, 1)),
        Case("square", DP, (PLANNED, 5)),
        Case("masked", "dp=2,microbatches=1,pp=1", (PLANNED, 5)),
        Case("mean", "dp=2,microbatches=1,pp=1", (1, PLANNED)),
        Case("gpt", "tp=2,pp=1,microbatches=2", (PLANNED, 5), is_share=False),
        Case("masked", PP, (PLANNED, 6)),
    ),
    4: (
        Case("masked", BOTH),
        Case("dropout", BOTH),
        Case("masked", "dp=4,pp=1,microbatches=2"),
        Case("dropout", BOTH, (PLANNED, 2), is_share=False),
        Case("gpt", "dp=2,tp=2,pp=1,microbatches=2", (PLANNED, 6)),
        Case("gpt", "dp=2,tp=2,pp=1,microbatches=2"),
        Case("masked", "pp=4,microbatches=2", (PLANNED, 6)),
    ),
}
"""By number of ranks."""


def planned(case: Case, num_ranks: int) -> str:
    _, program = captured(case.model, "fp32")
    forced = parse_parallel(case.parallel)
    options = PlanOptions(global_batch=PLANNED, forced=forced)
    plan = plan_program(program, target(case.model), parse_cluster(f"cpu:{num_ranks}"), options)
    if case.shares:
        plan = replace(plan, stages=(replace(plan.stages[0], shares=case.shares),))
    return dumps(plan)


def make_trainer(model: str, text: str) -> Trainer:
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(model, "fp64")
    return Trainer(program, plan, deferred, device=torch.device("cpu"), build=build_optimizer)


def share_of(trainer: Trainer, batch: Mapping[str, torch.Tensor]) -> RankInputs:
    """This rank's rows of a global batch."""
    rows = next(iter(batch.values())).shape[0]
    held = trainer.runner.batches.held(rows)
    found = RankInputs()
    if held is not None:
        found.update({name: tensor[list(held.indices())] for name, tensor in batch.items()})
    found.global_rows = rows
    return found


def verify_all(cases: list[tuple[Case, str]]) -> list[Verification]:
    """On a rank: each case verified in turn."""
    found = []
    for case, text in cases:
        trainer = make_trainer(case.model, text)
        batches = [batch_of(trainer.program, rows, step) for step, rows in enumerate(case.rows)]
        given = [share_of(trainer, batch) for batch in batches] if case.is_share else batches

        def reference(case: Case = case, batches: list = batches):  # type: ignore[no-untyped-def, type-arg]
            return reference_of(target(case.model), captured(case.model, "fp64")[1], batches)

        try:
            found.append(verify(trainer, given, reference))
        except Exception as error:
            error.add_note(str(case))
            raise
    return found


@cache
def results(num_ranks: int, quick: bool) -> dict[Case, Verification]:
    cases = (QUICK if quick else MORE)[num_ranks]
    plans = [(case, planned(case, num_ranks)) for case in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


def check(found: Verification) -> None:
    assert found.passed, found.failures[:5]
    assert found.tolerance == 1e-9
    assert found.worst("weight") > 0.0


@pytest.mark.parametrize(("ranks", "case"), [(n, c) for n in QUICK for c in QUICK[n]], ids=str)
def test_shares_and_smaller_batches_equal_one_device(ranks: int, case: Case) -> None:
    check(results(ranks, True)[case])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), [(n, c) for n in MORE for c in MORE[n]], ids=str)
def test_more_shares_and_smaller_batches_equal_one_device(ranks: int, case: Case) -> None:
    check(results(ranks, False)[case])


def train_mixed(case: Case, text: str) -> None:
    """On a rank: rank 0 has the global batch, the others their rows."""
    trainer = make_trainer(case.model, text)
    batch = batch_of(trainer.program, PLANNED, 0)
    share = share_of(trainer, batch)
    share.global_rows = None
    trainer.step(batch if trainer.model.rank == 0 else share)


def train_partial_share(case: Case, text: str) -> None:
    """On a rank: a share of a smaller batch that does not say so."""
    trainer = make_trainer(case.model, text)
    for rows in (PLANNED, PLANNED // 2):
        share = share_of(trainer, batch_of(trainer.program, rows, 0))
        share.global_rows = None
        trainer.step(share)


def train_refused(case: Case, text: str) -> None:
    """On a rank of a pipeline whose data axis does not divide the rows."""
    trainer = make_trainer(case.model, text)
    trainer.step(batch_of(trainer.program, 3, 0))


@pytest.mark.parametrize(
    ("ranks", "parallel", "function", "code"),
    [
        (2, DP, train_mixed, "AP831"),
        (2, DP, train_partial_share, "AP835"),
        (4, BOTH, train_refused, "AP836"),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused(
    ranks: int, parallel: str, function: Callable[..., None], code: str
) -> None:
    case = Case("mean", parallel)
    with pytest.raises(RankError, match=code):
        run_processes(ranks, function, case, planned(case, ranks))


def test_a_batch_is_read_by_the_places_of_the_example_and_a_missing_part_is_named() -> None:
    """A tensor alone is the one argument of a forward; all that is no tensor is fixed."""
    x, graph = torch.ones(2, 3), Graph((), Ref("loss"), 2)

    def program(example: object) -> Program:
        found = Example.of(example)
        return Program(
            graph, Blocks(()), torch.nn.Identity(), "float32", found.inputs, example=found
        )

    assert torch.equal(named_inputs(x, program((x,)))["input_0"], x)
    keyed = program({"x": x, "more": {"mode": "sum"}})
    assert torch.equal(
        named_inputs({"x": [[1.0]], "more": {"mode": "sum"}}, keyed)["x"], torch.ones(1, 1)
    )
    refused = {
        "AP130": ({"more": {"mode": "sum"}}, "the batch has no x"),
        "AP920": ({"x": x, "more": {"mode": "mean"}}, "has 'mean' as more"),
    }
    for code, (batch, text) in refused.items():
        with pytest.raises(UsageError, match=text) as raised:
            named_inputs(batch, keyed)
        assert raised.value.code == code
    with pytest.raises(UsageError, match=r"the batch has no more\['mode'\]"):
        named_inputs({"x": x}, keyed)
