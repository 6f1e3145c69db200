"""The runs of a graph at one micro-batch size, and where they may begin and end.

In: a structure, the classes of its runs. Out: a run of each class, the classes that a stage of
some role may have, and for cuts between blocks (between all, or only some) the class of what
lies between any two of them, which ``inter_op.sweep`` goes over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..inter_op.cuts import Cuts
from ..pricing.run_classes import NO_RUN, Ints, RunClasses, Series
from ..pricing.structure import Run, Structure
from .least_bytes import LeastBytes

NEIGHBOURS = 2
"""With a run, so many shorter and longer ones of its series are priced."""

STEP = 0.03
"""They are next to each other, or such a part of the run apart where that is more: of very long
runs the next ones say little of where memory cuts them."""


@dataclass(frozen=True)
class Runs:
    """The runs of a graph at one micro-batch size; ``count`` micro-batches make a step."""

    structure: Structure
    classes: RunClasses
    count: int

    def run(self, number: int) -> Run:
        """A run of a class."""
        return self.structure.run(*self.classes.firsts[number])

    @cached_property
    def least_bytes(self) -> LeastBytes:
        return LeastBytes(self.structure, self.classes)

    @cached_property
    def every(self) -> Cuts:
        """The cuts between all blocks."""
        return self.cuts(range(self.classes.num_blocks + 1))

    def cuts(self, at: Iterable[int]) -> Cuts:
        """Cuts before some blocks, the first and the end among them."""
        places = np.fromiter(at, dtype=np.int64)
        numbers = self.classes.numbers[np.ix_(places, places)]
        none = len(self.classes.firsts)
        return Cuts(places, np.where(numbers == NO_RUN, none, numbers), self.classes.lengths)

    def role(self, first: bool, last: bool) -> Ints:
        """The classes of the runs that may be a first, inner or last stage."""
        return self.classes.roles[first, last]

    @cached_property
    def series_of(self) -> dict[int, tuple[Series, int]]:
        """For each class its series and where in it the class is."""
        return {
            number: (series, at)
            for series in self.classes.series
            for at, number in enumerate(series.classes)
        }

    def near(self, number: int) -> tuple[int, ...]:
        """A class with some shorter and longer ones of its series."""
        series, at = self.series_of[number]
        step = max(1, int(series.lengths[at] * STEP))
        few = range(at - NEIGHBOURS * step, at + NEIGHBOURS * step + 1, step)
        return tuple(series.classes[each] for each in few if 0 <= each < len(series.classes))
