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
from functools import cached_property
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


Edges = tuple[tuple[int, int], ...]
"""Pairs of stages, earlier and later: the later one needs what the earlier one makes."""


def chain(num_stages: int) -> Edges:
    """The edges of stages that each need the one before.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


class Wiring(NamedTuple):
    """By stage, whose results it needs and who needs its results, in ascending order.

    The gradients of a stage's inputs go back to its producers.
    """

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(num_stages: int, edges: Edges) -> Wiring:
        """
        >>> Wiring.of(3, ((0, 2), (1, 2)))
        Wiring(producers=((), (), (0, 1)), consumers=((2,), (2,), ()))
        """
        producers: list[list[int]] = [[] for _ in range(num_stages)]
        consumers: list[list[int]] = [[] for _ in range(num_stages)]
        for source, target in sorted(edges):
            if not 0 <= source < target < num_stages:
                raise ValueError(f"no edge from stage {source} to {target} of {num_stages}")
            producers[target].append(source)
            consumers[source].append(target)
        return Wiring(tuple(map(tuple, producers)), tuple(map(tuple, consumers)))


@dataclass(frozen=True)
class Schedule:
    """A table and who owns what.

    ``stage_rank[s]`` is the pipeline rank (the row of ``table``) that owns stage ``s``. A
    pipeline rank stands for all devices of its submesh and may own several stages. ``edges``
    say which stages need which; None for a chain, in which each needs the one before.
    """

    name: str
    num_microbatches: int
    stage_rank: tuple[int, ...]
    table: Table
    edges: Edges | None = None

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.table)

    @cached_property
    def wiring(self) -> Wiring:
        edges = chain(self.num_stages) if self.edges is None else self.edges
        return Wiring.of(self.num_stages, edges)


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


def matching_receives(send: Action, wiring: Wiring) -> tuple[Action, ...]:
    """The receives, one per stage it goes to, that take what ``send`` sends.

    >>> wiring = Wiring.of(3, ((0, 2), (1, 2)))
    >>> [str(receive) for receive in matching_receives(Action("SEND_B", 2, 0), wiring)]
    ['0RECV_B0', '1RECV_B0']
    """
    kind, stage, m = send
    if kind == SEND_FORWARD:
        return tuple(Action(RECV_FORWARD, target, m) for target in wiring.consumers[stage])
    return tuple(Action(RECV_BACKWARD, target, m) for target in wiring.producers[stage])


def compute_only(row: Sequence[Action]) -> Row:
    """The row without communication and step: what is drawn in a picture of a schedule."""
    return tuple(action for action in row if action.kind in COMPUTE)
