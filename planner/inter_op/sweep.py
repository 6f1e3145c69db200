"""The recurrence over stages, from the last to the first, for all starts at once.

In: positions on the devices and the moves between them (a stage from one position to the next
on some submesh), the seconds of every run of blocks in a move. Out: for s stages to come, from
every position and every block on, the least of an objective that grows stage by stage:

    F(s, k, p) = min over moves p → q and i of  combine(t(k..i, move, s), F(s − 1, i, q))

Seconds depend on a move through its place only (a class of equal submeshes), so moves of one
place are one array; runs that take longer than the bound allows are left out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Combine = Callable[[Floats, Floats, Floats], Floats]
"""(a stage's seconds, once and as the slowest, the objective of all after it) → that from it on."""

Band = Callable[[int, int, bool, float], tuple[Floats, Floats]]
"""(stages left, place, whether it is the first, bound) → ``[k, j]`` of the blocks k to k + j.

What a stage takes once, and what it takes more as the slowest stage of all. Both infinite
where the second is above the bound, or the run impossible; as wide as the longest run within it.
"""

MOST_CELLS = 4_000_000
"""Cells of an array of one step; more moves are taken in turns."""


@dataclass(frozen=True, slots=True)
class Move:
    """A stage from position ``start`` to ``stop``: ``num_devices`` from ``first_device`` on."""

    start: int
    stop: int
    place: int
    first_device: int
    num_devices: int


@dataclass(frozen=True)
class Tiling:
    """The ways to lay stages over the devices; position 0 is the first, ``end`` the last.

    With ``fixed`` stages position p is that of the p-th stage; otherwise any number of stages
    up to ``most`` is tried.
    """

    end: int
    moves: tuple[Move, ...]
    most: int
    fixed: bool = False
    _groups: dict[tuple[int, bool], dict[int, tuple[Move, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def _from(self) -> dict[int, tuple[Move, ...]]:
        found: dict[int, list[Move]] = {}
        for move in self.moves:
            found.setdefault(move.start, []).append(move)
        return {start: tuple(moves) for start, moves in found.items()}

    def moves_from(self, left: int, start: int) -> Iterator[Move]:
        """The stages that may begin at a position with ``left`` stages to come, itself included."""
        for move in self._from.get(start, ()):
            if (move.stop == self.end) == (left == 1):
                yield move

    def groups(self, left: int, *, first: bool) -> dict[int, tuple[Move, ...]]:
        """By place the moves with ``left`` stages to come that begin at position 0, or do not."""
        key = (left if self.fixed else min(left, 2), first)
        if key not in self._groups:
            starts = {self.most - left} if self.fixed else set(self._from)
            found: dict[int, list[Move]] = {}
            for start in sorted(starts):
                if (start == 0) == first:
                    for move in self.moves_from(left, start):
                        found.setdefault(move.place, []).append(move)
            self._groups[key] = {place: tuple(moves) for place, moves in found.items()}
        return self._groups[key]


@dataclass(frozen=True)
class Sweep:
    """The recurrence's values: ``values[s]`` maps a position to F(s, ·, position)."""

    tiling: Tiling
    num_blocks: int
    band: Band
    combine: Combine
    bound: float
    values: tuple[dict[int, Floats], ...]

    @staticmethod
    def of(
        tiling: Tiling, num_blocks: int, band: Band, combine: Combine, *,
        bound: float = np.inf, most: int | None = None,
    ) -> Sweep:  # fmt: skip
        """Runs the recurrence up to ``most`` stages, if not given ``tiling.most``."""
        done = np.full(num_blocks + 1, np.inf)
        done[num_blocks] = 0.0
        values = [{tiling.end: done}]
        found = Sweep(tiling, num_blocks, band, combine, bound, ())
        for left in range(1, (most or tiling.most) + 1):
            values.append(found._step(left, values[-1]))
        return Sweep(tiling, num_blocks, band, combine, bound, tuple(values))

    def _step(self, left: int, after: dict[int, Floats]) -> dict[int, Floats]:
        value: dict[int, Floats] = {}
        for first in (True, False):
            for place, moves in self.tiling.groups(left, first=first).items():
                moves = tuple(move for move in moves if move.stop in after)
                if not moves:
                    continue
                both = self.band(left, place, first, self.bound)
                if not both[0].size:
                    continue
                for move, least in self._least(both, moves, after, first=first):
                    known = value.get(move.start)
                    value[move.start] = least if known is None else np.minimum(known, least)
        return {start: least for start, least in value.items() if np.isfinite(least).any()}

    def _least(
        self,
        both: tuple[Floats, Floats],
        moves: Sequence[Move],
        after: dict[int, Floats],
        *,
        first: bool,
    ) -> Iterator[tuple[Move, Floats]]:
        """For each move of a place the least objective from every block on."""
        width = both[0].shape[1]
        rows = slice(0, 1) if first else slice(1, self.num_blocks)
        once, slowest = both[0][rows], both[1][rows]
        at_once = max(1, MOST_CELLS // max(once.size, 1))
        for begin in range(0, len(moves), at_once):
            some = moves[begin : begin + at_once]
            padded = np.full((len(some), self.num_blocks + 1 + width), np.inf)
            for row, move in enumerate(some):
                padded[row, : self.num_blocks + 1] = after[move.stop]
            windows = np.lib.stride_tricks.sliding_window_view(padded[:, 1:], width, axis=1)
            total = self.combine(once[None], slowest[None], windows[:, rows]).min(axis=2)
            for move, least in zip(some, total, strict=True):
                whole = np.full(self.num_blocks + 1, np.inf)
                whole[rows] = least
                yield move, whole

    def least(self, num_stages: int) -> float:
        """The least objective of so many stages."""
        value = self.values[num_stages].get(0) if num_stages < len(self.values) else None
        return float("inf") if value is None else float(value[0])

    def stages(self, num_stages: int) -> tuple[tuple[int, int, Move], ...]:
        """A way to it: (first block, last + 1, move) of each stage."""
        found = []
        block, position = 0, 0
        for left in range(num_stages, 0, -1):
            best: tuple[float, int, Move] | None = None
            for move in self.tiling.moves_from(left, position):
                after = self.values[left - 1].get(move.stop)
                if after is None:
                    continue
                both = self.band(left, move.place, position == 0, self.bound)
                if not both[0].size:
                    continue
                once, slowest = (own[block][: self.num_blocks - block] for own in both)
                total = self.combine(once, slowest, after[block + 1 : block + 1 + len(once)])
                at = int(total.argmin()) if total.size else 0
                if total.size and (best is None or total[at] < best[0]):
                    best = (float(total[at]), block + 1 + at, move)
            assert best is not None, "the recurrence has a value here"
            found.append((block, best[1], best[2]))
            block, position = best[1], best[2].stop
        return tuple(found)


def add(once: Floats, slowest: Floats, after: Floats) -> Floats:
    """Σ of what the stages take once."""
    total: Floats = once + after
    return total


def larger(once: Floats, slowest: Floats, after: Floats) -> Floats:
    """The most that a stage takes as the slowest."""
    found: Floats = np.maximum(slowest, after)
    return found


def turning(once: Floats, slowest: Floats, after: Floats) -> Floats:
    """The longest way through a pipeline that turns around at one stage.

    A stage cannot begin before the first micro-batch has passed all stages before it, and
    after its last one that still has to go back through them: with q_j what stage j takes
    once and m_i what i takes more for all other micro-batches, a step takes at least

        max_i  Σ_{j ≤ i} q_j + m_i

    which from the last stage to the first is  q + max(m, what comes after).
    """
    total: Floats = once + np.maximum(slowest, after)
    return total
