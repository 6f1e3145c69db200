"""Schedules of several stages per rank and of split backwards, held to one device in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from processes import run_processes
from test_verification import GLOBAL_BATCH, captured, check_verified, target, verify_all

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.verify.verify import Verification

TWO = (
    ("gpt-tied", "pp=2,schedule=interleaved-1f1b,chunks=2,microbatches=4"),
    ("dropout", "pp=2,schedule=bfs,chunks=2,microbatches=2,recompute=full"),
    ("gpt-tied", "pp=2,schedule=zb-h1,microbatches=4"),
    ("gpt", "pp=2,schedule=zb-h2,microbatches=8"),
    ("dropout", "pp=2,schedule=zbv,microbatches=4,recompute=full"),
    ("gpt-tied", "pp=2,schedule=dualpipev,microbatches=4"),
    ("dropout", "pp=2,schedule=terapipe,slices=3,microbatches=4"),
    ("dropped", "pp=2,schedule=terapipe,slices=2,microbatches=2,recompute=full"),
)
MORE = (
    ("gpt-tied", "pp=2,schedule=bfs,chunks=2,microbatches=4"),
    ("gpt", "pp=2,schedule=interleaved-1f1b,chunks=3,microbatches=8"),
    ("llama", "pp=2,schedule=zb-h2,microbatches=8"),
    ("gpt-tied", "pp=2,schedule=zbv,microbatches=4"),
    ("dropped", "pp=2,schedule=terapipe,slices=3,microbatches=4"),
)
"""On two ranks too, of kinds that the others have."""
FOUR = (
    ("gpt-tied", "pp=2,tp=2,schedule=interleaved-1f1b,chunks=2,microbatches=4"),
    ("gpt-tied", "pp=2,dp=2,zero=3,schedule=interleaved-1f1b,chunks=2,microbatches=4"),
    ("gpt", "pp=2,dp=2,zero=1,schedule=bfs,chunks=2,microbatches=4,recompute=selective"),
    ("gpt-tied", "pp=2,dp=2,zero=3,schedule=zbv,microbatches=4"),
    ("gpt-tied", "pp=2,tp=2,schedule=zb-h1,microbatches=4"),
    ("gpt", "pp=2,dp=2,zero=2,schedule=dualpipev,microbatches=4"),
    ("gpt-tied", "pp=4,schedule=zb-h2,microbatches=8"),
    ("gpt", "pp=4,schedule=zb-h1,microbatches=4"),
    ("dropped", "pp=2,tp=2,schedule=terapipe,slices=4,microbatches=2"),
    ("dropout", "pp=2,tp=2,schedule=terapipe,slices=4,microbatches=2"),
    ("dropout", "pp=2,dp=2,schedule=terapipe,slices=3,microbatches=2,recompute=full"),
    ("dropped", "pp=2,dp=2,zero=2,schedule=terapipe,slices=3,microbatches=2"),
)


@cache
def planned(model: str, parallel: str) -> str:
    forced = parse_parallel(parallel)
    devices = (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)
    _, program = captured(model, "fp32")
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=16, forced=forced)
    return dumps(plan_program(program, target(model), parse_cluster(f"cpu:{devices}"), options))


@cache
def results(
    cases: tuple[tuple[str, str], ...], num_ranks: int
) -> dict[tuple[str, str], Verification]:
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


@pytest.mark.parametrize("case", TWO, ids=" ".join)
def test_a_schedule_on_two_ranks_equals_one_device(case: tuple[str, str]) -> None:
    check_verified(results(TWO, 2)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=" ".join)
def test_more_schedules_on_two_ranks_equal_one_device(case: tuple[str, str]) -> None:
    check_verified(results(MORE, 2)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=" ".join)
def test_a_schedule_on_four_ranks_equals_one_device(case: tuple[str, str]) -> None:
    check_verified(results(FOUR, 4)[case])


def test_a_plan_of_chunks_says_which_stages_share_their_devices() -> None:
    plan = loads(planned(*TWO[0]))
    assert plan.num_chunks == 2
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (0,), (1,)]
    assert loads(dumps(plan)) == plan
    assert sum(len(stage.blocks) for stage in plan.stages) == len(
        captured("gpt-tied", "fp32")[1].blocks.blocks
    )
    assert plan.prediction.step_seconds > 0.0


@pytest.mark.parametrize(
    ("parallel", "what"),
    [
        ("pp=2,chunks=2", "schedule=not given"),
        ("schedule=bfs,chunks=2", "needs two ranks"),
        ("pp=2,schedule=bfs,chunks=9", "chunks=9 stages"),
    ],
)
def test_chunks_that_cannot_be_are_refused(parallel: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        planned("gpt", parallel)
    assert caught.value.code == "AP546"


@pytest.mark.slow
def test_stages_of_different_meshes_on_the_same_ranks_equal_one_device() -> None:
    """Ranks 0 and 1 run the first stage as dp=2 and the third as tp=2; 2 and 3 likewise."""
    data = loads(planned("gpt", "pp=2,dp=2,schedule=interleaved-1f1b,chunks=2,microbatches=4"))
    tensor = loads(planned("gpt", "pp=2,tp=2,schedule=interleaved-1f1b,chunks=2,microbatches=4"))
    assert [s.devices for s in data.stages] == [s.devices for s in tensor.stages]
    mixed = replace(data, stages=(*data.stages[:2], *tensor.stages[2:]))
    assert len({stage.mesh for stage in mixed.stages}) == 2
    (found,) = run_processes(4, verify_all, [("gpt", dumps(mixed))], timeout_seconds=200)[0]
    check_verified(found)
