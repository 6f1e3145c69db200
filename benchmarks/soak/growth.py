"""Does a series of samples grow? A robust test: the Theil-Sen slope after a warm-up.

In: seconds and values. Out: the first and last level, the growth over the time and whether it is
one. Resident memory is never quite still: heaps are trimmed late, and buffers come and go; single
samples may be anywhere. The slope of Theil and Sen, the median of the slopes of all pairs, ignores
up to 29 % of such samples (Sen 1968, https://doi.org/10.1080/01621459.1968.10480934).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

WARM_UP = 0.3
"""The share of the time that is left out: caches, heaps and pools get their size in it."""
LEAST_SAMPLES = 20
MOST_POINTS = 200
"""More samples are thinned out to so many, as all pairs are looked at."""
MOST_GROWTH = {"memory": 3.0 * 2**20, "files": 0.9, "threads": 0.9}
"""What may be added over the time that is looked at; a file or thread more is one too many."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values at ascending seconds."""

    seconds: Sequence[float]
    values: Sequence[float]


class Growth(NamedTuple):
    """Over ``seconds`` after the warm-up: the median of the first and of the last third, what the
    slope adds, and whether that is too much."""

    seconds: float
    first: float
    last: float
    growth: float
    grows: bool


def slope(series: Series) -> float:
    """The median of the slopes of all pairs of samples.

    >>> slope(Series([0, 1, 2, 3], [5, 7, 90, 11]))
    2.0
    """
    points = list(zip(series.seconds, series.values, strict=True))
    slopes = [
        (value - before) / (second - earlier)
        for index, (second, value) in enumerate(points)
        for earlier, before in points[:index]
        if second > earlier
    ]
    return median(slopes)


def growths(series: Series, quantity: str) -> Growth | None:
    """How a quantity of ``MOST_GROWTH`` grows after the warm-up; None of too few samples."""
    begin = (
        series.seconds[0] + WARM_UP * (series.seconds[-1] - series.seconds[0])
        if (series.seconds)
        else 0.0
    )
    kept = [pair for pair in zip(series.seconds, series.values, strict=True) if pair[0] >= begin]
    if len(kept) < LEAST_SAMPLES:
        return None
    third = len(kept) // 3
    first = median(value for _, value in kept[:third])
    last = median(value for _, value in kept[-third:])
    thinned = kept[:: -(-len(kept) // MOST_POINTS)]
    added = slope(Series(*zip(*thinned, strict=True)))
    added *= kept[-1][0] - kept[0][0]
    grows = added > MOST_GROWTH[quantity] and last > first
    return Growth(kept[-1][0] - kept[0][0], first, last, added, grows)
