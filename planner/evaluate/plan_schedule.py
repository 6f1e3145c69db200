"""The schedule that a plan runs: the actions of each rank, and messages between stages.

In: a plan, and the dependences between stages. Out: the schedule's table, complete with the
messages between stages on different devices.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ...cost_model.simulator.actions import (
    INPUT_BACKWARD,
    RECV_FORWARD,
    SEND_FORWARD,
    Action,
    Schedule,
    compute_only,
)
from ..plan import Plan
from ..schedules.messages import complete
from ..schedules.schedules import build_schedule
from ..stage.branches import reduce_edges


def schedule_of(plan: Plan, crossing: Set[tuple[int, int]]) -> Schedule:
    """Build the plan's schedule. ``crossing``: (earlier stage, later stage) pairs where a value
    computed in the earlier stage is read in the later.

    If a value skips stages, and no neighbouring stages connect their ranks, each pair has messages
    of its own.
    """
    num_stages = len(plan.stages)
    schedule = build_schedule(
        plan.schedule,
        num_stages,
        plan.num_microbatches,
        num_chunks=plan.num_chunks,
        edges=reduce_edges(set(crossing), num_stages),
        slices=plan.slices,
    )
    if _carries(schedule, crossing):
        return schedule
    edges = tuple(sorted(crossing))
    orders = tuple(compute_only(row) for row in schedule.table)
    return replace(schedule, table=complete(orders, edges=edges)[1], edges=edges)


def splits_backward(schedule: Schedule, stage: int) -> bool:
    """Return whether a stage computes input gradients and weight gradients in separate actions."""
    row = schedule.table[schedule.stage_rank[stage]]
    return any(action.kind == INPUT_BACKWARD and action.stage == stage for action in row)


def updating_plan(plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan of a single weight update, a part of the step if the schedule is
    asynchronous. Sums over micro-batches (``Graph.accumulation``) then cover one update only."""
    count = schedule.per_update
    model = replace(plan.model, global_batch=plan.microbatch_size * count)
    return replace(plan, num_microbatches=count, model=model)


def _carries(schedule: Schedule, crossing: Set[tuple[int, int]]) -> bool:
    """Return whether the schedule sends and receives every value that passes between ranks."""
    ranks = schedule.stage_rank
    known = {action for row in schedule.table for action in row if action.microbatch == 0}
    return all(
        Action(SEND_FORWARD, source, 0) in known and Action(RECV_FORWARD, target, 0) in known
        for source, target in crossing
        if ranks[source] != ranks[target]
    )
