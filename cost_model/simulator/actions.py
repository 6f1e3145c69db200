"""Actions of each pipeline rank in one training step, as a table.

An action prints and parses as in ``torch.distributed.pipelining``: the stage, the kind, the
micro-batch. ``1F0`` is the forward of micro-batch 0 in stage 1, ``1SEND_F0``
sends its results to later stages, ``2RECV_F0`` posts the receive of stage 2's inputs;
``1F0.2`` is slice 2 of that micro-batch's sequence, where sequences are sliced.
One table drives the static checks, the simulator and the interpreter that executes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

ComputeKind = Literal["F", "B", "I", "W"]
MessageKind = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
ActionKind = Literal[ComputeKind, MessageKind, "GATHER", "REDUCE", "STEP"]

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

_ACTION = re.compile(
    r"(\d+)(?:(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:\.(\d+))?|(GATHER|REDUCE|STEP)(\d+)?)"
)

Weights = Literal["flushed", "stashed", "double-buffered", "latest"]
"""Rule by which a stage chooses the version of its weights to compute with: see
``weight_versions``."""


class Action(NamedTuple):
    """Action in a pipeline schedule, of one rank for one of its stages and one micro-batch.

    ``kind`` is ``F`` for forward, ``B`` for backward, ``I`` or ``W`` for one half of a split
    backward (gradients of inputs, or of weights); ``RECV_*`` posts an asynchronous receive, for
    which later compute waits; ``SEND_*`` asynchronously sends the stage's latest results (``I``
    computes the gradients that ``SEND_B`` sends); ``GATHER`` gathers the stage's sharded
    parameters, ``REDUCE`` completes its gradients, ``STEP`` updates its weights. These three occur
    once per step, without micro-batch. In asynchronous schedules, which update more often,
    ``REDUCE`` and ``STEP`` have the last micro-batch whose gradients they use. ``GATHER`` occurs in
    timelines only. ``slice`` numbers the parts of a sequence that is cut into slices, else it is 0.
    A named tuple for speed: a large schedule has half a million actions.

    >>> str(Action(SEND_FORWARD, 1, 0)), str(Action(STEP, 2)), str(Action(FORWARD, 1, 0, 2))
    ('1SEND_F0', '2STEP', '1F0.2')
    """

    kind: ActionKind
    stage: int
    microbatch: int = NO_MICROBATCH
    slice: int = 0

    def __str__(self) -> str:
        suffix = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind}{suffix}{part}"


Row = tuple[Action, ...]
Table = tuple[Row, ...]
"""Actions of each pipeline rank, in order."""


Edges = tuple[tuple[int, int], ...]
"""Pairs of stages (earlier, later), of which the later needs results of the earlier."""


def chain(num_stages: int) -> Edges:
    """Return the edges (earlier stage, later stage) of ``num_stages`` pipeline stages in a chain:
    each stage needs the results of the stage before it.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


