"""Every way to run one block of a kind on a mesh, as arrays, without those that cannot win.

In: a kind's tables on a mesh. Out: for each combination of its decisions' choices what a block
takes and holds, all that a stage's price is made of. Two ways that look alike from outside
(``KindTables.ends``) are compared: one that is no better in any figure is left out. No plan is
lost by that, as every price grows with every figure.

Unlike the elimination of ``kind_tables``, which finds the least of one sum, this keeps what is
best for some sum, and for none: a pipeline's step is no sum of its stages' figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ..intra_op.assignments import assignments
from ..intra_op.kind_tables import End, KindTables
from ..pricing.decisions import ZEROS, Floats
from ..pricing.ladder import Ints
from ..pricing.recompute import AGAIN
from ..pricing.stage_model import Kept, KindModel, StageModel
from ..pricing.structure import Edge

MOST_CHOICES = 20_000
"""Combinations of a block's choices that are looked at one by one."""


class TooManyError(Exception):
    """There are more ways than can be tried one by one; caught inside the planner."""


@dataclass(frozen=True)
class KindWays:
    """A block's ways: ``choices[way, decision]`` and what each takes.

    ``seconds[way, zero]`` and ``states[way, zero]`` hold the fields of ``Seconds`` and
    ``StateBytes``, conversions inside the block included; ``spared_seconds[mode,
    way]`` is what recomputation does not run again: of device, of host, of such conversions.
    ``saved``, ``selected`` and ``both`` are bytes kept by a block that is not, and
    that is selectively recomputed, and of what is in both; ``read`` are parts of the batch, which
    one that is recomputed keeps anyway; ``working`` of the largest op.
    ``late[way]``: seconds of the gradients of weights, of the device and of the host, and bytes
    kept for them, where they may be put off.
    """

    choices: Ints
    seconds: Floats
    states: Floats
    spared_seconds: Floats
    saved: Floats
    selected: Floats
    read: Floats
    both: Floats
    working: Floats
    late: Floats

    def __len__(self) -> int:
        return len(self.choices)

    def only(self, rows: Ints) -> KindWays:
        """Some of the ways."""
        return KindWays(
            self.choices[rows], self.seconds[rows], self.states[rows], self.spared_seconds[:, rows],
            self.saved[rows], self.selected[rows], self.read[rows], self.both[rows],
            self.working[rows], self.late[rows],
        )  # fmt: skip

    def columns(self, zero: int, *, time_only: bool, splits: bool = False) -> Floats:
        """What the price of a stage at a ZeRO stage is made of, all of it to be small."""
        found = self._columns(zero, time_only=time_only)
        if not splits:
            return found
        late = self.late[:, :2]
        sooner = self.seconds[:, zero][:, [2, 9]] - late
        return np.hstack([found, sooner, self.late[:, : 2 if time_only else 3]])

    def _columns(self, zero: int, *, time_only: bool) -> Floats:
        own = self.seconds[:, zero]
        seconds = [
            own[:, 0], own[:, 1], own[:, 4], own[:, 8], own[:, 2], own[:, 9],
            own[:, 3] + own[:, 5], own[:, 6] + own[:, 7],
        ]  # fmt: skip
        if time_only:
            return np.column_stack(seconds)
        again = [*(own[:, [0, 8, 1]] - self.spared_seconds).swapaxes(1, 2).reshape(-1, len(own))]
        states = self.states[:, zero]
        sizes = [
            states[:, :3].sum(axis=1), states[:, 3], self.saved, self.selected,
            self.read, self.saved - self.both, self.working,
        ]  # fmt: skip
        return np.column_stack([*seconds, *again, *sizes])


def kind_ways(model: StageModel, kind: str) -> KindWays:
    """All ways of a kind. Raises ``TooManyError``."""
    own = model.kind(kind)
    sizes = [len(decision.choices) for decision in own.decisions]
    if prod(sizes) > MOST_CHOICES:
        raise TooManyError
    choices = assignments(sizes).T
    pairs = list(zip(own.decisions, choices.T, strict=True))
    seconds = np.zeros((len(choices), len(ZEROS), 10))
    states = np.zeros((len(choices), len(ZEROS), 4))
    spared = np.zeros((len(AGAIN), len(choices), 3))
    working = np.zeros(len(choices))
    for decision, chosen in pairs:
        seconds += decision.seconds[:, chosen].swapaxes(0, 1)
        states += decision.states[:, chosen].swapaxes(0, 1)
        spared[:, :, :2] += decision.spared_seconds[:, chosen]
    for sizes_of, chosen in zip(own.working_bytes, choices.T, strict=True):
        np.maximum(working, sizes_of[chosen], out=working)
    for zero in ZEROS:
        seconds[:, zero] += np.array(model.block_sync(kind, zero))
    for edge in (*own.edges, *model.structure.own_parameter_edges(kind)):
        forward, backward = _inside(model, own, edge, choices)
        seconds[:, :, 1] += forward[:, None]
        seconds[:, :, 3] += backward[:, None]
        spared[:, :, 2] += np.outer(~np.array(model.repeats(edge)), forward)
    saved, selected = _held(own.saved, choices), _held(own.selected, choices)
    parts = sorted(saved.keys() | selected.keys())
    none = np.zeros(len(choices), dtype=bool)
    held = [(saved.get(part, none), selected.get(part, none), part[1]) for part in parts]
    return KindWays(
        choices, seconds, states, spared,
        _bytes([(own_saved, size) for own_saved, _, size in held], len(choices)),
        _bytes([(own_kept, size) for _, own_kept, size in held], len(choices)),
        _bytes([(own, part[1]) for part, own in _held(own.read, choices).items()], len(choices)),
        _bytes([(one & other, size) for one, other, size in held], len(choices)),
        working,
        _late(model, own, choices),
    )  # fmt: skip


