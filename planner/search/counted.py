"""What no pipeline of a tiling is faster than, by counting how many blocks its stages can have.

In: what a stage takes for any run of blocks, by place and stages to come. Out: by number of
stages a lower bound of the step. In so many seconds a stage can have no more than its longest run
that takes no longer; if the stages of no tiling have all blocks together, the step is longer.
Which blocks come where does not matter, so this takes a part of the time of a sweep over cuts:
for each of some seconds at once, the most blocks from every position on,

    M(s, p) = max over moves p → q of  longest(move, s) + M(s − 1, q).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..inter_op.sweep import Tiling
from ..pricing.run_classes import Floats, Ints

LEVELS = 160
"""Seconds that are tried: of a bound that is twice the least, steps of less than 0.5 %."""

Taken = Callable[[int, int, bool], Floats | None]
"""(stages left, place, whether it is the first) → by class what a stage takes in all, infinite
where it cannot; None where there is no mesh. For stages that cost the same, the same array."""


def counted_bounds(
    tiling: Tiling, lengths: Ints, taken: Taken, *, low: float, high: float
) -> dict[int, float]:
    """By number of stages a bound between ``low``, which is one, and ``high``.

    ``lengths``: the blocks of each class.
    """
    levels = np.geomspace(low, high, LEVELS)
    known: dict[int, tuple[Floats, Floats]] = {}
    num_blocks = int(lengths.max())
    most = np.full((tiling.end + 1, LEVELS), -np.inf)
    most[tiling.end] = 0.0
    found: dict[int, float] = {}
    for left in range(1, tiling.most + 1):
        now = np.full_like(most, -np.inf)
        for first in (True, False):
            for place, moves in tiling.groups(left, first=first).items():
                seconds = taken(left, place, first)
                if seconds is None:
                    continue
                if id(seconds) not in known:
                    known[id(seconds)] = seconds, _longest(seconds, lengths, levels)
                own = known[id(seconds)][1]
                np.maximum.at(now, moves.starts, most[moves.stops] + own)
        at = int(np.searchsorted(now[0], num_blocks))  # the first level in which all blocks are
        found[left] = low if at == 0 else float(levels[at - 1])
        most = now
    return found


def _longest(seconds: Floats, lengths: Ints, levels: Floats) -> Floats:
    """For each level the blocks of the longest run that takes no longer."""
    order = np.argsort(seconds)
    longest = np.append(-np.inf, np.maximum.accumulate(lengths[order].astype(np.float64)))
    found: Floats = longest[np.searchsorted(seconds[order], levels, side="right")]
    return found
