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
from functools import cached_property, lru_cache
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


class Rung(NamedTuple):
    """How many blocks of each class are recomputed, fully and selectively; () is none."""

    full: tuple[int, ...] = ()
    selective: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """How many blocks are recomputed at all."""
        return sum(self.full) + sum(self.selective)


NOTHING = Rung()


@dataclass(frozen=True)
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
        for used, sizes in zip(self._used, (full, selective), strict=True):
            for each, own in enumerate(used):
                np.maximum(found, own * sizes[..., each, None], out=found)
        return found

    @cached_property
    def _used(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """``[class, rung]``: whether blocks are recomputed fully, and selectively."""
        return self.full.T > 0, self.selective.T > 0


def only(rung: Rung, num_classes: int) -> Rungs:
    """One rung as arrays."""
    rows = (each or (0,) * num_classes for each in rung)
    full, selective = (np.array([row]) for row in rows)
    return Rungs(full, selective)


def ways_of(counts: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[list[list[int]], list[Ints]]:
    """Groups of classes, and the ways of each that are combined with all ways of the others:
    ``[mode, way, class]``, how many blocks are recomputed fully and how many selectively."""
    if prod(comb(count + 2, 2) for count in counts) <= FEW_RUNGS:
        return (
            [[number] for number in range(len(counts))],
            [_pairs(count)[:, :, None] for count in counts],
        )
    places = [[n for n, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
    sizes = [sum(counts[n] for n in place) for place in places]
    commonest = sizes.index(max(sizes))
    return places, [
        _filled(*(_mixes(size) if number == commonest else _uniform(size)), counts=own)
        for number, (place, size) in enumerate(zip(places, sizes, strict=True))
        for own in (np.array([counts[n] for n in place]),)
    ]


@lru_cache(maxsize=4096)
def num_rungs(counts: tuple[int, ...], kinds: tuple[str, ...]) -> int:
    """How many rungs a run has."""
    return prod(own.shape[1] for own in ways_of(counts, kinds)[1])


@lru_cache(maxsize=4096)
def rungs(counts: tuple[int, ...], kinds: tuple[str, ...]) -> Rungs:
    """The rungs of a run with so many blocks of each class, which is of that kind.

    >>> found = rungs((1,), ("layer",))
    >>> [tuple(found[number]) for number in range(3)]
    [((0,), (0,)), ((0,), (1,)), ((1,), (0,))]
    """
    places, ways = ways_of(counts, kinds)
    every = np.indices([own.shape[1] for own in ways]).reshape(len(ways), -1)
    numbers = np.zeros((2, every.shape[1], len(counts)), dtype=np.int64)
    for place, own, chosen in zip(places, ways, every, strict=True):
        numbers[:, :, place] = own[:, chosen]
    return Rungs(*numbers)


def _pairs(count: int) -> Ints:
    """``[mode, way]``: every number fully and every number selectively recomputed.

    >>> _pairs(2).tolist()
    [[0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0]]
    """
    full, some = np.indices((count + 1, count + 1)).reshape(2, -1)
    found: Ints = np.stack([full, some])[:, full + some <= count]
    return found


def _mixes(count: int) -> Ints:
    """Of so many blocks, two of the three ways at a time; of very many in even steps.

    >>> _mixes(100).shape, _mixes(1000).shape, _mixes(1000)[:, -1].tolist()
    ((2, 300), (2, 540), [994, 6])
    """
    steps = min(count, MOST_STEPS)
    every = np.round(count * np.arange(1, steps + 1) / steps).astype(np.int64)
    none = np.zeros_like(every)
    full = np.concatenate([[0], none, every, every[:-1]])
    return np.stack([full, np.concatenate([[0], every, none, count - every[:-1]])])


def _uniform(count: int) -> Ints:
    return np.array([[0, 0, count], [0, count, 0]])


def _filled(full: Ints, some: Ints, *, counts: Ints) -> Ints:
    """``[mode, way, class]``: blocks taken from classes in order, the fully recomputed first."""
    before = np.cumsum(counts) - counts
    first = np.clip(full[:, None] - before, 0, counts)
    both = np.clip((full + some)[:, None] - before, 0, counts)
    return np.stack([first, both - first])


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