def _held(kept: Kept, choices: Ints) -> dict[tuple[str, int], np.ndarray]:
    """For each (storage, bytes) the ways that keep it."""
    found: dict[tuple[str, int], np.ndarray] = {}
    for chosen, parts in zip(choices.T, kept, strict=True):
        for part in dict.fromkeys(each for own in parts for each in own):
            holds = np.array([part in own for own in parts])[chosen]
            found[part] = holds | found.get(part, False)
    return found


def _late(model: StageModel, own: KindModel, choices: Ints) -> Floats:
    """Seconds of the gradients of weights, of device and host, and bytes kept for them, by way."""
    every = [
        [model.late(own.kind, number, choice) for choice in range(len(decision.choices))]
        for number, decision in enumerate(own.decisions)
    ]
    found = np.zeros((len(choices), 3))
    for chosen, choice_late in zip(choices.T, every, strict=True):
        found[:, :2] += np.array([late[:2] for late in choice_late])[chosen]
    held = _held(tuple(tuple(parts for _, _, parts in each) for each in every), choices)
    found[:, 2] = _bytes([(holds, size) for (_, size), holds in held.items()], len(choices))
    return found


def _bytes(held: list[tuple[np.ndarray, int]], number: int) -> Floats:
    total = np.zeros(number)
    for holds, size in held:
        total += holds * float(size)
    return total


def _inside(model: StageModel, own: KindModel, edge: Edge, choices: Ints) -> tuple[Floats, Floats]:
    """Seconds forward and backward of the conversions of a value inside the block."""
    _, columns = model.targets(edge)
    rows = model.source(edge).of_choice[choices[:, own.where[edge.name]]]
    wanted = [
        column[choices[:, own.where[use.node]]]
        for use, column in zip(edge.uses, columns, strict=True)
    ]
    forward, backward = model.conversions(edge)
    return distinct_sum(forward, rows, wanted), distinct_sum(backward, rows, wanted)


def distinct_sum(table: Floats, rows: Ints, columns: list[Ints]) -> Floats:
    """``table[row, column]`` summed over the distinct ones of the columns.

    >>> table = np.array([[1.0, 4.0]])
    >>> distinct_sum(table, np.array([0, 0]), [np.array([0, 0]), np.array([1, 0])]).tolist()
    [5.0, 1.0]
    """
    total = np.zeros(len(rows))
    for number, column in enumerate(columns):
        new = np.ones(len(rows), dtype=bool)
        for earlier in columns[:number]:
            new &= earlier != column
        total += table[rows, column] * new
    return total


def outside(model: StageModel, kind: str) -> tuple[End, ...]:
    """What other blocks see of a kind's decisions."""
    return KindTables.of(model, kind).ends


def undominated(
    ways: KindWays, ends: tuple[End, ...], zero: int, *, time_only: bool, splits: bool = False
) -> KindWays:
    """The ways of which no other that looks alike from outside is as good in everything."""
    looks = np.column_stack(
        [
            np.zeros(len(ways), dtype=np.int64),
            *(e.classes[ways.choices[:, e.decision]] for e in ends),
        ]
    )
    columns = ways.columns(zero, time_only=time_only, splits=splits)
    _, groups = np.unique(looks, axis=0, return_inverse=True)
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    kept = [rows[front(columns[rows])] for rows in np.split(order, bounds)]
    return ways.only(np.sort(np.concatenate(kept)))


def front(points: Floats) -> Ints:
    """The rows that no other row is at most equal to in every column; of equal ones the first.

    >>> front(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [1.0, 3.0]])).tolist()
    [0, 1]
    """
    left = np.argsort(points.sum(axis=1), kind="stable")
    kept: list[int] = []
    while len(left):
        first = left[0]
        kept.append(int(first))
        left = left[(points[left] < points[first]).any(axis=1)]
    return np.array(sorted(kept), dtype=np.int64)


def distinct(points: Floats) -> Ints:
    """Of equal rows the first.

    >>> distinct(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [1.0, 3.0]])).tolist()
    [0, 1, 2]
    """
    _, first = np.unique(points, axis=0, return_index=True)
    found: Ints = np.sort(first)
    return found
