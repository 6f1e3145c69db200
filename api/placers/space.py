"""Search space of a placer: every pipeline whose stages have finite costs.

In: the table that the dynamic program searches (``inter_op``). Out: masks of the decisions that can
still lead to a pipeline, for a policy; and random pipelines.

With s stages to come, for the blocks from k on, on the devices from d on,

    N(s, k, d) = Σ over i, n of  [t(k..i, n at d, s) < ∞]·N(s − 1, i, d + n),  N(0, K, D) = 1

counts the remaining pipelines. A decision is allowed if its N is positive. Decisions drawn in
proportion to N give every pipeline of s stages equal probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoparallel.planner.inter_op.inter_op import Floats, StageChoice, Table, pipeline_seconds

Price = Callable[[tuple[StageChoice, ...]], float]
"""Function from stages to the seconds of a step, infinite if they cannot be run."""


@dataclass(frozen=True)
class Problem:
    """Problem for learning: cut blocks into stages and assign devices for the least step time.

    ``table`` has the seconds t of all stages. ``num_stages`` are the allowed numbers of stages.
    ``price`` returns a step's seconds, by default T = Σ t + (B − 1)·max t for B micro-batches.
    ``edges`` (from, to) connect blocks; None is a chain.
    """

    table: Table
    num_microbatches: int
    num_stages: tuple[int, ...]
    price: Price | None = None
    edges: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Space:
    """Set of a problem's runnable pipelines, with the seconds of stages and counts of pipelines.

    ``costs`` are seconds of stages by (stages left, first device, devices). ``counts``, by (stages
    left, first device), have for each block the number of ways to divide the model from it on,
    divided by the largest such number for these stages left, which is in ``largest``. ``sizes`` are
    numbers of devices of a stage, ``numbers`` numbers of stages.
    """

    problem: Problem
    sizes: tuple[int, ...]
    numbers: tuple[int, ...]
    costs: dict[tuple[int, int, int], Floats]
    counts: dict[tuple[int, int], Floats]
    largest: dict[int, float]
    num_pipelines: float
    _ways: dict[tuple[int, int, int, int], Floats] = field(default_factory=dict)
    _begins: dict[tuple[int, int, int], Floats] = field(default_factory=dict)

    def ways(self, left: int, first: int, size: int, start: int) -> Floats:
        """Return, for each end of a stage that starts at block ``start``, the scaled number of ways
        to divide the blocks behind it. ``left`` counts the stages left, this one included; the
        stage has ``size`` devices from device ``first``."""
        key = (left, first, size, start)
        if key not in self._ways:
            cost, after = self.costs.get(key[:3]), self.counts.get((left - 1, first + size))
            if cost is None or after is None:
                found = np.zeros(self.problem.table.num_blocks + 1)
            else:
                found = np.isfinite(cost[start]) * after
            self._ways[key] = found
        return self._ways[key]

    def begins(self, left: int, first: int, start: int) -> Floats:
        """Return, for each number of devices of a stage that starts at block ``start`` and device
        ``first``, the number of ways to continue, scaled as in ``ways`` for the previous stage."""
        key = (left, first, start)
        if key not in self._begins:
            found = [self.ways(left, first, size, start).sum() for size in self.sizes]
            self._begins[key] = np.array(found) / self.largest.get(left, 1.0)
        return self._begins[key]

    def stage_seconds(self, stages: Sequence[StageChoice]) -> list[float] | None:
        """Return the seconds of every stage, or None if the pipeline cannot be run."""
        if len(stages) not in self.numbers:
            return None
        found = []
        for index, stage in enumerate(stages):
            cost = self.costs.get((len(stages) - index, stage.first_device, stage.num_devices))
            seconds = np.inf if cost is None else float(cost[stage.start, stage.stop])
            if not np.isfinite(seconds):
                return None
            found.append(seconds)
        return found

    def seconds(self, stages: tuple[StageChoice, ...]) -> float:
        """Return the seconds of a step with these stages; infinite if they cannot be run."""
        own = self.stage_seconds(stages)
        if own is None:
            return np.inf
        if self.problem.price is not None:
            return self.problem.price(stages)
        return pipeline_seconds(own, self.problem.num_microbatches)

    def draw(self, rng: np.random.Generator) -> tuple[StageChoice, ...]:
        """Draw a pipeline: first its number of stages, then the pipeline, each uniformly."""
        left, start, first = int(rng.choice(self.numbers)), 0, 0
        stages = []
        while left > 0:
            odds = np.stack([self.ways(left, first, n, start) for n in self.sizes])
            chosen = int(rng.choice(odds.size, p=(odds / odds.sum()).ravel()))
            size, stop = self.sizes[chosen // odds.shape[1]], chosen % odds.shape[1]
            stages.append(StageChoice(start, stop, first, size))
            left, start, first = left - 1, stop, first + size
        return tuple(stages)


def space_of(problem: Problem) -> Space:
    """Return the runnable pipelines of a problem: all whose stages have finite seconds."""
    table, wanted = problem.table, problem.num_stages
    done = np.zeros(table.num_blocks + 1)
    done[table.num_blocks] = 1.0
    costs: dict[tuple[int, int, int], Floats] = {}
    counts: dict[tuple[int, int], Floats] = {(0, table.num_devices): done}
    largest: dict[int, float] = {}
    scale, num_pipelines = 1.0, 0.0
    for left in range(1, max(wanted, default=0) + 1):
        level: dict[int, Floats] = {}
        for first in range(table.num_devices):
            if (first == 0 and left not in wanted) or (first > 0 and left >= max(wanted)):
                continue
            for size in table.sizes(first):
                after = counts.get((left - 1, first + size))
                if after is None or (left == 1) != (first + size == table.num_devices):
                    continue
                cost = table.costs(left, first, size)
                ways = np.isfinite(cost).astype(np.float64) @ after
                if ways.any():
                    costs[left, first, size] = cost
                    level[first] = level.get(first, 0.0) + ways
        largest[left] = max((float(ways.max()) for ways in level.values()), default=1.0)
        counts.update({(left, first): ways / largest[left] for first, ways in level.items()})
        scale *= largest[left]
        num_pipelines += scale * float(counts[left, 0][0]) if (left, 0) in counts else 0.0
    numbers = tuple(s for s in wanted if (s, 0) in counts and counts[s, 0][0] > 0)
    sizes = tuple(sorted({size for _, _, size in costs}))
    return Space(problem, sizes, numbers, costs, counts, largest, num_pipelines)


def block_shares(space: Space) -> Floats:
    """Return each block's least seconds as a stage alone, relative to the mean; 1 if unknown."""
    blocks = space.problem.table.num_blocks
    least = np.full(blocks, np.inf)
    for cost in {id(matrix): matrix for matrix in space.costs.values()}.values():
        least = np.minimum(least, np.diagonal(cost, 1)[:blocks])
    known = np.isfinite(least)
    mean = float(least[known].mean()) if known.any() else 1.0
    return np.where(known, least / (mean or 1.0), 1.0)
