"""Where predicted seconds come from: shares that add up, profiles that are used or ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import Profile, level_of
from autoparallel.cost_model.profile.records import Measurement, Transfer
from autoparallel.planner.configured.profiling_targets import ProfilingTargets, asked_cases
from autoparallel.planner.costs.basis import Basis, CostQueries
from autoparallel.planner.costs.mesh_prices import LEVEL, LIBRARY, update_kind
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request

HERE = Environment("toy", "", "2.13.0", 1)
GRAPH, BLOCKS = mlp(2, rows=4)
ON = cluster(4)
REQUEST = Request(4)


@cache
def wanted() -> ProfilingTargets:
    return wanted_beside(None)


def wanted_beside(profile: Profile | None) -> ProfilingTargets:
    """What a search asks for that ``profile`` does not have."""
    return asked_cases(GRAPH, BLOCKS, ON, REQUEST, basis=Basis(profile))


def measured(found: ProfilingTargets, *, ops: float = 1.0, links: bool = True) -> Profile:
    """A profile of a share of the ops, each a little slower than the last, and of transfers."""
    cases = [op.case for op in found.ops][: int(ops * len(found.ops))]
    times = {case: Measurement(1e-3 + i * 1e-5, 2e-3, 9, 0.02) for i, case in enumerate(cases)}
    return Profile(HERE, times, tuple(_transfers(found)) if links else ())


def _transfers(found: ProfilingTargets) -> Iterator[Transfer]:
    for each in found.transfers:
        group = each.group
        for size in (1, 1 << 10, 1 << 24):
            seconds = 1e-6 + size * 1e-9
            yield Transfer(
                level_of(group),
                group.library,
                each.kind,
                group.num_ranks,
                group.num_hosts,
                size,
                seconds,
                9,
            )
    for size in (1 << 10, 1 << 20):
        yield Transfer(LEVEL, LIBRARY, update_kind("adamw"), 1, 1, size, size * 1e-9, 9)


@cache
def analytic() -> Plan:
    return planned(None)


def planned(profile: Profile | None, mode: str = "auto", **request: object) -> Plan:
    asked = replace(REQUEST, **request)  # type: ignore[arg-type]
    return plan(GRAPH, BLOCKS, ON, asked, basis=Basis(profile, mode))  # type: ignore[arg-type]


def whole(shares: Iterable[float]) -> object:
    return pytest.approx(sum(shares))


SHARES = list(
    product(
        (Forced(dp=2, tp=2), Forced(pp=2, zero=2), Forced(dp=4)), (True, False), (0.0, 0.3, 1.0)
    )
)
QUICK_SHARES = (SHARES[1], SHARES[9], SHARES[14])
"""A part of the ops with all transfers, none of the ops without them, and all with transfers."""


@pytest.mark.parametrize(
    ("forced", "links", "share"),
    [
        case if case in QUICK_SHARES else pytest.param(*case, marks=pytest.mark.slow)
        for case in SHARES
    ],
)
def test_the_shares_of_a_plan_add_up_to_one(share: float, links: bool, forced: Forced) -> None:
    profile = measured(wanted(), ops=share, links=links)
    prediction = planned(profile, forced=forced).prediction
    assert whole(prediction.sources.values()) == 1.0
    parts = [value for part in prediction.sources_of.values() for value in part.values()]
    assert whole(parts) == 1.0
    assert set(prediction.sources) <= {"measured", "interpolated", "spec"}
    for source, value in prediction.sources.items():
        assert value == whole(part.get(source, 0.0) for part in prediction.sources_of.values())


def test_what_was_measured_is_what_the_plan_predicts() -> None:
    profile = measured(wanted())
    found = planned(profile)
    assert found.prediction.sources_of["compute"].keys() <= {"measured", "interpolated"}
    again = evaluate(GRAPH, BLOCKS, found, ON, basis=Basis(profile))
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds)
    without = evaluate(GRAPH, BLOCKS, found, ON)
    assert without.step_seconds < 0.5 * again.step_seconds  # 1 ms per op against microseconds


@pytest.mark.slow
def test_all_of_an_analytic_plan_is_from_specifications() -> None:
    profile = measured(wanted())
    without, ignored = analytic(), planned(profile, "analytic")
    assert without.prediction.sources == {"spec": pytest.approx(1.0)}
    assert replace(ignored, solver=without.solver) == without


def test_the_plan_names_what_was_measured_on_and_how_far_it_differs() -> None:
    profile = replace(measured(wanted()), mismatch="measured with torch 2.12, not 2.13")
    use = planned(profile).prediction.profile
    assert use is not None
    assert (use.device, use.torch, use.threads) == ("toy", "2.13.0", 1)
    assert use.mismatch == "measured with torch 2.12, not 2.13"
    assert analytic().prediction.profile is None


def test_measured_mode_names_what_is_missing_and_the_command_that_measures_it() -> None:
    found = wanted()
    linear = [op for op in found.ops if not op.case.op.startswith("aten.linear")]
    profile = measured(replace(found, ops=tuple(linear)))
    with pytest.raises(UsageError) as caught:
        planned(profile, "measured", target="model.py")
    assert caught.value.code == "AP170"
    assert "aten.linear.default (" in caught.value.why
    assert "gelu" not in caught.value.why
    assert caught.value.fix.startswith("autoparallel profile model.py ")


@pytest.mark.slow
def test_measured_mode_plans_when_everything_was_measured() -> None:
    profile = measured(wanted())
    found = planned(profile, "measured")
    assert found.prediction.step_seconds == planned(profile).prediction.step_seconds


def test_what_was_measured_is_not_asked_for_again() -> None:
    first = wanted()
    assert len(first.ops) == first.num_asked
    again = wanted_beside(measured(first))
    assert again.ops == ()
    half = measured(first, ops=0.5)
    left = {op.case for op in wanted_beside(half).ops}
    assert left >= {op.case for op in first.ops} - set(half.ops)


def test_what_the_winner_spends_most_on_is_among_the_first() -> None:
    found = wanted()
    own = CostQueries()
    evaluate(GRAPH, BLOCKS, analytic(), ON, basis=Basis(asked=own))
    longest = max(own.ops.values(), key=lambda op: op.seconds)
    assert longest.case in {op.case for op in found.ops[: len(found.ops) // 4]}


def test_more_layers_of_one_kind_ask_for_nothing_more() -> None:
    deep, blocks = mlp(9, rows=4)
    forced = replace(REQUEST, forced=Forced(dp=2, tp=2))
    shallow = asked_cases(GRAPH, BLOCKS, ON, forced)
    found = asked_cases(deep, blocks, ON, forced)
    assert {op.case for op in found.ops} == {op.case for op in shallow.ops}


@pytest.mark.slow
def test_a_plan_from_an_imported_profile_is_the_same(tmp_path: object) -> None:
    profile = measured(wanted())
    path = f"{tmp_path}/profile.jsonl"
    with Database(":memory:") as first, Database(":memory:") as second:
        for case, measurement in profile.ops.items():
            first.put(HERE, case, measurement)
        for transfer in profile.transfers:
            first.put_transfer(HERE, transfer)
        first.export_file(path)
        second.import_file(path)
        taken = Profile(HERE, second.all(HERE), second.all_transfers(HERE))
    one, other = planned(profile), planned(taken)
    assert replace(other, solver=one.solver) == one
