"""The objective of a plan, and the other parts of the cluster that were planned."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from autoparallel.options.words import bytes_text, count_text, seconds_text
from autoparallel.planner.plan import GoalReport, Plan, Tried

TITLES = {
    "time": "Cost",
    "cost": "Objective: most tokens per dollar",
    "memory": "Objective: least memory",
    "devices": "Objective: fewest devices",
}

SHOWN = 12
"""Maximum number of listed parts of the cluster."""


def goal_title(goal: GoalReport) -> str:
    """Return the title of the plan's objective."""
    return TITLES[goal.objective]


def goal_lines(plan: Plan) -> RenderableType:
    """Return the choice, its price, and the tried parts of the cluster."""
    goal = plan.goal
    assert goal is not None, "asked for only where there is one"
    unit = "tokens" if plan.model.seq else "samples"
    lines = [f"chosen: {goal.chosen}"]
    if goal.dollars_per_hour is not None and goal.tokens_per_dollar is not None:
        lines.append(
            f"{count_text(goal.tokens_per_dollar)} {unit} per dollar at "
            f"${goal.dollars_per_hour:,.2f} an hour"
        )
    if goal.deadline_step_seconds is not None:
        lines.append(f"deadline: {seconds_text(goal.deadline_step_seconds)} per step")
    lines += [_tried_line(each, goal, unit) for each in goal.tried[:SHOWN]]
    left = len(goal.tried) - SHOWN
    lines += [f"and {left} more (--json has all)"] if left > 0 else []
    return Group(*(Text(line) for line in lines))


def _tried_line(tried: Tried, goal: GoalReport, unit: str) -> str:
    if not tried.step_seconds:
        return f"  {tried.name}: {tried.reason}"
    value = ""
    if tried.value is not None and goal.objective == "memory":
        value = f", {bytes_text(tried.value)}"
    elif tried.value is not None:
        value = f", {count_text(tried.value)} {unit} per dollar"
    reason = f"; {tried.reason}" if tried.reason else ""
    return f"  {tried.name}: step {seconds_text(tried.step_seconds)}{value}{reason}"
