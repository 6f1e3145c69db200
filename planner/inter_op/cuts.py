"""Cuts at which stages may begin and end, and classes of runs of blocks that cost the same.

In: the cuts between blocks, the class of the run between any two cuts. Out: the seconds of classes
as bands: the entry ``[k, j]`` is for the run between the cuts k and k + j + 1. A band is as wide as
the longest run within a bound, and shared by stages that cost the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Seconds = Callable[[int, int, bool], tuple[Floats, Floats]]
"""Function of (stages to the end, place, whether it is the first stage) that returns two times for
each class of runs: q, which counts once per stage, and m, which counts for the slowest stage only.
A place is a set of submeshes on which stages cost the same.

Both are infinite if the run is impossible. Stages that cost the same share the arrays.
"""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Positions ``at`` between blocks where stages may begin or end (cuts), from 0 to the block
    count.

    ``numbers[k, i]`` is the class of the blocks from cut k to cut i, equal for sequences of blocks
    that cost the same; ``len(lengths)`` if they cannot be a stage. ``lengths`` has the number of
    blocks of each class.
    """

    at: Ints
    numbers: Ints
    lengths: Ints
    _widths: dict[int, int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.at)

    @cached_property
    def band(self) -> Ints:
        """Return ``[k, j]``: the class of the blocks between cuts k and k + j + 1."""
        size = len(self.at)
        padded = np.full((size, 2 * size - 1), len(self.lengths), dtype=np.int64)
        padded[:, :size] = self.numbers
        rows = np.arange(size)[:, None]
        found: Ints = padded[rows, rows + 1 + np.arange(size - 1)[None, :]]
        return found

    @cached_property
    def alike(self) -> Ints:
        """Return, for each cut k, how many first entries ``band[k]`` and ``band[k - 1]`` share."""
        differs = self.band[1:] != self.band[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), differs.shape[1])
        return np.append(0, first)

    def width(self, num_blocks: int) -> int:
        """Return the most cuts that a stage of up to ``num_blocks`` blocks spans, from any cut."""
        if num_blocks not in self._widths:
            stops = np.searchsorted(self.at, self.at + num_blocks, side="right") - 1
            self._widths[num_blocks] = int((stops - np.arange(len(self.at))).max())
        return self._widths[num_blocks]