class Wiring(NamedTuple):
    """Connections between pipeline stages, by stage in ascending order: ``producers`` are the
    stages whose results a stage needs, ``consumers`` the stages that need its results. Gradients of
    a stage's inputs go back to its producers."""

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(num_stages: int, edges: Edges) -> Wiring:
        """Return the connections of ``num_stages`` stages with these edges (earlier stage, later
        stage). Raises ValueError for an edge to a missing or an earlier stage.

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

    def between_ranks(self, stage_rank: Sequence[int]) -> Wiring:
        """Return the connections between stages of different ranks, which need messages.
        ``stage_rank``: pipeline rank of each stage.

        >>> Wiring.of(3, ((0, 1), (0, 2))).between_ranks((0, 1, 0))
        Wiring(producers=((), (0,), ()), consumers=((1,), (), ()))
        """
        producers, consumers = (
            tuple(
                tuple(each for each in others if stage_rank[each] != stage_rank[stage])
                for stage, others in enumerate(side)
            )
            for side in self
        )
        return Wiring(producers, consumers)


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule: a table of actions, and the ranks that own the stages.

    ``table`` has a row of actions for each pipeline rank, and ``stage_rank[s]`` is the rank that
    owns stage ``s``. A pipeline rank represents all devices of its submesh and may own several
    stages. ``edges`` lead from each stage to the stages that need its results; None for a chain, in
    which each stage needs the previous one.

    ``parts[s]`` is the part of the model that stage ``s`` computes; empty if stage ``s`` computes
    part ``s``. Stages of the same part are replicas: they hold the same weights, each takes some of
    the micro-batches, and their gradients are summed before their weights are updated.

    ``slices`` are the lengths (in positions) of the slices into which every sequence is cut; empty
    if sequences are whole. ``weights`` is the rule for versions of weights, see
    ``weight_versions``; all rules but "flushed" are asynchronous.
    """

    name: str
    num_microbatches: int
    stage_rank: tuple[int, ...]
    table: Table
    edges: Edges | None = None
    parts: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()
    weights: Weights = "flushed"

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.table)

    @property
    def num_parts(self) -> int:
        return max(self.parts) + 1 if self.parts else self.num_stages

    @property
    def num_slices(self) -> int:
        return len(self.slices) or 1

    @cached_property
    def wiring(self) -> Wiring:
        edges = chain(self.num_stages) if self.edges is None else self.edges
        return Wiring.of(self.num_stages, edges)

    @cached_property
    def messages(self) -> Wiring:
        """Connections between stages of different ranks, along which messages are sent."""
        return self.wiring.between_ranks(self.stage_rank)

    @property
    def is_asynchronous(self) -> bool:
        """True if weights are updated while micro-batches are between forward and backward."""
        return self.weights != "flushed"

    @property
    def per_update(self) -> int:
        """Number of micro-batches per weight update; all of a step in synchronous schedules."""
        row = self.table[self.stage_rank[0]]
        updates = sum(action.kind == STEP and action.stage == 0 for action in row)
        return self.num_microbatches // max(1, updates)

    def part(self, stage: int) -> int:
        """Return the index of the part of the model that a stage computes."""
        return self.parts[stage] if self.parts else stage

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Return the stages, in order, that compute the same part of the model as ``stage``."""
        if not self.parts:
            return (stage,)
        return tuple(s for s, part in enumerate(self.parts) if part == self.parts[stage])

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank owns, in ascending order."""
        return tuple(s for s, owner in enumerate(self.stage_rank) if owner == rank)


def weight_versions(schedule: Schedule) -> dict[Action, int]:
    """Return for each forward and backward action the version of its stage's weights that it uses.

    A stage starts with version 0, and its v-th STEP (weight update) makes version v: it applies the
    gradients since the previous STEP to the newest version. The rules, by ``weights`` of the
    schedule:

    ============= ========================================================================
    flushed       version 0: all compute comes before the only STEP
    stashed       F the newest; B, I and W the same as their F (PipeDream, Harlap et al.
                  2018, arXiv:1806.03377, section 3.3)
    double-       the micro-batches of the k-th update, counted from 0, use version
    buffered      max(0, k - 1) in F, B, I and W: W(t+1) = W(t) - lr * grad f(W(t-1))
                  (PipeDream-2BW, Narayanan et al. 2021, arXiv:2006.09503, section 3.1)
    latest        the newest in each action, so B may use a newer one than its F (AMPNet,
                  Gaunt et al. 2017, arXiv:1705.09786, section 3)
    ============= ========================================================================

    >>> table = parse_table("0F0 0F1 0B0 0REDUCE0 0STEP0 0F2 0B1 0REDUCE1 0STEP1 0B2")
    >>> versions = weight_versions(Schedule("example", 3, (0,), table, weights="stashed"))
    >>> {str(action): version for action, version in versions.items()}
    {'0F0': 0, '0F1': 0, '0B0': 0, '0F2': 1, '0B1': 0, '0B2': 1}
    """
    found: dict[Action, int] = {}
    for row in schedule.table:
        newest = [0] * schedule.num_stages
        groups = _update_of(row)
        for action in row:
            kind, stage, m, _ = action
            if kind == STEP:
                newest[stage] += 1
            elif kind in COMPUTE:
                found[action] = newest[stage]
                if schedule.weights == "double-buffered":
                    found[action] = max(0, groups.get((stage, m), newest[stage]) - 1)
                elif schedule.weights == "stashed" and kind != FORWARD:
                    found[action] = found[action._replace(kind=FORWARD)]
    return found


def versions_needed(schedule: Schedule, stage: int) -> tuple[frozenset[int], ...]:
    """Return for each STEP (update) of a stage the versions of its weights that are used after
    it."""
    versions = weight_versions(schedule)
    later: set[int] = set()
    found: list[frozenset[int]] = []
    for action in reversed(schedule.table[schedule.stage_rank[stage]]):
        if action.stage == stage and action.kind in COMPUTE:
            later.add(versions[action])
        elif action.stage == stage and action.kind == STEP:
            found.append(frozenset(later))
    return tuple(found[::-1])


