"""The fullest moment of every rank under every schedule: predicted, and what its tensors took.

On gloo, and on a ``strict`` group, whose sends are not seen to be done until they are waited for,
as those of a GPU whose host runs far ahead.
"""

from __future__ import annotations

import pytest
from marks import slow
from memory_cases import COUNTS, MODELS, SCHEDULES, measured, planned, predicted
from processes import run_processes
from schedule_cases import Case

from autoparallel.passes.local.stage_cut import boundaries
from autoparallel.passes.memory.communicators import num_communicators
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps

BOUND = 0.05
FEWEST = {"gpt": 13, "skip": 8}
"""How many schedules each model can have, at least, of 16 or 64 micro-batches."""

SAMPLE = tuple(
    Case("gpt", schedule, 4)
    for schedule in (
        "interleaved,chunks=2",
        "zb-h1",
        "chimera",
        "pipedream-2bw",
        "terapipe,slices=2",
    )
)


def check(cases: list[Case], backend: str) -> int:
    """How many of the cases, all of one model and as many ranks, can be had."""
    is_gpu = backend == "strict"
    found_plans = ((case, planned(case, is_gpu=is_gpu)) for case in cases)
    plans = {case: plan for case, plan in found_plans if plan is not None}
    texts = [dumps(plan) for plan in plans.values()]
    found = run_processes(
        cases[0].num_ranks, measured, cases[0].model, texts, backend=backend, timeout_seconds=1400
    )
    for number, (case, plan) in enumerate(plans.items()):
        for stage, own in zip(plan.stages, predicted(plan), strict=False):
            peaks = [sum(found[device][number].values()) for device in stage.devices]
            assert sum(own.values()) == pytest.approx(max(peaks), rel=BOUND), (
                str(case),
                own,
                found[stage.devices[0]][number],
            )
    return len(plans)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        ("strict", SAMPLE[4:]),
        slow("gloo", SAMPLE[:1]),
        slow("gloo", SAMPLE[1:2]),
        slow("strict", SAMPLE[2:4]),
    ],
)
def test_some_schedules_hold_what_is_predicted(backend: str, cases: tuple[Case, ...]) -> None:
    assert check(list(cases), backend) == len(cases)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("backend", ["gloo", "strict"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("model", MODELS.files)
def test_every_schedule_holds_what_is_predicted(model: str, count: int, backend: str) -> None:
    cases = [Case(model, schedule, count) for schedule in SCHEDULES]
    assert check(cases, backend) >= FEWEST[model]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("parallel", ["pp=2,tp=2", "pp=2,dp=2,zero=2", "pp=4"])
def test_four_ranks_hold_what_is_predicted(parallel: str) -> None:
    cases = [
        Case("skip", schedule, 16, parallel) for schedule in ("1f1b", "interleaved,chunks=2", "zbv")
    ]
    assert check(cases, "strict") >= 2


def communicators(model: str, texts: list[str]) -> int:
    """On a rank: how many it has after a step."""
    from strict_group import begun

    measured(model, texts)
    return begun()


def counted(plan: Plan, case: Case) -> list[int]:
    program = MODELS.captured(case.model)[1].with_batch_size(plan.microbatch_size)
    found = num_communicators(plan, boundaries(program.graph, program.blocks, plan))
    return [found[rank] for rank in range(case.num_ranks)]


@pytest.mark.parametrize(
    "case",
    [
        slow(Case("skip", "1f1b", 4)),
        slow(Case("skip", "zbv", 4, "pp=2,dp=2")),
        slow(Case("skip", "interleaved,chunks=2", 4, "pp=2,tp=2")),
        slow(Case("gpt", "chimera", 4)),
    ],
    ids=str,
)
def test_a_rank_has_as_many_communicators_as_are_counted(case: Case) -> None:
    plan = planned(case)
    assert plan is not None
    found = run_processes(
        case.num_ranks, communicators, case.model, [dumps(plan)], backend="strict"
    )
    assert found == counted(plan, case)
