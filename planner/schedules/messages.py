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
    """Add receives, sends, REDUCE and STEP to ``orders``; return (rank of each stage, table).

    A receive is posted ``ahead`` forwards and backwards before the action that needs it. ``edges``:
    (producer, consumer) stages, a chain by default. ``parts``: part of the model that each stage
    holds, if several stages hold one. Rows that have a STEP already get no further one.
    """
    owner = {action.stage: rank for rank, row in enumerate(orders) for action in row}
    stage_rank = tuple(owner[stage] for stage in range(len(owner)))
    wiring = Wiring.of(len(owner), chain(len(owner)) if edges is None else edges)
    remote = wiring.between_ranks(stage_rank)
    table = tuple(_with_step(_with_messages(row, remote, ahead), parts) for row in orders)
    return stage_rank, table


def _with_messages(row: Row, remote: Wiring, ahead: int) -> list[Action]:
    """Return a rank's row with receives before and sends after its compute actions. ``remote``
    connects stages of different ranks only; ``ahead``: how many actions earlier to post
    receives."""
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
    """Yield, for each forward and backward of a row, the receive of its input, or None if its input
    comes from the same rank."""
    for kind, stage, m, part in row:
        if kind in WAITING:
            needs = remote.producers[stage] if kind == FORWARD else remote.consumers[stage]
            receive = RECV_FORWARD if kind == FORWARD else RECV_BACKWARD
            yield Action(receive, stage, m, part) if needs else None


def _with_step(row: Sequence[Action], parts: Sequence[int]) -> Row:
    """Return a row followed by a REDUCE, then a STEP, of each trained stage; unchanged if it has a
    STEP.

    A reduction may wait for other ranks: those that share a parameter or hold a replica of the
    stage. So it comes after all other actions, and all ranks reduce the ``parts`` in the same
    order.
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
