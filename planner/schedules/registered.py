"""Schedules that users register, and the checks of their tables.

In: a ``ScheduleInfo`` whose ``orders`` call a user's function. Out: the same with checked tables.
Requests and plans hold names, and every lookup is by name, so a process has one register of
schedules, as ``torch.library`` has one of ops. It is the planner's only state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from ...cost_model.simulator.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
    Row,
    Schedule,
    Table,
)
from ..errors import PlanError, UsageError
from .catalogue import ScheduleInfo, Size, stages_of_ranks
from .check import check_schedule
from .messages import complete

REGISTERED: dict[str, ScheduleInfo] = {}


def register(info: ScheduleInfo) -> None:
    """Add a schedule to this process's register; it replaces a schedule of the same name."""
    orders = lru_cache(maxsize=64)(partial(_checked_table, info))
    REGISTERED[info.name] = replace(info, orders=orders)


def registered_schedule(name: str | None) -> ScheduleInfo | None:
    """Return the registered schedule of this name, None if there is none."""
    return REGISTERED.get(name or "")


def _checked_table(info: ScheduleInfo, size: Size) -> Table:
    """Return the table that a user's schedule orders. Raises UsageError AP159 if it is not a
    correct training step."""
    table = info.orders(size)
    if len(table) != size.num_ranks:
        raise _fault(info, size, f"it has {len(table)} rows", fix="a row for each rank")
    placed = stages_of_ranks(size.num_ranks, size.num_chunks, is_v=info.is_v)
    for rank, (row, stages) in enumerate(zip(table, placed, strict=True)):
        _check_row(info, size, rank, row, stages)
    try:
        check_schedule(Schedule(info.name, size.num_microbatches, *complete(table)))
    except PlanError as error:
        what = error.what.removeprefix(f"schedule {info.name!r}: ")
        why, fix = error.why, "each stage has F, then B (or I, then W), of each micro-batch once"
        if what == "deadlock":
            what, fix = f"deadlock, {why}", "an order in which one of these ranks can go on"
            why = "RECV_F waits for F of the stage before, RECV_B for B or I of the stage after"
        raise _fault(info, size, what, why, fix) from error
    return table


def _check_row(info: ScheduleInfo, size: Size, rank: int, row: Row, stages: Sequence[int]) -> None:
    """Raise UsageError AP159 if the row of a user's schedule has an action that it must not have,
    or lacks a forward or backward of one of the rank's ``stages``."""
    backward = INPUT_BACKWARD if info.splits_backward else BACKWARD
    for action in row:
        why = fix = ""
        if action.kind not in COMPUTE or action.slice:
            why, fix = "messages, REDUCE and STEP are added by a rule", "F, B, I and W only"
        elif action.stage not in stages:
            why, fix = f"its stages are {', '.join(map(str, stages))}", "only these in its row"
        elif action.kind in (INPUT_BACKWARD, WEIGHT_BACKWARD) and not info.splits_backward:
            why, fix = "backwards are whole by default", "split_backward=True"
        if why:
            raise _fault(info, size, f"rank {rank} has {action}", why, fix)
    for action in (Action(kind, stage, 0) for stage in stages for kind in (FORWARD, backward)):
        if not any(other[:2] == action[:2] for other in row):
            why = "each stage splits some backwards" if info.splits_backward else ""
            raise _fault(info, size, f"{action} is missing", why, f"add it to rank {rank}")


def _fault(info: ScheduleInfo, size: Size, what: str, why: str = "", fix: str = "") -> UsageError:
    what = f"schedule {info.name!r} on {size_text(size)}: {what}"
    return UsageError("AP159", what, why=why, where=info.source, fix=fix)


def size_text(size: Size) -> str:
    """Describe the size of a schedule: its numbers of ranks, micro-batches, chunks."""
    chunks = f" of {size.num_chunks} chunks" if size.num_chunks > 1 else ""
    return f"{size.num_ranks} ranks{chunks} with {size.num_microbatches} micro-batches"
