"""Of plans within the tolerance of the fastest the simplest is taken, and the report says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import cluster, mlp

from autoparallel.planner.errors import UsageError
from autoparallel.planner.find_plan import plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.simplest import Shape, equals, shape_of_plan, simplest_first

GRAPH, BLOCKS = mlp(6, rows=16)
ON = cluster(2)
REQUEST = Request(16)


def planned(tolerance: float, forced: Forced | None = None) -> Plan:
    return plan(GRAPH, BLOCKS, ON, replace(REQUEST, tolerance=tolerance, forced=forced or Forced()))


def test_shapes_are_compared_by_their_weightiest_difference() -> None:
    looped, pipeline, plain = (
        Shape(2, 2, 5, 0, 0, 0, 8),
        Shape(1, 2, 0, 0, 0, 0, 8),
        Shape(1, 1, 0, 1, 3, 4, 16),
    )
    assert sorted([looped, pipeline, plain]) == [plain, pipeline, looped]
    assert looped.more_than(pipeline) == "more stages per rank"
    assert plain.more_than(pipeline) == ""


def test_only_what_is_within_the_tolerance_is_equal_and_the_edge_counts() -> None:
    assert equals([1.0, 1.02, 1.0201], float, 0.02) == [1.0, 1.02]
    assert equals([1.0, 1.02], float, 0.0) == [1.0]


def test_of_equally_simple_ones_the_faster_comes_first() -> None:
    alike = Shape(1, 1, 0, 1, 0, 0, 1)
    assert simplest_first([1.1, 1.0], float, lambda _: alike) == [1.0, 1.1]


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.5])
def test_a_plan_is_no_slower_than_the_tolerance_allows_and_no_less_simple(
    tolerance: float,
) -> None:
    fastest, simple = planned(0.0), planned(tolerance)
    most = fastest.prediction.step_seconds * (1 + tolerance)
    assert simple.prediction.step_seconds <= most * (1 + 1e-9)
    assert shape_of_plan(simple) <= shape_of_plan(fastest)


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
