"""Inter-op planning of a pipeline: the blocks of each stage, and its number of devices.

In: the seconds of every run of blocks on every submesh and position. Out: the stages that minimize

    T = Σ_i q_i + max_i m_i

over runs of blocks and submeshes that tile all devices in order. With q = t and m = (B − 1)·t for a
stage of t seconds per micro-batch, T is the step of a pipeline of B micro-batches (Zheng et al.
2022, Alpa, equations 2 to 4); here, q has the seconds that a stage takes once, and m the seconds
that the slowest stage takes B − 1 times or at the end of the step.

For a bound on m, one pass over the stages finds the least Σ q (``sweep``), and likewise the least
feasible bound. A pipeline whose largest m lies between two bounds has at least the Σ q of the upper
bound and the m of the lower: intervals of bounds are halved until none can hold a better pipeline
(Alpa tries all bounds instead). The number of stages to the end determines the micro-batches in
flight, hence the memory, of a stage.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .cuts import CostTiles, Cuts, Ints, Seconds
from .cuts import Floats as Floats
from .sweep import Combine, Move, Sweep, Tiling, max_cost, sum_cost, turnaround_cost

HALVED = 1e-4
"""Relative width to which an interval of bounds on m is bisected, before steps from above."""

MOST_SWEEPS = 200

COMBINES: Mapping[str, Combine] = {"sum": sum_cost, "largest": max_cost, "turning": turnaround_cost}


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Stage of a pipeline: blocks ``start`` to ``stop`` (exclusive), on consecutive devices."""

    start: int
    stop: int
    first_device: int
    num_devices: int

    @property
    def devices(self) -> range:
        """Return the devices of the stage, consecutive ranks."""
        return range(self.first_device, self.first_device + self.num_devices)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages of a pipeline in order, and its estimated step time T in seconds."""

    stages: tuple[StageChoice, ...]
    seconds: float


def total_seconds(stages: Sequence[tuple[float, float]]) -> float:
    """Return the pipeline time T = Σ q + max m of stages (q, m), in seconds: q is paid once per
    stage, m only by the slowest stage."""
    return sum(once for once, _ in stages) + max(slowest for _, slowest in stages)


def gap_adjusted_seconds(stages: Sequence[tuple[float, float]], gaps: Sequence[float]) -> float:
    """Return the pipeline time T in seconds if the q and m of each stage fell by the fraction
    ``gaps[stage]``, the most that better layouts can save; q and m: see ``total_seconds``.

    >>> gap_adjusted_seconds([(1.0, 4.0), (2.0, 8.0)], [0.0, 0.25])
    8.5
    """
    return total_seconds(
        [(q * (1 - gap), m * (1 - gap)) for (q, m), gap in zip(stages, gaps, strict=True)]
    )


@dataclass(frozen=True)
class Table:
    """Input of the dynamic program: ``sizes(first_device)``, the possible numbers of devices of a
    stage that begins there, and the stages' costs.

    ``costs(n, first_device, num_devices)`` is a matrix t[k, i]: seconds of a stage of blocks k to i
    − 1 with n stages to the end (itself included), infinite where impossible.
    """

    num_blocks: int
    num_devices: int
    sizes: Callable[[int], Sequence[int]]
    costs: Callable[[int, int, int], Floats]

    def tiling(self, most: int) -> Tiling:
        """Return the ways to divide the devices into up to ``most`` stages of possible sizes."""
        moves: list[Move] = []
        for first in range(self.num_devices):
            for size in self.sizes(first):
                if first + size <= self.num_devices:
                    moves.append(Move(first, first + size, len(moves), first, size))
        return Tiling(self.num_devices, tuple(moves), most)


@dataclass
class _TableSeconds:
    """Seconds q and m of stages from a ``Table``, as a function of the type ``cuts.Seconds``. Every
    stage is a class of its own."""

    table: Table
    tiling: Tiling
    num_microbatches: int
    _made: dict[tuple[int, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def cuts(self) -> Cuts:
        at = np.arange(self.table.num_blocks + 1)
        lengths = np.maximum(at[None, :] - at[:, None], 0)
        numbers: Ints = np.arange(lengths.size).reshape(lengths.shape)
        return Cuts(at, numbers, lengths.ravel())

    def __call__(self, left: int, place: int, first: bool) -> tuple[Floats, Floats]:
        if (left, place) not in self._made:
            move = self.tiling.moves[place]
            once = self.table.costs(left, move.first_device, move.num_devices).ravel()
            slowest = np.where(np.isfinite(once), 0.0, np.inf)
            if self.num_microbatches > 1:
                slowest = once * (self.num_microbatches - 1)
            self._made[left, place] = once, slowest
        return self._made[left, place]


def pipelines(
    table: Table, num_microbatches: int, num_stages: Iterable[int], *, tolerance: float = 0.0
) -> tuple[Pipeline, ...]:
    """Return the pipeline of least step time T for each feasible number of stages, fastest first.
    Each T is within the relative ``tolerance`` of the minimum."""
    numbers = sorted(set(num_stages))
    if not numbers:
        return ()
    tiling = table.tiling(min(numbers[-1], table.num_blocks, table.num_devices))
    seconds = _TableSeconds(table, tiling, num_microbatches)
    search = PipelineSearch(tiling, seconds.cuts(), seconds, tolerance)
    found = [each for number in numbers if (each := search.best(number)) is not None]
    return tuple(sorted(found, key=lambda pipeline: (pipeline.seconds, len(pipeline.stages))))


@dataclass
class PipelineSearch:
    """Search for the pipeline of least T = Σ q + max m on a tiling (ways to divide the devices into
    stages), for a number of stages; q is paid once per stage, m only by the slowest stage.

    Only pipelines with T below ``cutoff`` are searched, so stages whose m exceeds ``cutoff`` minus
    the least Σ q are skipped (``_limit``).
    """

    tiling: Tiling
    cuts: Cuts
    seconds: Seconds
    tolerance: float = 0.0
    cutoff: float = float("inf")
    _most: int = 0
    _bands: dict[float, CostTiles] = field(default_factory=dict)
    _sweeps: dict[tuple[str, float], Sweep] = field(default_factory=dict)

    def _sweep(self, what: str, bound: float, num_stages: int | None = None) -> Sweep:
        """Return the solved recurrence for one objective (a key of ``COMBINES``) over pipelines in
        which no stage's m exceeds ``bound``. Cached."""
        key = (what, bound)
        made = self._sweeps.get(key)
        if made is None or (num_stages is not None and len(made.values) <= num_stages):
            if num_stages is not None and not self.tiling.fixed:
                num_stages = max(num_stages, self._most)
            bands = self._bands.setdefault(bound, CostTiles(self.cuts, self.seconds, bound))
            self._sweeps[key] = Sweep.of(self.tiling, bands, COMBINES[what], most=num_stages)
        return self._sweeps[key]

    @cached_property
    def _limit(self) -> float:
        """Return the most seconds m, paid only by the slowest stage, that a pipeline faster than
        ``cutoff`` may have."""
        if not self.tiling.fixed or not np.isfinite(self.cutoff):
            return self.cutoff
        number = self.tiling.most
        every = [
            self.seconds(number - at, move.place, at == 0)[0]
            for at, move in enumerate(self.tiling.moves)
        ]
        return self.cutoff - least_sum(every, self.cuts)

    def bound(self, num_stages: int) -> float:
        """Return a lower bound of the seconds T = Σ q + max m of pipelines of ``num_stages``
        stages: the least Σ q plus the least max m."""
        least = self._sweep("sum", self._limit).least(num_stages)
        return least + self._bottleneck(num_stages) if np.isfinite(least) else least

    def _bottleneck(self, num_stages: int) -> float:
        return self._sweep("largest", self._limit).least(num_stages)

    def turning(self, num_stages: int) -> float:
        """Return the least ``turnaround_cost``, a lower bound of the step in seconds, of all
        pipelines of ``num_stages`` stages."""
        return self._sweep("turning", self.cutoff).least(num_stages)

    def best_of(self, numbers: Iterable[int]) -> Pipeline | None:
        """Return the pipeline of least T with one of the ``numbers`` of stages; None if no T is
        below ``cutoff``."""
        best: Pipeline | None = None
        below = self.cutoff
        bounds = sorted((self.bound(number), number) for number in numbers)
        for bound, number in bounds:
            if bound >= below:
                break
            self._most = max(other for least, other in bounds if least < below)
            found = self.best(number, below)
            if found is not None and found.seconds < below:
                best, below = found, found.seconds
        return best

    def best(self, num_stages: int, below: float = float("inf")) -> Pipeline | None:
        """Return the pipeline of least T with ``num_stages`` stages; None if no T is below
        ``cutoff``.

        If the least T is ``below`` or more, the result may be any pipeline or None.
        """
        most = min(self.cutoff, below)
        if self.bound(num_stages) >= most:
            return None
        top = self._within(num_stages, self._limit)
        assert top is not None, "the recurrence has a value"
        best, high, least = top
        low = self._bottleneck(num_stages)
        intervals = [(least + low, low, high, least)]
        for tried in range(MOST_SWEEPS):
            if not intervals:
                break
            lower, low, high, least = heapq.heappop(intervals)
            if lower >= min(best.seconds * (1 - self.tolerance), most) or low >= high:
                break
            middle = self._middle(low, high, is_first=tried == 0)
            if middle < high:
                heapq.heappush(intervals, (least + middle, middle, high, least))
            found = self._within(num_stages, middle)
            if found is not None:
                pipeline, high, least = found
                best = min(best, pipeline, key=lambda each: each.seconds)
                if low < high:
                    heapq.heappush(intervals, (least + low, low, high, least))
        return best if best.seconds < self.cutoff else None

    def _middle(self, low: float, high: float, *, is_first: bool) -> float:
        """Return the limit on m at which to split the interval of limits from ``low`` to ``high``:
        the limit nearest the middle that was solved already for other numbers of stages, if any."""
        known = [bound for what, bound in self._sweeps if what == "sum" and low < bound < high]
        if known and not self.tiling.fixed:
            return min(known, key=lambda bound: abs(bound - (low + high) / 2))
        if is_first:
            return low
        return (low + high) / 2 if high > low * (1 + HALVED) else float(np.nextafter(high, 0.0))

    def _within(self, num_stages: int, bound: float) -> tuple[Pipeline, float, float] | None:
        """Return (pipeline of least Σ q in which no stage's m exceeds ``bound``, its max m, its Σ
        q) or None. Stages pay q once; only the slowest pays m."""
        sweep = self._sweep("sum", bound, None if bound == self._limit else num_stages)
        if not np.isfinite(sweep.least(num_stages)):
            return None
        once, slowest, chosen = 0.0, 0.0, []
        for at, (start, stop, move) in enumerate(sweep.stages(num_stages)):
            both = self.seconds(num_stages - at, move.place, at == 0)
            number = self.cuts.numbers[start, stop]
            once += float(both[0][number])
            slowest = max(slowest, float(both[1][number]))
            chosen.append(StageChoice(start, stop, move.first_device, move.num_devices))
        return Pipeline(tuple(chosen), once + slowest), slowest, once


