"""Actions: what each pipeline rank does in one training step, as a table.

An action prints and parses as in ``torch.distributed.pipelining``: the stage, what is
done, the micro-batch. ``1F0`` is the forward of micro-batch 0 in stage 1, ``1SEND_F0``
sends its results to later stages, ``2RECV_F0`` posts the receive of what stage 2 needs.
One table drives the static checks, the simulator and the interpreter that executes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal[
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "REDUCE", "STEP"
]  # fmt: skip

FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"
INPUT_BACKWARD: Literal["I"] = "I"
WEIGHT_BACKWARD: Literal["W"] = "W"
SEND_FORWARD: Literal["SEND_F"] = "SEND_F"
RECV_FORWARD: Literal["RECV_F"] = "RECV_F"
SEND_BACKWARD: Literal["SEND_B"] = "SEND_B"
RECV_BACKWARD: Literal["RECV_B"] = "RECV_B"
GATHER: Literal["GATHER"] = "GATHER"
REDUCE: Literal["REDUCE"] = "REDUCE"
STEP: Literal["STEP"] = "STEP"

COMPUTE: frozenset[ActionKind] = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD))
SENDS: frozenset[ActionKind] = frozenset((SEND_FORWARD, SEND_BACKWARD))
RECEIVES: frozenset[ActionKind] = frozenset((RECV_FORWARD, RECV_BACKWARD))
NO_MICROBATCH = -1

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)|(\d+)(GATHER|REDUCE|STEP)")


class Action(NamedTuple):
    """One thing that a pipeline rank does for one of its stages.

    ``F`` forward, ``B`` backward, ``I``/``W`` the halves of a backward that is split into
    gradients of inputs and of weights; ``RECV_*`` posts an asynchronous receive, which the
    compute that needs it waits for; ``SEND_*`` sends asynchronously what that stage has just
    computed; ``GATHER`` gathers the stage's sharded parameters, ``REDUCE`` completes its
    gradients, ``STEP`` updates its weights; these three belong to no micro-batch. ``GATHER``
    stands in timelines only: no table says when, it starts with the step. A tuple, because a
    large schedule has half a million of them.

    >>> str(Action(SEND_FORWARD, 1, 0)), str(Action(STEP, 2))
    ('1SEND_F0', '2STEP')
    """

    kind: ActionKind
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        suffix = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{self.kind}{suffix}"


Row = tuple[Action, ...]
Table = tuple[Row, ...]
"""The actions of each pipeline rank, in order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A table and who owns what.

    ``stage_rank[s]`` is the pipeline rank (the row of ``table``) that owns stage ``s``. A
    pipeline rank stands for all devices of its submesh and may own several stages.
    """

    name: str
    num_microbatches: int
    stage_rank: tuple[int, ...]
    table: Table

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.table)


def parse_action(text: str) -> Action:
    """The action that ``str`` printed.

    >>> parse_action("3RECV_B12")
    Action(kind='RECV_B', stage=3, microbatch=12)
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no action: expected stage, kind, micro-batch as in 1F0")
    stage, kind, microbatch, step_stage, step_kind = match.groups()
    if step_kind is not None:
        return Action(step_kind, int(step_stage))  # type: ignore[arg-type]
    return Action(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


def format_table(table: Sequence[Sequence[Action]]) -> str:
    """The table as text: one line per pipeline rank, actions separated by spaces.

    >>> format_table([[Action("F", 0, 0), Action("B", 0, 0)]])
    '0F0 0B0'
    """
    return "\n".join(" ".join(map(str, row)) for row in table)


def parse_table(text: str) -> Table:
    """The inverse of ``format_table``; empty lines are skipped.

    >>> format_table(parse_table("0F0 0SEND_F0\\n1RECV_F0 1F0"))
    '0F0 0SEND_F0\\n1RECV_F0 1F0'
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return tuple(tuple(parse_action(action) for action in row) for row in rows)


def matching_receive(send: Action) -> Action:
    """The receive in the adjacent stage that takes what ``send`` sends.

    >>> str(matching_receive(Action("SEND_F", 1, 0))), str(matching_receive(Action("SEND_B", 1, 0)))
    ('2RECV_F0', '0RECV_B0')
    """
    if send.kind == SEND_FORWARD:
        return Action(RECV_FORWARD, send.stage + 1, send.microbatch)
    return Action(RECV_BACKWARD, send.stage - 1, send.microbatch)


def compute_only(row: Sequence[Action]) -> Row:
    """The row without communication and step: what is drawn in a picture of a schedule."""
    return tuple(action for action in row if action.kind in COMPUTE)
