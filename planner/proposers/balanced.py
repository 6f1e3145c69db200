"""Cuts of blocks into runs of consecutive blocks, with the heaviest run as light as possible.

In: the weights of blocks in order, such as FLOPs; a number of runs. Out: the starts of the runs.
Dynamic programming over ends and runs; runs heavier than the heaviest run of a known cut are
omitted, which leaves few.

``rebalance`` balances ranks that have several runs each: blocks move one at a time from a run of
the heaviest rank to a run of the lightest, while this lowers the sum of the ranks' squared weights.
(In V-shaped schedules, runs cannot all be equal: the first and the last, a light embedding and a
heavy loss, share a rank.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..costs.choices import input_specs
from ..costs.prices import Rules
from ..graph.graph import Blocks, Graph

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[Any]

MARGIN = 1e-9
"""Relative difference of sums of squares that counts as rounding."""

NUM_HALVINGS = 40
"""Number of bisections of the interval that contains the heaviest run's least weight."""


def block_flops(graph: Graph, blocks: Blocks, rules: Rules) -> list[float]:
    """Return the FLOPs of forward and backward of each block; equal blocks are counted once."""
    flops: dict[str, float] = {}
    for kind, block in blocks.kinds.items():
        flops[kind] = 0.0
        for name in block.nodes:
            node = graph[name]
            work = rules.work(node, input_specs(node, graph), node.outputs)
            flops[kind] += work.flops_forward + work.flops_backward
    return [flops[block.kind] for block in blocks.blocks]


def balanced(weights: Sequence[float], number: int) -> tuple[int, ...]:
    """Return the starts of ``number`` runs of blocks whose heaviest run is as light as possible.

    Among equal cuts the least sum of squared weights wins, but each run only extends the best cut
    of the blocks before it.

    >>> balanced([1.0, 1.0, 1.0, 3.0, 1.0], 3)
    (0, 3, 4)
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    count = len(weights)
    starts, own = _runs(sums, _enough(sums, number))
    squared = own**2
    most, squares = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    most[0] = squares[0] = 0.0
    places = np.arange(count + 1)
    rank = places  # order of the starts of runs up to a stop: the earliest cuts win
    before = []
    for _ in range(number):
        heaviest = np.maximum(most[starts], own)
        most = heaviest.min(axis=1)
        both = np.where(heaviest == most[:, None], squares[starts] + squared, np.inf)
        squares = both.min(axis=1)
        first = np.where(both == squares[:, None], rank[starts], count + 1).argmin(axis=1)
        start = starts[places, first]
        order = np.lexsort((start, rank[start]))
        rank = np.empty_like(places)
        rank[order] = places
        before.append(start)
    found: list[int] = []
    at = count
    for start in reversed(before):
        at = int(start[at])
        found.append(at)
    return tuple(reversed(found))


def rebalance(
    weights: Sequence[float], starts: Sequence[int], parts: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return ``starts`` with blocks moved between runs until the ranks, which own the runs listed
    in ``parts``, are about equally heavy. Among equal cuts the most equal runs win.

    >>> rebalance([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0], (0, 2, 4, 6), ((0, 3), (1, 2)))
    (0, 3, 4, 6)
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    ranks = np.empty(len(starts), dtype=np.int64)
    for rank, runs in enumerate(parts):
        ranks[list(runs)] = rank
    at = np.append(starts, len(weights))
    least = _squares(sums, at, ranks)
    while True:
        heavy = np.bincount(ranks, weights=np.diff(sums[at]))
        moved = [
            _moved(at, giving, taking)
            for giving in parts[int(heavy.argmax())]
            for taking in parts[int(heavy.argmin())]
            if at[giving + 1] - at[giving] > 1
        ]
        every = [(*_squares(sums, own, ranks), number) for number, own in enumerate(moved)]
        best = min(every, default=(np.inf, np.inf, 0))
        if best[0] >= least[0] * (1 - MARGIN):
            return tuple(int(own) for own in at[:-1])
        at, least = moved[best[2]], best[:2]


def _moved(at: Places, giving: int, taking: int) -> Places:
    """Return the ends of runs after run ``giving`` gives a block to run ``taking``."""
    found = at.copy()
    if giving < taking:
        found[giving + 1 : taking + 1] -= 1
    else:
        found[taking + 1 : giving + 1] += 1
    return found


def _squares(sums: Floats, at: Places, ranks: Places) -> tuple[float, float]:
    """Return the sum of squared weights of ranks, and of runs."""
    runs = np.diff(sums[at])
    return float((np.bincount(ranks, weights=runs) ** 2).sum()), float((runs**2).sum())


def _runs(sums: Floats, most: float) -> tuple[Places, Floats]:
    """Return, for each end, the starts of runs that weigh at most ``most``, and the runs' weights.

    Both have the shape ``[end, choice]``; weights of impossible choices are infinite.
    """
    ends = np.arange(len(sums))
    width = max(1, int((ends - np.searchsorted(sums, sums - most)).max()))
    starts = ends[:, None] - 1 - np.arange(width)
    is_run = starts >= 0
    starts = np.maximum(starts, 0)
    return starts, np.where(is_run, sums[:, None] - sums[starts], np.inf)


def _enough(sums: Floats, number: int) -> float:
    """Return an upper bound, near the minimum, of the heaviest run's weight if a sequence with
    prefix sums ``sums`` is cut into ``number`` runs."""
    low, high = sums[-1] / number, sums[-1]
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(sums, number, middle) else (middle, high)
    return float(high * (1 + 1e-9))


def _fits(sums: Floats, number: int, most: float) -> bool:
    """Return whether ``number`` runs of weight ``most`` or less can cover the whole sequence."""
    at, count = 0, len(sums) - 1
    for _ in range(number):
        at = int(np.searchsorted(sums, sums[at] + most, side="right")) - 1
        if at >= count:
            return True
    return False
