"""From compute orders to whole tables: the sends, the receives and the step, by one rule.

A result is sent right after it is computed, and a receive is posted ``prefetch`` forwards
and backwards before its use, so that the message is in flight while its receiver computes. The
receives of one sender are posted in the order of its sends, earlier ones first. Nothing in
a row waits but a compute action for its own receives, so a table whose compute orders can
run cannot deadlock. Where a stage needs several others, one receive stands for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...cost_model.actions import (
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
    Edges,
    Row,
    Table,
    Wiring,
    chain,
    matching_receives,
)

WAITING = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD))
"""What may need a message first."""

Receives = Mapping[int, deque[Action]]
"""By sending rank: the receives of its messages to one rank, in the order they are sent."""


def complete(
    orders: Table, *, prefetch: int, edges: Edges | None = None, parts: Sequence[int] = ()
) -> tuple[tuple[int, ...], Table]:
    """The owner of each stage and the table of compute ``orders`` with all else added.

    ``parts``: see ``Schedule``. Rows that have a STEP already get none.
    """
    owner = {action.stage: rank for rank, row in enumerate(orders) for action in row}
    stage_rank = tuple(owner[stage] for stage in range(len(owner)))
    ties = _Ties.of(
        stage_rank, Wiring.of(len(owner), chain(len(owner)) if edges is None else edges)
    )
    sends = [[ties.send(compute) for compute in row] for row in orders]
    receives: list[dict[int, deque[Action]]] = [{} for _ in orders]
    for rank, row in enumerate(sends):
        for send in row:
            if send is not None:
                for receive in matching_receives(send, ties.wiring):
                    receives[stage_rank[receive.stage]].setdefault(rank, deque()).append(receive)
    table = tuple(
        _with_step(_with_messages(row, sends[rank], receives[rank], ties, prefetch=prefetch), parts)
        for rank, row in enumerate(orders)
    )
    return stage_rank, table


class _Ties(NamedTuple):
    """Who owns each stage, which stages need which, and by stage the other ranks that own any of
    those that it needs and of those that need it."""

    stage_rank: tuple[int, ...]
    wiring: Wiring
    before: tuple[tuple[int, ...], ...]
    behind: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(stage_rank: tuple[int, ...], wiring: Wiring) -> _Ties:
        before, behind = (
            tuple(
                tuple(stage_rank[each] for each in own if stage_rank[each] != stage_rank[stage])
                for stage, own in enumerate(side)
            )
            for side in wiring
        )
        return _Ties(stage_rank, wiring, before, behind)

    def receive(self, compute: Action) -> tuple[Action | None, tuple[int, ...]]:
        """What ``compute`` has to wait for and from whom, if it comes from other ranks."""
        kind, stage, m, part = compute
        if kind == FORWARD and self.before[stage]:
            return Action(RECV_FORWARD, stage, m, part), self.before[stage]
        if kind in (BACKWARD, INPUT_BACKWARD) and self.behind[stage]:
            return Action(RECV_BACKWARD, stage, m, part), self.behind[stage]
        return None, ()

    def send(self, compute: Action) -> Action | None:
        """What leaves for other ranks once ``compute`` is done."""
        kind, stage, m, part = compute
        if kind == FORWARD:
            return Action(SEND_FORWARD, stage, m, part) if self.behind[stage] else None
        if kind in (BACKWARD, INPUT_BACKWARD) and self.before[stage]:
            return Action(SEND_BACKWARD, stage, m, part)
        return None


def _with_messages(
    row: Row,
    sends: Sequence[Action | None],
    receives: Receives,
    ties: _Ties,
    *,
    prefetch: int,
) -> list[Action]:
    """The compute actions with their receives posted ahead and their sends right after."""
    actions: list[Action] = []
    early: set[Action] = set()
    places = [at for at, action in enumerate(row) if action.kind in WAITING]
    posted = begun = 0
    for position, compute in enumerate(row):
        begun += compute.kind in WAITING
        for at in places[posted : begun + prefetch]:
            wanted, sources = ties.receive(row[at])
            if wanted is not None and wanted not in early:
                for source in dict.fromkeys(sources):
                    _post_before(wanted, receives[source], actions, early)
                actions.append(wanted)
                early.add(wanted)
        posted = max(posted, min(len(places), begun + prefetch))
        actions.append(compute)
        send = sends[position]
        if send is not None:
            actions.append(send)
    return actions


def _post_before(
    wanted: Action, queue: deque[Action], actions: list[Action], early: set[Action]
) -> None:
    """Posts the receives of one sender whose messages come before that of ``wanted``."""
    while (receive := queue.popleft()) != wanted:
        if receive not in early:
            actions.append(receive)
            early.add(receive)


def _with_step(row: Sequence[Action], parts: Sequence[int]) -> Row:
    """REDUCE and then STEP of each trained stage, after all else.

    A reduction may wait for other ranks (parameters that several stages hold, replicas of a
    stage), so nothing that those ranks wait for comes after it, and all ranks take the parts
    of the model in the same order.
    """
    if any(action.kind == STEP for action in row):
        return tuple(row)
    trained = sorted(
        {a.stage for a in row if a.kind in (BACKWARD, WEIGHT_BACKWARD)},
        key=lambda stage: parts[stage] if parts else stage,
    )
    return (
        *row,
        *(Action(REDUCE, stage) for stage in trained),
        *(Action(STEP, stage) for stage in trained),
    )
