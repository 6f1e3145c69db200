"""Where stages may begin and end, and which runs between two such places cost the same.

In: the cuts between blocks, the class of the run between any two of them. Out: the seconds of
classes laid out as bands, ``[k, j]`` of what lies between the cuts k and k + j + 1, as wide as
the longest run within a bound; made once for all stages that cost the same.
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
"""(stages left, place, whether it is the first) → of each class what a stage takes once, and
what it takes more as the slowest stage of all.

Both infinite where the run is impossible. For stages that cost the same, the same arrays.
"""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where runs may begin and end: before the blocks ``at``, ascending from 0 to their number.

    ``numbers[k, i]`` is the class between the cuts k and i, ``len(lengths)`` where there is none;
    ``lengths`` says how many blocks the runs of a class have.
    """

    at: Ints
    numbers: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.at)

    @cached_property
    def band(self) -> Ints:
        """``[k, j]`` the class of the blocks between the cuts k and k + j + 1."""
        size = len(self.at)
        padded = np.full((size, 2 * size - 1), len(self.lengths), dtype=np.int64)
        padded[:, :size] = self.numbers
        rows = np.arange(size)[:, None]
        found: Ints = padded[rows, rows + 1 + np.arange(size - 1)[None, :]]
        return found

    def width(self, num_blocks: int) -> int:
        """The most cuts that a run of so many blocks goes over."""
        stops = np.searchsorted(self.at, self.at + num_blocks, side="right") - 1
        return int((stops - np.arange(len(self.at))).max())


@dataclass
class StageBand:
    """What a stage takes, by class and as a band; nothing of what is slower than ``bound``.

    ``most_blocks`` has the longest run within it.
    """

    cuts: Cuts
    by_class: tuple[Floats, Floats]
    bound: float
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

    @cached_property
    def _classes(self) -> tuple[Floats, Floats]:
        """``by_class`` within the bound, with one that is no run at the end."""
        once, slowest = (np.where(self._within, own, np.inf) for own in self.by_class)
        return np.append(once, np.inf), np.append(slowest, np.inf)

    def rows(self, cuts: Ints) -> StageRows:
        """What it takes from some cuts on."""
        return StageRows(self, cuts)

    def taken(self, which: int, cuts: Ints) -> Floats:
        """Rows of the band of what a stage takes once or as the slowest.

        The band is made when as many rows as it has were asked for.
        """
        self._asked[which] += cuts.size
        if which not in self._bands and self._asked[which] > len(self.cuts):
            self._bands[which] = self._classes[which][self.cuts.band[:, : self.width]]
        if which in self._bands:
            return self._bands[which][cuts]
        return self._classes[which][self.cuts.band[cuts, : self.width]]


@dataclass(frozen=True, slots=True)
class StageRows:
    """Rows of a stage's bands."""

    band: StageBand
    cuts: Ints

    @property
    def once(self) -> Floats:
        return self.band.taken(0, self.cuts)

    @property
    def slowest(self) -> Floats:
        return self.band.taken(1, self.cuts)


@dataclass
class Bands:
    """The bands of all stages within a bound."""

    cuts: Cuts
    seconds: Seconds
    bound: float = float("inf")
    _made: dict[tuple[int, int], StageBand] = field(default_factory=dict)

    def stage(self, left: int, place: int, first: bool) -> StageBand:
        once, slowest = self.seconds(left, place, first)
        key = id(once), id(slowest)  # the band keeps both, so that no other gets their ids
        if key not in self._made:
            self._made[key] = StageBand(self.cuts, (once, slowest), self.bound)
        return self._made[key]
