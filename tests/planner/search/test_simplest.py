"""Of plans within the tolerance of the fastest the simplest is taken, and the report says so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import one_stage
import pytest
from small_graphs import cluster, mlp

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.errors import UsageError
from autoparallel.planner.find_plan import plan, run_proposers
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.candidates import Candidate
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool
from autoparallel.planner.search.simplest import Shape, shape_of, simplest_of

GRAPH, BLOCKS = mlp(6, rows=8)
ON = cluster(2)
REQUEST = Request(8)


@cache
def planned(tolerance: float, forced: Forced | None = None) -> Plan:
    return plan(GRAPH, BLOCKS, ON, replace(REQUEST, tolerance=tolerance, forced=forced or Forced()))


def test_shapes_are_compared_by_their_weightiest_difference() -> None:
    looped, pipeline, plain, idle = (
        Shape(False, 2, 2, 5, 0, 0, 0, False),
        Shape(False, 1, 2, 0, 0, 0, 0, False),
        Shape(False, 1, 1, 0, 1, 3, 4, False),
        Shape(True, 1, 1, 0, 0, 0, 0, False),
    )
    within = plain._replace(replicated_shards=True)
    expected = [plain, within, pipeline, looped, idle]
    assert sorted([idle, looped, within, pipeline, plain]) == expected


@cache
def ranked() -> tuple[SearchContext, list[Candidate]]:
    return one_stage.ranked(GRAPH, BLOCKS, ON, REQUEST)


def pool_of(*steps_and_kinds: tuple[float, str]) -> tuple[SearchContext, CandidatePool]:
    """A pool of candidates that take so long, with one stage or a pipeline of two."""
    job, found = ranked()
    by_kind = {"single": 1, "pipeline": 2}
    pool = CandidatePool(job)
    for seconds, kind in steps_and_kinds:
        like = next(each for each in found if len(each.stages) == by_kind[kind])
        pool.add(replace(like, step_seconds=seconds))
    return job, pool


def test_only_what_is_within_the_tolerance_is_equal_and_the_edge_counts() -> None:
    for seconds, expected in ((1.02, 1.02), (1.0201, 1.0)):
        job, pool = pool_of((1.0, "pipeline"), (seconds, "single"))
        winner, why = simplest_of(job, pool, 0.02)
        assert winner.step_seconds == expected
        assert (why is None) == (expected == 1.0)
    job, pool = pool_of((1.0, "pipeline"), (1.01, "single"))
    assert simplest_of(job, pool, 0.0) == (pool.ranked()[0], None)


def test_of_equally_simple_ones_the_faster_is_chosen() -> None:
    job, pool = pool_of((1.1, "single"), (1.0, "single"))
    winner, why = simplest_of(job, pool, 0.5)
    assert winner.step_seconds == 1.0
    assert why is None


@cache
def searched() -> tuple[SearchContext, CandidatePool]:
    job = SearchContext.of(GRAPH, BLOCKS, ON, REQUEST, rules=rules, basis=DEFAULT)
    return job, run_proposers(job)


@pytest.mark.parametrize("tolerance", [0.02, 0.5, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_plan_is_no_slower_than_the_tolerance_allows_and_no_less_simple(
    tolerance: float,
) -> None:
    job, pool = searched()
    (fastest, _), (simple, why) = (simplest_of(job, pool, share) for share in (0.0, tolerance))
    assert simple.step_seconds <= fastest.step_seconds * (1 + tolerance)
    assert shape_of(simple) <= shape_of(fastest)
    assert (why is None) == (simple is fastest)
    assert planned(tolerance).prediction.step_seconds == pytest.approx(simple.step_seconds)


def test_the_fastest_stays_among_the_alternatives() -> None:
    fastest, simple = planned(0.0), planned(0.5)
    why = simple.solver.simplest
    assert why is not None  # half as long again: something simpler is in reach
    assert why.fastest_seconds == pytest.approx(fastest.prediction.step_seconds)
    assert min(each.step_seconds for each in simple.alternatives) == pytest.approx(
        fastest.prediction.step_seconds
    )
    assert fastest.solver.simplest is None


def test_what_is_forced_is_kept_whatever_is_simpler() -> None:
    found = planned(0.5, Forced(pp=2, num_microbatches=8, schedule="zb-h1"))
    assert (len(found.stages), found.num_microbatches, found.schedule) == (2, 8, "zb-h1")


def test_why_a_plan_was_chosen_survives_its_file() -> None:
    found = planned(0.5)
    assert loads(dumps(found)).solver.simplest == found.solver.simplest


@pytest.mark.parametrize("tolerance", [-0.1, 1.0])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    with pytest.raises(UsageError) as caught:
        replace(REQUEST, tolerance=tolerance)
    assert caught.value.code == "AP841"
