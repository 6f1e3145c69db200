"""The drawing of a plan's step."""

from __future__ import annotations

from dataclasses import replace

from handmade import flat_plan, pipeline_plan

from autoparallel import describe
from autoparallel.planner.plan import Plan
from autoparallel.report.drawing import drawing


def two_stages() -> Plan:
    """Forward 1, backward 2, four micro-batches, 1F1B: (4 + 1) · 3 seconds."""
    plan = pipeline_plan()
    seconds = {"forward": 1.0, "backward": 2.0}
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, seconds=seconds))
        for stage in plan.stages
    )
    prediction = replace(plan.prediction, step_seconds=15.0)
    return replace(
        plan, stages=stages, prediction=prediction, num_microbatches=4, schedule="1f1b"
    )  # fmt: skip


def test_the_step_is_drawn_action_by_action() -> None:
    """Rank 0 runs two forwards ahead; rank 1 is never without work from 1 to 13."""
    assert drawing(two_stages(), 15) == (
        "rank 0  FF..BBFBBFBB.BB\nrank 1  .FBBFBBFBBFBB.."
    )  # fmt: skip


def test_a_step_that_takes_something_else_is_not_drawn() -> None:
    plan = two_stages()
    slower = replace(plan, prediction=replace(plan.prediction, step_seconds=16.0))
    assert drawing(slower, 15) is None
    assert drawing(flat_plan(), 15) is None


def test_the_report_has_the_drawing_at_80_columns() -> None:
    text = describe(two_stages())
    assert "Timeline of a step (F forward, B backward)" in text
    assert max(map(len, text.splitlines())) <= 80
