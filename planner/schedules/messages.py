"""Completion of compute orders to tables: sends, receives and the step are added by one rule.

A result is sent right after it is computed, and a receive is posted right before the forward or
backward that needs its message. So the table completes even if a posted receive blocks all later
actions of its rank until it is served, as it may on a GPU. Receives may be posted several forwards
and backwards ahead, which hides more of the messages but requires devices whose later work can
overtake a receive. If a stage needs messages of several stages, one receive stands for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ...cost_model.simulator.actions import (
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
)

WAITING = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD))
"""Kinds of actions that may need a message first."""


def complete(
    orders: Table, *, ahead: int = 0, edges: Edges | None = None, parts: Sequence[int] = ()
) -> tuple[tuple[int, ...], Table]:
    """Return (rank of each stage, table): ``orders`` with receives, sends, REDUCE and STEP added.

    A receive is posted ``ahead`` forwards and backwards before the action that needs it. ``parts``:
    see ``Schedule``. Rows that already have a STEP get no further one.
    """
    owner = {action.stage: rank for rank, row in enumerate(orders) for action in row}
    stage_rank = tuple(owner[stage] for stage in range(len(owner)))
    wiring = Wiring.of(len(owner), chain(len(owner)) if edges is None else edges)
    remote = wiring.between_ranks(stage_rank)
    table = tuple(_with_step(_with_messages(row, remote, ahead), parts) for row in orders)
    return stage_rank, table


def _with_messages(row: Row, remote: Wiring, ahead: int) -> list[Action]:
    """Return a row with receives before and sends after its compute actions.

    ``remote`` connects stages of different ranks only.
    """
    receives = deque(_receives(row, remote))
    first = [receives.popleft() for _ in range(min(ahead, len(receives)))]
    actions = [receive for receive in first if receive is not None]
    for action in row:
        kind, stage, m, part = action
        if kind not in WAITING:
            actions.append(action)
            continue
        receive = receives.popleft() if receives else None
        if receive is not None:
            actions.append(receive)
        actions.append(action)
        if remote.consumers[stage] if kind == FORWARD else remote.producers[stage]:
            send = SEND_FORWARD if kind == FORWARD else SEND_BACKWARD
            actions.append(Action(send, stage, m, part))
    return actions


def _receives(row: Row, remote: Wiring) -> Iterator[Action | None]:
    """Yield, for each forward and backward of a row, its receive, or None if it needs none."""
    for kind, stage, m, part in row:
        if kind in WAITING:
            needs = remote.producers[stage] if kind == FORWARD else remote.consumers[stage]
            receive = RECV_FORWARD if kind == FORWARD else RECV_BACKWARD
            yield Action(receive, stage, m, part) if needs else None


def _with_step(row: Sequence[Action], parts: Sequence[int]) -> Row:
    """Return a row with REDUCE, then STEP, of each trained stage appended.

    A reduction may wait for other ranks (for parameters that several stages hold, or replicas of a
    stage). So it comes after all actions that those ranks wait for, and all ranks reduce the parts
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