def versions_held(schedule: Schedule, stage: int) -> int:
    """Return the largest number of versions of its weights that a stage holds at once: the newest,
    and older versions that are still in use; 1 if each update overwrites the weights.

    >>> table = parse_table("0F0 0F1 0B0 0REDUCE0 0STEP0 0F2 0B1 0REDUCE1 0STEP1 0B2")
    >>> versions_held(Schedule("example", 3, (0,), table, weights="stashed"), 0)
    2
    """
    if schedule.weights in ("flushed", "latest"):
        return 1
    needed = enumerate(versions_needed(schedule, stage))
    return max(1 + sum(each <= version for each in later) for version, later in needed)


def _update_of(row: Row) -> dict[tuple[int, int], int]:
    """Return for each (stage, micro-batch) of a rank's ``row`` of actions the number of the STEP
    (weight update, counted from 0 per stage) that applies its gradients."""
    found: dict[tuple[int, int], int] = {}
    count: dict[int, int] = {}
    for kind, stage, m, _ in row:
        if kind == STEP:
            count[stage] = count.get(stage, 0) + 1
        elif kind in (BACKWARD, WEIGHT_BACKWARD):
            found[stage, m] = count.get(stage, 0)
    return found


def last_before_reduce(row: Row) -> frozenset[Action]:
    """Return for each REDUCE (completion of gradients) in a rank's ``row`` of actions the last
    action before it that adds to the weight gradients of the same stage.

    >>> (row,) = parse_table("0F0 0F1 0B0 0B1 0REDUCE 0STEP")
    >>> [str(action) for action in last_before_reduce(row)]
    ['0B1']
    """
    found: set[Action] = set()
    latest: dict[int, Action] = {}
    for action in row:
        if action.kind in (BACKWARD, WEIGHT_BACKWARD):
            latest[action.stage] = action
        elif action.kind == REDUCE:
            found.add(latest[action.stage])
    return frozenset(found)


def parse_action(text: str) -> Action:
    """Return the action that ``str`` of an action wrote as ``text``.

    >>> parse_action("3RECV_B12")
    Action(kind='RECV_B', stage=3, microbatch=12, slice=0)
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an action: expected stage, kind, micro-batch as in 1F0")
    stage, kind, microbatch, part, whole, last = match.groups()
    if whole is not None:
        return Action(whole, int(stage), NO_MICROBATCH if last is None else int(last))  # type: ignore[arg-type]
    return Action(kind, int(stage), int(microbatch), int(part or 0))  # type: ignore[arg-type]


def format_table(table: Sequence[Sequence[Action]]) -> str:
    """Return a schedule's table as text: a line per pipeline rank, actions separated by spaces.

    >>> format_table([[Action("F", 0, 0), Action("B", 0, 0)]])
    '0F0 0B0'
    """
    return "\n".join(" ".join(map(str, row)) for row in table)


def parse_table(text: str) -> Table:
    """Return the schedule's table that ``format_table`` wrote as ``text``; skip empty lines.

    >>> format_table(parse_table("0F0 0SEND_F0\\n1RECV_F0 1F0"))
    '0F0 0SEND_F0\\n1RECV_F0 1F0'
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return tuple(tuple(parse_action(action) for action in row) for row in rows)


def matching_receives(send: Action, wiring: Wiring) -> tuple[Action, ...]:
    """Return the receives that match ``send``: one for each stage that it goes to by ``wiring``.

    >>> wiring = Wiring.of(3, ((0, 2), (1, 2)))
    >>> [str(receive) for receive in matching_receives(Action("SEND_B", 2, 0), wiring)]
    ['0RECV_B0', '1RECV_B0']
    """
    kind, stage, m, part = send
    if kind == SEND_FORWARD:
        return tuple(Action(RECV_FORWARD, target, m, part) for target in wiring.consumers[stage])
    return tuple(Action(RECV_BACKWARD, target, m, part) for target in wiring.producers[stage])


def compute_only(row: Sequence[Action]) -> Row:
    """Return the forwards and backwards in a rank's ``row``, without communication and updates."""
    return tuple(action for action in row if action.kind in COMPUTE)
