"""From compute orders to whole tables: the sends, the receives and the step, by one rule.

A result is sent right after it is computed. A receive is posted before the forward or backward
that needs its message, or before one of the last ``MOST_AHEAD`` before that, if by then the
message has been sent when every forward takes 1 and every backward 2. So the table runs to its
end where a posted receive holds up all that is behind it on its rank until it is served, as it
may on a GPU: that run is one that serves each receive at once, and as only receives wait, what
one run completes every run does. Where the backward is a little late the message is nevertheless
under way while its receiver computes.

Where a stage needs several others, one receive stands for all of them.
"""

from __future__ import annotations

import sys
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
    ActionKind,
    Edges,
    Row,
    Table,
    Wiring,
    chain,
)

MOST_AHEAD = 2
"""How many forwards and backwards before its use a receive may be posted."""

WAITING = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD))
"""What may need a message first."""

UNITS: Mapping[ActionKind, int] = {
    FORWARD: 1, BACKWARD: 2, INPUT_BACKWARD: 1, WEIGHT_BACKWARD: 1,
}  # fmt: skip

NEVER = sys.maxsize

Result = tuple[bool, int, int, int]
"""What a compute action makes for other ranks: whether gradients, the stage, micro-batch, slice."""


def complete(
    orders: Table, *, edges: Edges | None = None, parts: Sequence[int] = ()
) -> tuple[tuple[int, ...], Table]:
    """The owner of each stage and the table of compute ``orders`` with all else added.

    ``parts``: see ``Schedule``. Rows that have a STEP already get none.
    """
    owner = {action.stage: rank for rank, row in enumerate(orders) for action in row}
    stage_rank = tuple(owner[stage] for stage in range(len(owner)))
    ties = _Ties.of(
        stage_rank, Wiring.of(len(owner), chain(len(owner)) if edges is None else edges)
    )
    runs = _run(orders, ties)
    table = tuple(
        _with_step(_with_messages(row, run, ties), parts)
        for row, run in zip(orders, runs, strict=True)
    )
    return stage_rank, table


class _Ties(NamedTuple):
    """By stage, the stages of other ranks that it needs, and those that need it."""

    before: tuple[tuple[int, ...], ...]
    behind: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(stage_rank: tuple[int, ...], wiring: Wiring) -> _Ties:
        before, behind = (
            tuple(
                tuple(each for each in own if stage_rank[each] != stage_rank[stage])
                for stage, own in enumerate(side)
            )
            for side in wiring
        )
        return _Ties(before, behind)

    def needs(self, kind: ActionKind, stage: int) -> tuple[int, ...]:
        """The stages of other ranks whose results such an action of ``stage`` waits for."""
        if kind == FORWARD:
            return self.before[stage]
        return self.behind[stage] if kind in WAITING else ()

    def takers(self, kind: ActionKind, stage: int) -> tuple[int, ...]:
        """The stages of other ranks that wait for the result of such an action of ``stage``."""
        if kind == FORWARD:
            return self.behind[stage]
        return self.before[stage] if kind in WAITING else ()


class _Run(NamedTuple):
    """By position in a row, when its action begins, and when what it waits for has been sent."""

    begins: list[int]
    sent: list[int]


def _run(orders: Table, ties: _Ties) -> list[_Run]:
    """The run of the compute orders where messages take no time; of a deadlock its beginning."""
    runs = [_Run([], []) for _ in orders]
    clocks = [0] * len(orders)
    made: dict[Result, int] = {}
    waiting: dict[Result, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        row, (begins, sent), clock = orders[rank], runs[rank], clocks[rank]
        for position in range(len(begins), len(row)):
            kind, stage, m, part = row[position]
            is_gradient = kind != FORWARD
            needs = ties.needs(kind, stage)
            ends = [made.get((is_gradient, each, m, part), NEVER) for each in needs]
            last = max(ends, default=0)
            if last == NEVER:
                missing = (is_gradient, needs[ends.index(NEVER)], m, part)
                waiting.setdefault(missing, []).append(rank)
                break
            sent.append(last)
            begins.append(max(clock, last))
            clock = begins[-1] + UNITS.get(kind, 0)
            if ties.takers(kind, stage):
                result = (is_gradient, stage, m, part)
                made[result] = clock
                ready += waiting.pop(result, ())
        clocks[rank] = clock
    return runs


def _with_messages(row: Row, run: _Run, ties: _Ties) -> list[Action]:
    """The compute actions, their receives before them and their sends right after."""
    begins, sent = run
    posts: dict[int, list[Action]] = {}
    latest: list[int] = []
    for position, (kind, stage, m, part) in enumerate(row):
        if kind not in WAITING:
            continue
        if ties.needs(kind, stage):
            place = position
            for earlier in reversed(latest[-MOST_AHEAD:]):
                if position >= len(begins) or begins[earlier] < sent[position]:
                    break
                place = earlier
            receive = RECV_FORWARD if kind == FORWARD else RECV_BACKWARD
            posts.setdefault(place, []).append(Action(receive, stage, m, part))
        latest.append(position)
    actions: list[Action] = []
    for position, compute in enumerate(row):
        actions += posts.get(position, ())
        actions.append(compute)
        kind, stage, m, part = compute
        if ties.takers(kind, stage):
            send = SEND_FORWARD if kind == FORWARD else SEND_BACKWARD
            actions.append(Action(send, stage, m, part))
    return actions


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
