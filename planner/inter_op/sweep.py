"""Recurrence over stages, from the last to the first, for all start cuts at once.

In: positions on the devices and the moves between them (a stage from one position to the next on
some submesh), the seconds of every run of blocks in a move. Out: for s stages to the end, from
every position and every cut, the minimum of an objective that is composed stage by stage:

    F(s, k, p) = min over moves p → q and i of  combine(t(k..i, move, s), F(s − 1, i, q))

Seconds depend on a move only through its place (a class of equal submeshes), so moves of one place
are one array; runs whose m exceeds the bound are omitted. So are cuts that the stages before a
position cannot reach within the bound, or from which the stages after it cannot reach the end: near
the least feasible bound these are nearly all cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .cuts import CostTiles, Floats, Ints, StageBand, TileBlock, TileRows

Combine = Callable[[TileRows | TileBlock, Floats], Floats]
"""Function (a stage's seconds, the later stages' objective) → the objective of both."""

MOST_CELLS = 4_000_000
"""Maximum array elements per vectorized operation; more moves take several operations."""

MANY_CELLS = 1 << 13
"""Array elements above which a move is processed alone, strip by strip, without copies."""

STRIP_CELLS = 1 << 15
"""Approximate array elements of a strip, few enough to stay in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Move:
    """Possible stage, on the devices from position ``start`` to ``stop`` of a tiling. ``place``
    numbers the group of submeshes on which a stage costs the same."""

    start: int
    stop: int
    place: int
    first_device: int
    num_devices: int


@dataclass(frozen=True)
class Moves:
    """Positions on the devices between which possible stages of equal cost lie. No two of these
    stages have the same start."""

    starts: Ints
    stops: Ints

    @staticmethod
    def of(moves: Sequence[Move]) -> Moves:
        return Moves(
            np.array([move.start for move in moves], dtype=np.int64),
            np.array([move.stop for move in moves], dtype=np.int64),
        )