def least_sum(stages: Sequence[Floats], cuts: Cuts) -> float:
    """Return a lower bound of Σ q (seconds paid once per stage) over all ways to cut the blocks
    into the stages, where ``stages[i]`` has the q of stage i by class of blocks (``Cuts``).

    For any price ρ of a block, with L blocks in total,

        Σ_i q_i  >=  ρ·L + Σ_i min over runs of (q_i − ρ·length)

    (Lagrangian relaxation). Each stage's least seconds per block is tried as the price.
    """
    lengths, total = cuts.lengths, float(cuts.at[-1])
    every = {id(once): once for once in stages}
    counts = Counter(map(id, stages))

    def bound(rate: float) -> float:
        rest = {mark: float((once - rate * lengths).min()) for mark, once in every.items()}
        return rate * total + sum(counts[mark] * own for mark, own in rest.items())

    rates = {float(np.min(once / lengths, initial=np.inf)) for once in every.values()}
    return max((bound(rate) for rate in rates if np.isfinite(rate)), default=0.0)


def pipeline_seconds(stage_seconds: Sequence[float], num_microbatches: int) -> float:
    """Return the seconds T = Σ t + (B − 1)·max t of B = ``num_microbatches`` micro-batches through
    stages that take t seconds each per micro-batch.

    >>> pipeline_seconds((1.0, 2.0), 3)
    7.0
    """
    return sum(stage_seconds) + (num_microbatches - 1) * max(stage_seconds)
