"""Every way to recompute a run of blocks, with what each costs and holds.

In: the run's classes of equal blocks, how many of each; per block of a class the seconds to
run its forward again and the bytes that it keeps, fully and selectively recomputed. Out: for
every rung (of each class so many blocks fully and so many selectively recomputed) the seconds
again and the bytes: sums of the blocks'.

All numbers are tried where there are few. Otherwise the commonest kind's blocks mix two of
the three ways at a time, and every other kind's go one way: of equal blocks the best mix for
a memory limit, were it not for whole numbers, is of two neighbours on the convex hull of
(bytes, seconds).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import comb, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan import Recompute
from ..requests.features import MODES as MODES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEW_RUNGS = 400
"""Up to so many ways all are tried."""

MOST_STEPS = 180
"""Of more equal blocks than this, so many numbers of recomputed ones are tried."""


Way = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a few classes how many blocks are recomputed fully, and how many selectively."""


class Rung(NamedTuple):
    """How many blocks of each class are recomputed, fully and selectively; () is none."""

    full: tuple[int, ...] = ()
    selective: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """How many blocks are recomputed at all."""
        return sum(self.full) + sum(self.selective)


NOTHING = Rung()


@dataclass(frozen=True, slots=True)
class Rungs:
    """Rungs as arrays ``[rung, class]``, the first of them with nothing recomputed."""

    full: Ints
    selective: Ints

    def __getitem__(self, number: int) -> Rung:
        full, selective = self.full[number].tolist(), self.selective[number].tolist()
        return Rung(tuple(full), tuple(selective))

    def within(self, modes: Collection[Recompute]) -> NDArray[np.bool_]:
        """Which rungs recompute only as ``modes`` allow."""
        found = np.ones(len(self.full), dtype=np.bool_)
        for mode, numbers in (("full", self.full), ("selective", self.selective)):
            if mode not in modes:
                found &= ~numbers.any(axis=1)
        return found

    def sums(self, full: Floats, selective: Floats) -> Floats:
        """What blocks add on every rung, given per class what one of it adds."""
        found: Floats = self.full @ full + self.selective @ selective
        return found

    def most(self, full: Floats, selective: Floats) -> Floats:
        """The most that a recomputed block adds on every rung, 0 where none is.

        Given per class, ``[…, class]``; found ``[…, rung]``.
        """
        found = np.zeros((*full.shape[:-1], len(self.full)))
        for numbers, sizes in ((self.full, full), (self.selective, selective)):
            for each in range(numbers.shape[1]):
                own = (numbers[:, each] > 0) * sizes[..., each, None]
                np.maximum(found, own, out=found)
        return found


def only(rung: Rung, num_classes: int) -> Rungs:
    """One rung as arrays."""
    rows = (each or (0,) * num_classes for each in rung)
    full, selective = (np.array([row]) for row in rows)
    return Rungs(full, selective)


def ways_of(
    counts: tuple[int, ...], kinds: tuple[str, ...]
) -> tuple[list[list[int]], list[list[Way]]]:
    """Groups of classes, and the ways of each that are combined with all ways of the others."""
    if prod(comb(count + 2, 2) for count in counts) <= FEW_RUNGS:
        return (
            [[number] for number in range(len(counts))],
            [[((full,), (some,)) for full, some in _pairs(count)] for count in counts],
        )
    places = [[n for n, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
    sizes = [sum(counts[n] for n in place) for place in places]
    commonest = sizes.index(max(sizes))
    return places, [
        [
            (_filled(0, full, own), _filled(full, some, own))
            for full, some in (_mixes(size) if number == commonest else _uniform(size))
        ]
        for number, (place, size) in enumerate(zip(places, sizes, strict=True))
        for own in ([counts[n] for n in place],)
    ]


@lru_cache(maxsize=4096)
@lru_cache(maxsize=4096)
def num_rungs(counts: tuple[int, ...], kinds: tuple[str, ...]) -> int:
    """How many rungs a run has."""
    return prod(len(own) for own in ways_of(counts, kinds)[1])


@lru_cache(maxsize=4096)
def rungs(counts: tuple[int, ...], kinds: tuple[str, ...]) -> Rungs:
    """The rungs of a run with so many blocks of each class, which is of that kind.

    >>> found = rungs((1,), ("layer",))
    >>> [tuple(found[number]) for number in range(3)]
    [((0,), (0,)), ((0,), (1,)), ((1,), (0,))]
    """
    places, ways = ways_of(counts, kinds)
    order = np.argsort([n for place in places for n in place])
    full, selective = (
        np.array([[n for own in way for n in own[side]] for way in product(*ways)])[:, order]
        for side in (0, 1)
    )
    return Rungs(full, selective)


def _pairs(count: int) -> list[tuple[int, int]]:
    every = range(count + 1)
    return [(full, some) for full in every for some in range(count - full + 1)]


def _mixes(count: int) -> list[tuple[int, int]]:
    """Of so many blocks, two of the three ways at a time; of very many in even steps.

    >>> len(_mixes(100)), len(_mixes(1000)), _mixes(1000)[-1]
    (300, 540, (994, 6))
    """
    steps = min(count, MOST_STEPS)
    every = [round(count * at / steps) for at in range(1, steps + 1)]
    found = [(0, 0)] + [(0, some) for some in every] + [(full, 0) for full in every]
    return found + [(full, count - full) for full in every[:-1]]


def _uniform(count: int) -> list[tuple[int, int]]:
    return [(0, 0), (0, count), (count, 0)]


def _filled(before: int, count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """``count`` blocks, after ``before`` ones, taken from classes of these sizes in order."""
    found = []
    for size in sizes:
        skipped = min(before, size)
        taken = min(count, size - skipped)
        found.append(taken)
        before, count = before - skipped, count - taken
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Ladder:
    """What every rung of a run costs beside the run with nothing recomputed.

    Per rung: ``again_seconds`` of a micro-batch, ``kept_bytes`` that a micro-batch keeps more
    (less than 0 where it saves), and per ZeRO stage all ``transient_bytes``.
    """

    rungs: Rungs
    again_seconds: Floats
    kept_bytes: Floats
    transient_bytes: Floats


def forced(mode: str, counts: Sequence[int]) -> Rung:
    """Every block the same way.

    >>> forced("full", (1, 3))
    Rung(full=(1, 3), selective=(0, 0))
    """
    none = (0,) * len(counts)
    ways: Mapping[str, Rung] = {
        "none": Rung(none, none),
        "full": Rung(tuple(counts), none),
        "selective": Rung(none, tuple(counts)),
    }
    return ways[mode]
