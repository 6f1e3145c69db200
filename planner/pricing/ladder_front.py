"""The rungs of a long ladder that can be of use: of a run with many kinds of blocks.

In: what one block of each class costs and holds, as in ``ladder``. Out: the rungs that no other
one betters in seconds, bytes kept and transient bytes of every ZeRO stage. With ten kinds of
blocks there are a million rungs; those that can be the best for some limit are found group by
group: seconds and bytes add up over groups, transient bytes are the most of any, so what is
dominated in some groups is dominated whatever the others do (Bellman 1957; the same as for a
knapsack's states, Nemhauser and Ullmann, Management Science 15, 1969). Of each transient size
the front is thinned to so many points.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..plan import Recompute
from .ladder import Floats, Ints, Rung, Rungs, forced, ways_of

MOST_RUNGS = 5_000
"""A ladder of more rungs is not made whole; the points of a front that are kept, about."""

FEWEST_POINTS = 10
"""Points that are kept of each transient size at least."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a recomputed block adds, by class: ``seconds[mode, class]`` and ``kept_bytes``
    fully and selectively recomputed, ``transient_bytes[mode, zero, class]``."""

    seconds: Floats
    kept_bytes: Floats
    transient_bytes: Floats


@dataclass(frozen=True, slots=True)
class _Points:
    """Rungs ``numbers[mode, point, class]`` with their sums."""

    numbers: Ints
    seconds: Floats
    kept_bytes: Floats
    transient_bytes: Floats

    def some(self, index: Ints) -> _Points:
        return _Points(
            self.numbers[:, index], self.seconds[index], self.kept_bytes[index],
            self.transient_bytes[index],
        )  # fmt: skip


def front(counts: tuple[int, ...], kinds: tuple[str, ...], blocks: Blocks) -> Rungs:
    """The rungs, the first with nothing recomputed; of each set of modes those of use."""
    every: tuple[tuple[Recompute, ...], ...] = (("full", "selective"), ("full",), ("selective",))
    found = [forced("none", counts), forced("full", counts), forced("selective", counts)]
    ends = [_rows([rung]) for rung in found]
    rows = [ends[0], *(_front(counts, kinds, blocks, modes) for modes in every), *ends[1:]]
    numbers = np.concatenate(rows, axis=1)
    both = np.concatenate(list(numbers), axis=1)
    _, first = np.unique(both, axis=0, return_index=True)
    kept = np.sort(first)
    return Rungs(numbers[0, kept], numbers[1, kept])


def _rows(found: Sequence[Rung]) -> Ints:
    return np.array([[each.full for each in found], [each.selective for each in found]])


def _front(
    counts: tuple[int, ...], kinds: tuple[str, ...], blocks: Blocks, modes: Collection[Recompute]
) -> Ints:
    """``[mode, rung, class]`` of the rungs of use that recompute only as ``modes`` allow."""
    zeros = blocks.transient_bytes.shape[1]
    points = _Points(
        np.zeros((2, 1, len(counts)), dtype=np.int64), np.zeros(1), np.zeros(1),
        np.zeros((1, zeros)),
    )  # fmt: skip
    for place, ways in zip(*ways_of(counts, kinds), strict=True):
        allowed = ways[:, Rungs(*ways).within(modes)]
        points = _undominated(_joined(points, _group(place, allowed, blocks, len(counts))))
    return points.numbers


def _group(place: Sequence[int], ways: Ints, blocks: Blocks, num_classes: int) -> _Points:
    """The ways of a group of classes as points."""
    numbers = np.zeros((2, ways.shape[1], num_classes), dtype=np.int64)
    numbers[:, :, place] = ways
    used = (numbers > 0)[:, None] * blocks.transient_bytes[:, :, None]
    return _Points(
        numbers,
        np.einsum("mwc,mc->w", numbers, blocks.seconds),
        np.einsum("mwc,mc->w", numbers, blocks.kept_bytes),
        used.max(axis=(0, 3)).T,
    )


def _joined(one: _Points, other: _Points) -> _Points:
    """Every point of one with every point of the other."""
    here = np.repeat(np.arange(len(one.seconds)), len(other.seconds))
    there = np.tile(np.arange(len(other.seconds)), len(one.seconds))
    return _Points(
        one.numbers[:, here] + other.numbers[:, there],
        one.seconds[here] + other.seconds[there],
        one.kept_bytes[here] + other.kept_bytes[there],
        np.maximum(one.transient_bytes[here], other.transient_bytes[there]),
    )


def _undominated(points: _Points) -> _Points:
    """Of each transient size the points that no other of it betters in seconds and bytes."""
    _, group = np.unique(points.transient_bytes, axis=0, return_inverse=True)
    group = group.ravel()
    order = np.lexsort((points.seconds, points.kept_bytes, group))
    found = []
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    most = max(FEWEST_POINTS, MOST_RUNGS // len(starts))
    for own in np.split(order, starts[1:]):
        least = np.minimum.accumulate(points.seconds[own])
        better = np.append(True, points.seconds[own][1:] < least[:-1])
        found.append(_thinned(own[better], most))
    return points.some(np.concatenate(found))


def _thinned(front: Ints, most: int) -> Ints:
    """At most so many points of a front, both ends of it among them."""
    if len(front) <= most:
        return front
    at = np.linspace(0, len(front) - 1, most).astype(np.int64)
    kept: Ints = front[at]
    return kept
