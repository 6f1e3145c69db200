"""One rank's row of the action table, made ready to run.

In: the schedule and the stages of a rank. Out: its actions, each with what the interpreter
would else work out anew in every step: the names of its values, what a watchdog is told. In a
pipeline of small stages that is as much work as sending the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cost_model.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_BACKWARD,
    RECV_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    STEP,
    Action,
    ActionKind,
    Row,
    Schedule,
    last_before_reduce,
)
from ..planner.errors import PlanError

if TYPE_CHECKING:
    from .exchange import Direction

Key = tuple["Direction", int, int]
"""The direction of values, the stage, and the unit: what is computed and sent at once, a
micro-batch or a slice of one."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An action of this rank.

    ``key`` names the values that it takes, makes or sends. ``is_last``: it gives its stage's
    weights gradients last before they are reduced; or, of REDUCE, no other follows.
    ``is_sent``: the row sends what it computes. ``doing`` and ``waiting`` are what a watchdog is
    told before it is done, and before its messages are waited for.
    """

    action: Action
    is_last: bool
    is_sent: bool
    key: Key
    doing: str
    waiting: str


def prepare(schedule: Schedule, stages: frozenset[int]) -> tuple[Prepared, ...]:
    """The row of a rank that works for these stages; empty for none.

    Raises PlanError AP541 where the schedule gives a rank other stages than those together.
    """
    row = _row_of(schedule, stages)
    sends = frozenset(action for action in row if action.kind in SENDS)
    lasts = last_before_reduce(row) | _last_reduce(row)
    return tuple(
        Prepared(
            action=action,
            is_last=action in lasts,
            is_sent=action._replace(kind=_sender(action)) in sends,
            key=_key(action, schedule.num_slices),
            doing=_doing(action),
            waiting=_waiting(action),
        )
        for action in row
    )


_FORWARD = frozenset((FORWARD, SEND_FORWARD, RECV_FORWARD))
_DONE: Mapping[ActionKind, str] = {
    REDUCE: "completing the gradients",
    STEP: "updating the weights",
}


def _sender(action: Action) -> ActionKind:
    """The kind of action that sends what this one computes; STEP where none does."""
    if action.kind in (BACKWARD, INPUT_BACKWARD):
        return SEND_BACKWARD
    return SEND_FORWARD if action.kind == FORWARD else STEP


def _key(action: Action, num_slices: int) -> Key:
    direction: Direction = "forward" if action.kind in _FORWARD else "backward"
    return direction, action.stage, action.microbatch * num_slices + action.slice


def _doing(action: Action) -> str:
    """
    >>> _doing(Action(FORWARD, 1, 0)), _doing(Action(STEP, 1))
    ('1F0: computing (stage 1, micro-batch 0)', '1STEP: updating the weights of stage 1')
    """
    if action.kind in _DONE:
        return f"{action}: {_DONE[action.kind]} of stage {action.stage}"
    verb = "computing" if action.kind in COMPUTE else "sending"
    return f"{action}: {verb} (stage {action.stage}, micro-batch {action.microbatch})"


def _waiting(action: Action) -> str:
    what, side = "gradients", "later"
    if action.kind == FORWARD:
        what, side = "activations", "earlier"
    where = f"(stage {action.stage}, micro-batch {action.microbatch})"
    return f"{action}: waiting for {what} from {side} stages {where}"


def _last_reduce(row: Row) -> frozenset[Action]:
    return frozenset([action for action in row if action.kind == REDUCE][-1:])


def _row_of(schedule: Schedule, stages: frozenset[int]) -> Row:
    if not stages:
        return ()
    ranks = {schedule.stage_rank[stage] for stage in stages}
    row = schedule.table[min(ranks)]
    if len(ranks) > 1 or {action.stage for action in row} != stages:
        raise PlanError(
            "AP541",
            f"schedule {schedule.name!r} does not place stages {sorted(stages)} on one rank",
            why="the plan gives these stages the same devices",
            where="schedule",
            fix="plan again",
        )
    return row