@dataclass
class StageBand:
    """Seconds of one stage of a pipeline, as arrays ``[k, j]`` (bands) for the blocks between cuts
    k and k + j + 1. A stage has two times: q, paid once, and m, paid only by the slowest stage.

    ``by_class`` has q and m by class of blocks (``Cuts``). Entries whose m exceeds ``bound`` are
    infinite. ``most_blocks`` is the largest number of blocks of a stage within the bound.
    """

    cuts: Cuts
    by_class: tuple[Floats, Floats]
    bound: float
    _made: dict[int, Floats] = field(default_factory=dict)
    _bands: dict[int, Floats] = field(default_factory=dict)
    _asked: list[int] = field(default_factory=lambda: [0, 0])

    @cached_property
    def _within(self) -> NDArray[np.bool_]:
        once, slowest = self.by_class
        found: NDArray[np.bool_] = np.isfinite(once) & (slowest <= self.bound)
        return found

    @cached_property
    def most_blocks(self) -> int:
        return int(self.cuts.lengths[self._within].max(initial=0))

    @cached_property
    def width(self) -> int:
        return self.cuts.width(self.most_blocks)

    def _classes(self, which: int) -> Floats:
        """Return the stage's seconds q (paid once; ``which`` 0) or m (paid only by the slowest
        stage; 1) by class of blocks (``Cuts``); infinite where m exceeds the bound, and in a last
        entry."""
        if which not in self._made:
            own = np.where(self._within, self.by_class[which], np.inf)
            self._made[which] = np.append(own, np.inf)
        return self._made[which]

    def rows(self, cuts: Ints) -> TileRows:
        """Return the stage's seconds if it begins at one of ``cuts`` (positions between blocks),
        computed when needed."""
        return TileRows(self, cuts)

    def strip(self, cuts: range, columns: range, high: int) -> TileBlock:
        """Return the stage's seconds if it begins at consecutive ``cuts`` and ends before cut
        ``high``, computed when they are read. ``columns``: lengths in cuts, less one."""
        rows = np.arange(cuts.start + 1, cuts.stop)
        needed = np.minimum(columns.stop, high - rows)
        alike = self.cuts.alike[cuts.start + 1 : cuts.stop]
        return TileBlock(self, cuts, columns, bool((alike >= needed).all()))

    def along(self, which: int, strip: TileBlock) -> Floats:
        """Return the seconds q (paid once; ``which`` 0) or m (paid only by the slowest stage; 1) of
        the stages of a strip, ``[j, cut]``, with a single column if all cuts have equal seconds."""
        cuts, columns = strip.cuts, slice(strip.columns.start, strip.columns.stop)
        if strip.is_alike:
            return self._classes(which)[self.cuts.band[cuts.start, columns], None]
        rows = slice(cuts.start, cuts.stop)
        band = self._band(which, len(cuts))
        if band is None:
            return self._classes(which)[self.cuts.band[rows, columns]].T
        return band[rows, columns].T

    def taken(self, which: int, cuts: Ints) -> Floats:
        """Return the seconds q (paid once; ``which`` 0) or m (paid only by the slowest stage; 1) of
        stages that begin at one of ``cuts``, as ``[cut, j]``, where they end j + 1 cuts later."""
        band = self._band(which, cuts.size)
        if band is None:
            return self._classes(which)[self.cuts.band[cuts, : self.width]]
        return band[cuts]

    def _band(self, which: int, number: int) -> Floats | None:
        """Return q (``which`` 0) or m (1) of all stages, ``[cut, j]``; None while fewer rows were
        requested than it has. ``number``: rows that this call requests."""
        self._asked[which] += number
        if which not in self._bands and self._asked[which] > len(self.cuts):
            self._bands[which] = self._classes(which)[self.cuts.band[:, : self.width]]
        return self._bands.get(which)


@dataclass(frozen=True, slots=True)
class TileRows:
    """Seconds of a stage that begins at one of ``cuts`` (positions between blocks) and ends j + 1
    cuts later, ``[cut, j]``: ``once`` is paid once, ``slowest`` only by the slowest stage."""

    band: StageBand
    cuts: Ints

    @property
    def once(self) -> Floats:
        return self.band.taken(0, self.cuts)

    @property
    def slowest(self) -> Floats:
        return self.band.taken(1, self.cuts)


@dataclass(frozen=True, slots=True)
class TileBlock:
    """Seconds of a stage that begins at one of the consecutive ``cuts`` (positions between blocks)
    and ends j + 1 cuts later, j in ``columns``, as ``[j, cut]``: ``once`` is paid once, ``slowest``
    only by the slowest stage. ``is_alike``: all cuts have equal seconds."""

    band: StageBand
    cuts: range
    columns: range
    is_alike: bool

    @property
    def once(self) -> Floats:
        return self.band.along(0, self)

    @property
    def slowest(self) -> Floats:
        return self.band.along(1, self)


@dataclass
class CostTiles:
    """Seconds of every stage of a pipeline as ``StageBand``; infinite where the seconds m, paid
    only by the slowest stage, exceed ``bound``."""

    cuts: Cuts
    seconds: Seconds
    bound: float = float("inf")
    _made: dict[tuple[int, int], StageBand] = field(default_factory=dict)

    def stage(self, left: int, place: int, first: bool) -> StageBand:
        once, slowest = self.seconds(left, place, first)
        key = id(once), id(slowest)  # the band keeps both alive, so that their ids stay unique
        if key not in self._made:
            self._made[key] = StageBand(self.cuts, (once, slowest), self.bound)
        return self._made[key]
