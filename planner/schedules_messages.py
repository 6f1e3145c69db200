"""From compute orders to whole tables: the sends, the receives and the step, by one rule.

A result is sent right after it is computed, and a receive is posted ``prefetch`` compute
actions before its use, so that the message is in flight while its receiver computes. The
receives of one sender are posted in the order of its sends, earlier ones first. Nothing in
a row waits but a compute action for its own receives, so a table whose compute orders can
run cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

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
    Table,
    matching_receive,
)

Receives = Mapping[int, deque[Action]]
"""By sending rank: the receives of its messages to one rank, in the order they are sent."""


def complete(orders: Table, *, prefetch: int) -> tuple[tuple[int, ...], Table]:
    """The owner of each stage and the table of compute ``orders`` with all else added."""
    owner = {action.stage: rank for rank, row in enumerate(orders) for action in row}
    stage_rank = tuple(owner[stage] for stage in range(len(owner)))
    sends = [[_send(compute, stage_rank) for compute in row] for row in orders]
    receives: list[dict[int, deque[Action]]] = [{} for _ in orders]
    for rank, row in enumerate(sends):
        for send in row:
            if send is not None:
                receive = matching_receive(send)
                receives[stage_rank[receive.stage]].setdefault(rank, deque()).append(receive)
    table = tuple(
        _with_step(_with_messages(row, sends[rank], receives[rank], stage_rank, prefetch=prefetch))
        for rank, row in enumerate(orders)
    )
    return stage_rank, table


def _with_messages(
    row: Row,
    sends: Sequence[Action | None],
    receives: Receives,
    stage_rank: Sequence[int],
    *,
    prefetch: int,
) -> list[Action]:
    """The compute actions with their receives posted ahead and their sends right after."""
    actions: list[Action] = []
    early: set[Action] = set()
    posted = 0
    for position, compute in enumerate(row):
        for ahead in row[posted : position + prefetch + 1]:
            wanted, source = _receive(ahead, stage_rank)
            if wanted is not None:
                _post(wanted, receives[source], actions, early)
        posted = max(posted, min(len(row), position + prefetch + 1))
        actions.append(compute)
        send = sends[position]
        if send is not None:
            actions.append(send)
    return actions


def _post(wanted: Action, queue: deque[Action], actions: list[Action], early: set[Action]) -> None:
    """Posts a receive, after those of the same sender whose messages come before its own."""
    if wanted in early:
        return
    while (receive := queue.popleft()) != wanted:
        actions.append(receive)
        early.add(receive)
    actions.append(wanted)


def _receive(compute: Action, stage_rank: Sequence[int]) -> tuple[Action | None, int]:
    """What ``compute`` has to wait for and from whom, if it comes from another rank."""
    kind, stage, m = compute
    if kind == FORWARD and stage > 0 and stage_rank[stage - 1] != stage_rank[stage]:
        return Action(RECV_FORWARD, stage, m), stage_rank[stage - 1]
    if (
        kind in (BACKWARD, INPUT_BACKWARD)
        and stage + 1 < len(stage_rank)
        and stage_rank[stage + 1] != stage_rank[stage]
    ):
        return Action(RECV_BACKWARD, stage, m), stage_rank[stage + 1]
    return None, -1


def _send(compute: Action, stage_rank: Sequence[int]) -> Action | None:
    """What leaves for another rank once ``compute`` is done. Without backwards, forwards only."""
    kind, stage, m = compute
    last = len(stage_rank) - 1
    if kind == FORWARD and stage < last and stage_rank[stage + 1] != stage_rank[stage]:
        return Action(SEND_FORWARD, stage, m)
    if (
        kind in (BACKWARD, INPUT_BACKWARD)
        and stage > 0
        and stage_rank[stage - 1] != stage_rank[stage]
    ):
        return Action(SEND_BACKWARD, stage, m)
    return None


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
