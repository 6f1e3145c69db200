"""Pipeline schedules: the order in which each pipeline rank computes, as pure functions.

In: a schedule's name, how many stages and micro-batches. Out: the action table that the
checks, the simulator and the interpreter share. A schedule is defined by the order of its
compute actions alone; sends and receives are added here by one rule for all schedules: a
result is sent right after it is computed, and a receive is posted ``prefetch`` compute
actions before its use, so that the message is in flight while its receiver computes.
Nothing in a row waits but a compute action for its own receives, so a table whose
compute orders can run cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..cost_model.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECV_BACKWARD,
    RECV_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    STEP,
    WEIGHT_BACKWARD,
    Action,
    Row,
    Schedule,
    Table,
)
from .errors import UsageError

Orders = Callable[[int, int], Table]
"""(num_stages, num_microbatches) → the compute actions of each pipeline rank, in order."""

InFlight = Callable[[int, int, int], int]
"""(num_stages, num_microbatches, stage) → the most micro-batches whose activations it holds."""


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule by name: what it is, its compute orders, and what it holds in memory."""

    name: str
    description: str
    source: str
    orders: Orders
    in_flight: InFlight
    trains: bool = True


def _gpipe(num_stages: int, num_microbatches: int) -> Table:
    return tuple(
        tuple(Action(FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Action(BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )


def _one_forward_one_backward(
    stage: int, num_microbatches: int, *, warmup: int
) -> tuple[Action, ...]:
    """``warmup`` forwards, then forward and backward in turn, then the backwards left."""
    warmup = min(num_microbatches, warmup)
    steady = num_microbatches - warmup
    forwards = [Action(FORWARD, stage, m) for m in range(num_microbatches)]
    backwards = [Action(BACKWARD, stage, m) for m in range(num_microbatches)]
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *chain.from_iterable(pairs), *backwards[steady:])


def _1f1b(num_stages: int, num_microbatches: int) -> Table:
    return tuple(
        _one_forward_one_backward(stage, num_microbatches, warmup=num_stages - stage - 1)
        for stage in range(num_stages)
    )


def _eager_1f1b(num_stages: int, num_microbatches: int) -> Table:
    return tuple(
        _one_forward_one_backward(stage, num_microbatches, warmup=2 * (num_stages - stage - 1))
        for stage in range(num_stages)
    )


def _inference(num_stages: int, num_microbatches: int) -> Table:
    return tuple(
        tuple(Action(FORWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )


SCHEDULES: Mapping[str, ScheduleInfo] = {
    info.name: info
    for info in (
        ScheduleInfo(
            "gpipe",
            "all forwards, then all backwards",
            "Huang et al. 2019, GPipe, figure 2c",
            _gpipe,
            lambda num_stages, num_microbatches, stage: num_microbatches,
        ),
        ScheduleInfo(
            "1f1b",
            "one forward, one backward; memory does not grow with the micro-batches",
            "Narayanan et al. 2021, PipeDream-Flush, figure 2",
            _1f1b,
            lambda num_stages, num_microbatches, stage: min(num_microbatches, num_stages - stage),
        ),
        ScheduleInfo(
            "eager-1f1b",
            "1F1B with twice the warm-up, which hides the round trip of the messages",
            "Zhuang et al. 2023, arXiv:2211.05322, section 4",
            _eager_1f1b,
            lambda num_stages, num_microbatches, stage: min(
                num_microbatches, 2 * (num_stages - stage) - 1
            ),
        ),
        ScheduleInfo(
            "inference",
            "forwards only",
            "",
            _inference,
            lambda num_stages, num_microbatches, stage: 1,
            trains=False,
        ),
    )
}
"""Every schedule by its name, as ``--parallel schedule=`` takes it."""


def build_schedule(
    name: str, num_stages: int, num_microbatches: int, *, prefetch: int = 2
) -> Schedule:
    """The action table of the schedule ``name``.

    ``prefetch`` is how many compute actions ahead of its use a receive is posted: 2 posts the
    next one of each direction while forwards and backwards alternate. Raises UsageError for an
    unknown name or an empty pipeline.

    >>> from autoparallel.cost_model.actions import format_table
    >>> print(format_table(build_schedule("1f1b", 2, 2).table))
    0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1 0REDUCE 0STEP
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE 1STEP
    """
    if name not in SCHEDULES:
        raise UsageError(
            "AP150", f"there is no schedule named {name!r}", where="schedule",
            fix=f"use one of {', '.join(SCHEDULES)}",
        )  # fmt: skip
    if num_stages < 1 or num_microbatches < 1:
        raise UsageError(
            "AP151", f"a schedule of {num_stages} stages and {num_microbatches} micro-batches",
            why="a pipeline has at least one stage and one micro-batch", where="schedule",
        )  # fmt: skip
    orders = SCHEDULES[name].orders(num_stages, num_microbatches)
    stage_rank = _owners(orders, num_stages)
    table = tuple(
        _with_step(_with_communication(row, stage_rank, prefetch=prefetch)) for row in orders
    )
    return Schedule(name, num_microbatches, stage_rank, table)


def _owners(orders: Table, num_stages: int) -> tuple[int, ...]:
    owner = {action.stage: rank for rank, row in enumerate(orders) for action in row}
    return tuple(owner[stage] for stage in range(num_stages))


def _with_communication(row: Row, stage_rank: Sequence[int], *, prefetch: int) -> list[Action]:
    """The compute actions with their receives posted ahead and their sends right after."""
    actions: list[Action] = []
    posted = 0
    for position, compute in enumerate(row):
        for ahead in row[posted : position + prefetch + 1]:
            actions += _receive(ahead, stage_rank)
        posted = max(posted, min(len(row), position + prefetch + 1))
        actions.append(compute)
        actions += _send(compute, stage_rank)
    return actions


def _receive(compute: Action, stage_rank: Sequence[int]) -> list[Action]:
    """What ``compute`` has to wait for, if it comes from another rank."""
    stage, m = compute.stage, compute.microbatch
    if compute.kind == FORWARD and stage > 0 and stage_rank[stage - 1] != stage_rank[stage]:
        return [Action(RECV_FORWARD, stage, m)]
    if (
        compute.kind in (BACKWARD, INPUT_BACKWARD)
        and stage + 1 < len(stage_rank)
        and stage_rank[stage + 1] != stage_rank[stage]
    ):
        return [Action(RECV_BACKWARD, stage, m)]
    return []


def _send(compute: Action, stage_rank: Sequence[int]) -> list[Action]:
    """What leaves for another rank once ``compute`` is done."""
    stage, m = compute.stage, compute.microbatch
    last = len(stage_rank) - 1
    if compute.kind == FORWARD and stage < last and stage_rank[stage + 1] != stage_rank[stage]:
        return [Action(SEND_FORWARD, stage, m)]
    if (
        compute.kind in (BACKWARD, INPUT_BACKWARD)
        and stage > 0
        and stage_rank[stage - 1] != stage_rank[stage]
    ):
        return [Action(SEND_BACKWARD, stage, m)]
    return []


def _with_step(row: Sequence[Action]) -> Row:
    """REDUCE and then STEP of each trained stage, after all else.

    A reduction may wait for other ranks (parameters that several stages hold), so nothing
    that those ranks wait for comes after it.
    """
    trained = sorted({a.stage for a in row if a.kind in (BACKWARD, WEIGHT_BACKWARD)})
    return (
        *row,
        *(Action(REDUCE, stage) for stage in trained),
        *(Action(STEP, stage) for stage in trained),
    )
