"""The drawing of a plan's step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import flat_plan, pipeline_plan
from small_graphs import cluster, mlp

from autoparallel import describe
from autoparallel.cost_model.simulator.timeline_text import draw
from autoparallel.planner.find_plan import plan as find_plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.report.drawing import legend, timeline_of


def two_stages() -> Plan:
    """Forward 1, backward 2, four micro-batches, 1F1B: (4 + 1) · 3 seconds."""
    plan = pipeline_plan()
    seconds = {"forward": 1.0, "backward": 2.0}
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, seconds=seconds))
        for stage in plan.stages
    )
    prediction = replace(plan.prediction, step_seconds=15.0)
    return replace(plan, stages=stages, prediction=prediction, num_microbatches=4, schedule="1f1b")


def test_the_step_is_drawn_action_by_action() -> None:
    """Rank 0 runs two forwards ahead; rank 1 is never without work from 1 to 13."""
    timeline = timeline_of(two_stages())
    assert timeline is not None
    assert list(draw(timeline, 15)) == [
        "rank 0  FF..BBFBBFBB.BB",
        "rank 1  .FBBFBBFBBFBB..",
    ]


def test_a_step_that_takes_something_else_is_not_drawn() -> None:
    plan = two_stages()
    slower = replace(plan, prediction=replace(plan.prediction, step_seconds=16.0))
    assert timeline_of(slower) is None
    assert timeline_of(flat_plan()) is None


def test_the_report_has_the_drawing_at_80_columns() -> None:
    text = describe(two_stages())
    assert "Timeline of a step (F forward, B backward)" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_split_backward_is_drawn_by_its_own_weight_gradients(schedule: str) -> None:
    """Whose seconds are not half of the backward's: the plan says what they are."""
    forced = Forced(pp=4, schedule=schedule, num_microbatches=8)
    slow = cluster(4, bytes_per_second=1e6, flops=1e6)
    found = find_plan(*mlp(8, rows=8), slow, Request(8, forced=forced))
    seconds = [stage.prediction.seconds for stage in found.stages]
    assert all(0 < own["weight_gradients"] < own["backward"] for own in seconds)
    timeline = timeline_of(found)
    assert timeline is not None
    assert timeline.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)


def test_signs_are_explained_where_they_are_drawn() -> None:
    assert legend("rank 0  FFBB") == ""
    assert legend("rank 10  gFFWW") == "W weights' gradients, g parameters gathered"
    assert legend("rank 0  Ff..\n     …  2 more") == (
        ". waiting, small letters: every second stage of a rank"
    )