@dataclass(frozen=True)
class Tiling:
    """Ways to divide the devices into stages. A possible stage (move) leads from a position on the
    devices to a later position; a pipeline leads from 0 to ``end``.

    If ``fixed``, stage number p is at position p; otherwise up to ``most`` stages are tried.
    """

    end: int
    moves: tuple[Move, ...]
    most: int
    fixed: bool = False
    _groups: dict[tuple[int, bool], dict[int, Moves]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def _from(self) -> dict[int, tuple[Move, ...]]:
        found: dict[int, list[Move]] = {}
        for move in self.moves:
            found.setdefault(move.start, []).append(move)
        return {start: tuple(moves) for start, moves in found.items()}

    def moves_from(self, left: int, start: int) -> Iterator[Move]:
        """Yield the possible stages from ``start`` that ``left - 1`` further stages can follow."""
        for move in self._from.get(start, ()):
            if (move.stop == self.end) == (left == 1):
                yield move

    def groups(self, left: int, *, first: bool) -> dict[int, Moves]:
        """Map each place (group of submeshes on which a stage costs the same) to the possible
        stages there that begin ``left`` stages before the end. ``first``: from position 0, else all
        others."""
        key = (left if self.fixed else min(left, 2), first)
        if key not in self._groups:
            starts = {self.most - left} if self.fixed else set(self._from)
            found: dict[int, list[Move]] = {}
            for start in sorted(starts):
                if (start == 0) == first:
                    for move in self.moves_from(left, start):
                        found.setdefault(move.place, []).append(move)
            self._groups[key] = {place: Moves.of(moves) for place, moves in found.items()}
        return self._groups[key]


@dataclass(frozen=True)
class Sweep:
    """Solved recurrence over stages. ``values[s]`` maps each position on the devices to an array by
    cut between blocks: the least objective of the last s stages if they begin there."""

    tiling: Tiling
    bands: CostTiles
    combine: Combine
    values: tuple[dict[int, Floats], ...]

    @staticmethod
    def of(tiling: Tiling, bands: CostTiles, combine: Combine, *, most: int | None = None) -> Sweep:
        """Solve the recurrence for pipelines of up to ``most`` stages (default: ``tiling.most``).
        ``bands``: seconds of stages; ``combine``: objective of a stage and the later stages."""
        number = most or tiling.most
        done = np.full(len(bands.cuts), np.inf)
        done[-1] = 0.0
        values = [{tiling.end: done}]
        last = last_cuts(tiling, bands, number)
        found = Sweep(tiling, bands, combine, ())
        for left in range(1, number + 1):
            values.append(found._step(left, values[-1], last) if values[-1] else {})
        return Sweep(tiling, bands, combine, tuple(values))

    def _step(self, left: int, after: dict[int, Floats], last: Ints) -> dict[int, Floats]:
        groups = [self.tiling.groups(left, first=first) for first in (True, False)]
        starts = sorted({start for own in groups for each in own.values() for start in each.starts})
        row = np.zeros(self.tiling.end + 1, dtype=np.int64)
        row[starts] = np.arange(len(starts))
        value = np.full((len(starts), len(self.bands.cuts)), np.inf)
        later = _After.of(after, self.tiling.end)
        for own, first in zip(groups, (True, False), strict=True):
            for place, moves in own.items():
                if later.has_any(moves.stops):
                    band = self.bands.stage(left, place, first)
                    for which, cuts, least in self._least(band, moves, later, last):
                        where = row[moves.starts[which]][:, None], cuts
                        value[where] = np.minimum(value[where], least)
        is_some = np.isfinite(value).any(axis=1).tolist()
        return {start: value[at] for at, start in enumerate(starts) if is_some[at]}

    def _least(
        self, band: StageBand, moves: Moves, later: _After, last: Ints
    ) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Yield (indices into ``moves``, possible stages; first cuts for each; least objective from
        each cut). ``later``: objective of the later stages; ``last``: last reachable cut by
        position."""
        if not band.width:
            return
        begin, end = later.cuts(band, moves.stops)
        end = np.minimum(end, last[moves.starts])
        # only the first stage begins at the first block, and nowhere else
        is_first = moves.starts == 0
        begin, end = np.maximum(begin, ~is_first), np.where(is_first, np.minimum(end, 0), end)
        chosen = np.flatnonzero(begin <= end)
        if not len(chosen):
            return
        number = int((end - begin)[chosen].max()) + 1
        if len(chosen) == 1 or number * band.width > MANY_CELLS:
            for at in chosen:
                own = range(begin[at], end[at] + 1)
                found = self._in_strips(band, own, later, moves.stops[at])
                yield np.array([at]), np.arange(own.start, own.stop)[None], found[None]
            return
        at_once = max(1, MOST_CELLS // (number * band.width))
        for first in range(0, len(chosen), at_once):
            some = chosen[first : first + at_once]
            cuts = np.minimum(begin[some, None] + np.arange(number), len(self.bands.cuts) - 1)
            after = later.windows(moves.stops[some], cuts, band.width)
            yield some, cuts, self.combine(band.rows(cuts), after).min(axis=2)

    def _in_strips(self, band: StageBand, cuts: range, later: _After, stop: int) -> Floats:
        """Return, for each first cut in ``cuts``, the least objective of a stage that ends at
        position ``stop`` together with all later stages."""
        low, high = int(later.low[stop]), int(later.high[stop])
        found = []
        at_once = max(1, STRIP_CELLS // band.width)
        for first in range(cuts.start, cuts.stop, at_once):
            some = range(first, min(first + at_once, cuts.stop))
            columns = range(max(0, low - some.stop), min(band.width, high - first))
            after = later.strip(stop, some, columns)
            found.append(self.combine(band.strip(some, columns, high), after).min(axis=0))
        return np.concatenate(found)

    def least(self, num_stages: int) -> float:
        """Return the least objective of pipelines of ``num_stages`` stages; infinite if none."""
        value = self.values[num_stages].get(0) if num_stages < len(self.values) else None
        return float("inf") if value is None else float(value[0])

    def stages(self, num_stages: int) -> tuple[tuple[int, int, Move], ...]:
        """Return (first cut, end cut, devices) of each stage in the best ``num_stages`` stages."""
        found = []
        cut, position = 0, 0
        for left in range(num_stages, 0, -1):
            best: tuple[float, int, Move] | None = None
            for move in self.tiling.moves_from(left, position):
                after = self.values[left - 1].get(move.stop)
                band = self.bands.stage(left, move.place, position == 0)
                if after is None or not band.width:
                    continue
                behind = np.full(band.width, np.inf)
                behind[: len(after) - cut - 1] = after[cut + 1 : cut + 1 + band.width]
                total = self.combine(band.rows(np.array([cut])), behind[None])[0]
                at = int(total.argmin())
                if best is None or total[at] < best[0]:
                    best = (float(total[at]), cut + 1 + at, move)
            assert best is not None, "the recurrence has a value here"
            found.append((cut, best[1], best[2]))
            cut, position = best[1], best[2].stop
        return tuple(found)


@dataclass(frozen=True)
class _After:
    """Least objective of the later stages, by the position on the devices and the cut between
    blocks where they begin. ``row``: row of a position in ``values``; ``low``, ``high``: its first
    and last cut with a finite value."""

    values: Floats
    row: Ints
    low: Ints
    high: Ints

    @staticmethod
    def of(after: dict[int, Floats], end: int) -> _After:
        """Build the object from ``after``, which maps each position on the devices to the later
        stages' least objective by cut between blocks. ``end``: last position."""
        size = len(next(iter(after.values())))
        values = np.full((len(after), 2 * size), np.inf)
        row, low, high = (np.full(end + 1, fill) for fill in (0, size, -1))
        for at, (position, own) in enumerate(after.items()):
            values[at, :size] = own
            cuts = np.flatnonzero(np.isfinite(own))
            row[position], low[position], high[position] = at, cuts[0], cuts[-1]
        return _After(values, row, low, high)

    def has_any(self, positions: Ints) -> bool:
        return bool((self.high[positions] >= 0).any())

    def cuts(self, band: StageBand, stops: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last cut at which a stage may begin, for each stop position."""
        at = band.cuts.at
        low = np.minimum(self.low[stops], len(at) - 1)
        begin = np.searchsorted(at, at[low] - band.most_blocks)
        return begin, self.high[stops] - 1

    def windows(self, stops: Ints, cuts: Ints, width: int) -> Floats:
        """Return an array ``[i, cut, j]`` with j < ``width``: the objective of all later stages, if
        they have the devices from position ``stops[i]`` on and the blocks from cut ``cuts[i, cut] +
        j + 1`` on. A cut is a position between blocks."""
        step = self.values.strides[1]
        rows, size = self.values.shape
        every = np.lib.stride_tricks.as_strided(
            self.values[:, 1:], (rows, size // 2, width), (self.values.strides[0], step, step)
        )
        found: Floats = every[self.row[stops][:, None], cuts]
        return found

    def strip(self, stop: int, cuts: range, columns: range) -> Floats:
        """Return a view ``[j, cut]`` with j in ``columns``: the objective of all later stages, if
        they have the devices from position ``stop`` on and the blocks from cut ``cut + j + 1``
        on."""
        step = self.values.strides[1]
        start = self.values[self.row[stop], cuts.start + columns.start + 1 :]
        return np.lib.stride_tricks.as_strided(start, (len(columns), len(cuts)), (step, step))


def last_cuts(tiling: Tiling, bands: CostTiles, number: int) -> Ints:
    """Return, for each position, the last cut between blocks that the stages before it can reach
    with no m above the bound; −1 if none can. ``number``: maximum number of stages."""
    alive = np.zeros(tiling.end + 1, dtype=bool)
    alive[tiling.end] = True
    longest: dict[tuple[int, int], int] = {}
    for left in range(1, number + 1):
        begun = np.zeros(tiling.end + 1, dtype=bool)
        for first in (True, False):
            for place, moves in tiling.groups(left, first=first).items():
                can = alive[moves.stops]
                num_blocks = bands.stage(left, place, first).most_blocks if can.any() else 0
                if num_blocks:
                    key = (place, 0 if first else tiling.most - left if tiling.fixed else 1)
                    longest[key] = max(longest.get(key, 0), num_blocks)
                    begun[moves.starts[can]] = True
        alive = begun
        if not alive.any():
            break
    come = [0] + [-1] * tiling.end
    for move in sorted(tiling.moves, key=lambda each: each.start):
        own = longest.get((move.place, move.start if tiling.fixed else min(move.start, 1)), 0)
        if own and come[move.start] >= 0:
            come[move.stop] = max(come[move.stop], come[move.start] + own)
    found: Ints = np.searchsorted(bands.cuts.at, np.array(come), side="right") - 1
    return found


def sum_cost(stage: TileRows | TileBlock, after: Floats) -> Floats:
    """Return Σ q (seconds paid once per stage) of a stage and later stages with Σ q ``after``."""
    total: Floats = stage.once + after
    return total


def max_cost(stage: TileRows | TileBlock, after: Floats) -> Floats:
    """Return max m (seconds paid by the slowest stage) of a stage and the later stages, whose max m
    is ``after``."""
    found: Floats = np.maximum(stage.slowest, after)
    return found


def turnaround_cost(stage: TileRows | TileBlock, after: Floats) -> Floats:
    """Return a lower bound in seconds of the step of a stage and the later stages, whose bound is
    ``after``: the longest path of micro-batches to any stage and back.

    A stage cannot begin before the first micro-batch has passed all stages before it, and its last
    micro-batch still has to pass back through them. With q_j the seconds of stage j for one
    micro-batch and m_i the seconds of stage i for all others, a step takes at least

        max_i  Σ_{j ≤ i} q_j + m_i

    which, computed from the last stage to the first, is q + max(m, later stages).
    """
    total: Floats = stage.once + np.maximum(stage.slowest, after)
    return total
