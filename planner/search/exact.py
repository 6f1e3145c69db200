"""All pipelines of a small space, each simulated unless a bound says that it cannot win.

In: a job, the best step known so far. Out: every better candidate, and what no plan of the
space is faster than. The space is all micro-batch sizes, cuts, tilings of the devices by
submeshes, meshes, layouts, ZeRO stages, rungs of the recompute ladder and schedules of the
request. Pipelines come in the order of a lower bound of their step (``pipeline_bound``), with
each stage at its best in every figure; of a pipeline, the combinations of its stages' ways
(``ways``) in the order of theirs. So once a bound is not below the best step, all the rest is
done with (best-first branch and bound).

What is left undone, for the time limit or for being too many, keeps its bound: the least of
these bounds is what the answer's gap is taken from.

Ways that are no better in any figure are left out. That is safe where no two messages share a
port, as then no step gets shorter by a larger figure (``cost_model.free_ports``): in pipelines
of two stages, whose ranks have one neighbour each. In longer ones a slower way may leave a port
to a message on which more hangs (in 0.3 % of random figures, by up to 1.6 %). It still takes at
least what the way that was kept in its place takes with ports of its own: so of each pipeline
that is simulated this step is known too, and where it is below the best step found, the pipeline
is gone through once more with every way that there is. Where these are too many, that step is
the bound that the gap is taken from.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import comb

import numpy as np

from ..inter_op.inter_op import StageChoice
from ..inter_op.pipeline_bound import least_seconds
from ..inter_op.sweep import Tiling
from ..inter_op.ways import MeshWays, Points
from ..inter_op.ways_kind import TooManyError, distinct, front
from ..intra_op.intra_op import IntraOp
from ..pricing.branches import WeightedEdges, stage_depths
from ..pricing.decisions import Floats
from ..pricing.run_classes import NO_RUN
from ..pricing.step import latency_seconds, simulate_figures
from ..schedules import held as schedules_held
from ..schedules.held import Halves
from .candidates import edges, schedules, simulated
from .job import Job
from .report_plan import Candidate
from .space import tilings

MOST_PIPELINES = 5_000
"""Pipelines of all micro-batch sizes and schedules: with more a space is not small."""

MOST_COMBINATIONS = 1_000_000
"""Combinations of its stages' ways that are bounded for one pipeline."""

MOST_WORSE = 4_000
"""Combinations of ways that are worse than others that are simulated for one pipeline."""

SAME = 1 + 1e-9

Ways = tuple[Floats, list[tuple[Points, int]]]


@dataclass(frozen=True, slots=True)
class Whole:
    """A pipeline with its micro-batches' rows and its schedule; ``held`` micro-batches by stage."""

    rows: int
    schedule: str
    stages: tuple[StageChoice, ...]
    held: tuple[Halves, ...]
    needs: WeightedEdges | None


@dataclass
class ExactSearch:
    """The search of a small space. ``bound``: no plan takes less, as far as it went."""

    job: Job
    bar: float
    bound: float = 0.0
    _alone: dict[Whole, float] = field(default_factory=dict)
    _ways: dict[tuple[int, int, Halves, bool], Ways] = field(default_factory=dict)
    _meshes: dict[int, MeshWays] = field(default_factory=dict)

    def run(self, wholes: list[Whole]) -> Iterator[Candidate]:
        """Better and better candidates. Raises ``TooManyError`` if stages have too many ways."""
        heap = []
        for number, each in enumerate(wholes):
            is_split = any(map(schedules_held.is_split, each.held))
            least = self._least_unsplit(each) if is_split else self._least(each)
            heap.append((least, number, not is_split))
        heapq.heapify(heap)
        undone = unsplit = float("inf")
        while heap:
            least, number, is_exact = heap[0]
            self.bound = min(least, self.bar, undone, unsplit, *self._alone.values())
            if least * SAME >= min(self.bar, undone):
                break
            if self.job.effort.left_seconds <= 0:
                return
            if not is_exact:
                unsplit = min(unsplit, self._narrow(heap, wholes[number]))
                continue
            heapq.heappop(heap)
            found, left = self._best(wholes[number], least)
            undone = min(undone, left)
            if found is not None:
                yield found
        for whole, alone in sorted(self._alone.items(), key=lambda each: each[1]):
            if alone * SAME < min(self.bar, undone, unsplit):
                found, left = self._with_every_way(whole, alone)
                undone = min(undone, left)
                if found is not None:
                    yield found
        self.bound = min(self.bar, undone, unsplit)

    def _with_every_way(self, whole: Whole, alone: float) -> tuple[Candidate | None, float]:
        """The best of a pipeline with the ways that were left out, and a bound as ``_best``."""
        try:
            return self._best(whole, alone, every=True)
        except TooManyError:
            return None, alone

    def _narrow(self, heap: list[tuple[float, int, bool]], whole: Whole) -> float:
        """Finds the bound of the first of the heap by its split ways, and puts it back.

        Where these are too many it is left undone: its bound, else infinite.
        """
        least, number, _ = heapq.heappop(heap)
        try:
            found = self._least(whole)
        except TooManyError:
            return least
        if found < float("inf"):
            heapq.heappush(heap, (max(least, found), number, True))
        return float("inf")

    def _least_unsplit(self, whole: Whole) -> float:
        """A bound of split backwards from whole ones: as if all of them were gradients of weights,
        and only what waits for both halves took memory. Its ways are those of other schedules."""
        held = tuple(((own[0][0], 0),) for own in whole.held)
        figures = []
        for stage, own in zip(whole.stages, held, strict=True):
            ways, _ = self._ways_of(whole.rows, stage, own)
            if not len(ways):
                return float("inf")
            forward, backward, *rest = ways.min(axis=0)
            figures.append((forward, 0.0, *rest, backward))
        return float(least_seconds(figures, self._count(whole), whole.needs))

    def _count(self, whole: Whole) -> int:
        return self.job.num_microbatches(whole.rows)

    def _least(self, whole: Whole) -> float:
        """A bound over all ways of the stages; infinite where one does not fit."""
        figures = []
        for stage, held in zip(whole.stages, whole.held, strict=True):
            own, _ = self._ways_of(whole.rows, stage, held)
            if not len(own):
                return float("inf")
            figures.append(tuple(own.min(axis=0)))
        return float(least_seconds(figures, self._count(whole), whole.needs))

    def _ways_of(self, rows: int, stage: StageChoice, held: Halves, *, every: bool = False) -> Ways:
        """A stage's ways on all meshes of its submesh, or ``every`` one, if it may be worse."""
        costs = self.job.costs(rows)
        place = costs.place(stage.first_device, stage.num_devices)
        number = int(costs.runs.classes.numbers[stage.start, stage.stop])
        if number == NO_RUN:
            return _joined([])
        key = (id(costs.places[place]), number, held, every)
        if key not in self._ways:
            run = costs.runs.run(number)
            found: list[Points] = []
            for mesh in costs.places[place].meshes:
                own = self._mesh(mesh.solver)
                bar = self.job.num_microbatches(rows), self.bar
                limit = own.solver.limits.memory_bytes
                found += own.points(run, held, limit, bar, every=every)
            self._ways[key] = _joined(found, every=every)
        return self._ways[key]

    def _mesh(self, solver: IntraOp) -> MeshWays:
        return self._meshes.setdefault(id(solver), MeshWays(solver))

    def _best(
        self, whole: Whole, least: float, *, every: bool = False
    ) -> tuple[Candidate | None, float]:
        """The best of a pipeline if it is below ``bar``, and a bound of what was not tried."""
        count, needs = self._count(whole), whole.needs
        sets = [
            self._ways_of(whole.rows, stage, held, every=every)
            for stage, held in zip(whole.stages, whole.held, strict=True)
        ]
        chosen = self._promising([own for own, _ in sets], count, needs)
        if np.prod([float(len(each)) for each in chosen]) > MOST_COMBINATIONS:
            return None, least
        sizes = [len(each) for each in chosen]
        grid = np.indices(sizes).reshape(len(sizes), -1)
        picked = [rows[at] for rows, at in zip(chosen, grid, strict=True)]
        bounds = least_seconds(
            [tuple(own[rows].T) for (own, _), rows in zip(sets, picked, strict=True)], count, needs
        )
        if every and int((bounds * SAME < self.bar).sum()) > MOST_WORSE:
            return None, least
        best = None
        for at in np.argsort(bounds, kind="stable"):
            if bounds[at] * SAME >= self.bar:
                break
            if self.job.effort.left_seconds <= 0:
                return self._candidate(whole, sets, best), float(bounds[at])
            ways = [int(rows[at]) for rows in picked]
            figures = [tuple(own[way]) for (own, _), way in zip(sets, ways, strict=True)]
            seconds = self._seconds(whole, figures)
            if seconds * SAME < self.bar:
                self.bar, best = seconds, ways
        return self._candidate(whole, sets, best), float("inf")

    def _seconds(self, whole: Whole, figures: Sequence[Sequence[float]]) -> float:
        """The step; infinite if it is not below ``bar`` even where messages share no port."""
        wait = latency_seconds(self.job.cluster)

        def step(*, shared: bool) -> float:
            return simulate_figures(
                whole.schedule, self._count(whole), figures, edges=whole.needs,
                latency_seconds=wait, shared=shared,
            )  # fmt: skip

        if len(figures) <= 2:
            return step(shared=True)
        alone = step(shared=False)
        if alone * SAME >= self.bar:
            return float("inf")
        found = step(shared=True)
        if alone * SAME < found:
            self._alone[whole] = min(self._alone.get(whole, float("inf")), alone)
        return found

    def _promising(
        self, sets: list[Floats], count: int, needs: WeightedEdges | None
    ) -> list[np.ndarray]:
        """The ways of each stage that are not out with all others at their best."""
        least = [tuple(own.min(axis=0)) for own in sets]
        chosen = []
        for stage, own in enumerate(sets):
            figures = [*least[:stage], tuple(own.T), *least[stage + 1 :]]
            bounds = np.broadcast_to(least_seconds(figures, count, needs), len(own))
            chosen.append(np.flatnonzero(bounds * SAME < self.bar))
        return chosen

    def _candidate(
        self, whole: Whole, sets: list[Ways], ways: list[int] | None
    ) -> Candidate | None:
        if ways is None:
            return None
        count = self._count(whole)
        chosen = []
        for (_, where), way, held in zip(sets, ways, whole.held, strict=True):
            points, number = where[way]
            chosen.append((points.solver, points.answer(number, count, held)))
        return simulated(self.job, whole.rows, whole.schedule, whole.stages, chosen)


def _joined(
    found: Sequence[Points], *, every: bool = False
) -> tuple[Floats, list[tuple[Points, int]]]:
    """The ways of all meshes and ZeRO stages without those worse in everything."""
    if not found:
        return np.zeros((0, 6)), []
    seconds = np.concatenate([points.seconds for points in found])
    where = [(points, way) for points in found for way in range(len(points.seconds))]
    kept = distinct(seconds) if every else front(seconds)
    return seconds[kept], [where[row] for row in kept.tolist()]


def exact_candidates(
    job: Job, rows: tuple[int, ...], numbers: tuple[int, ...], bar: float
) -> Iterator[tuple[Candidate | None, float]]:
    """Candidates faster than ``bar`` as they are found, each with a bound over the whole space.

    The last is None with the final bound. Nothing where the space is not small.
    """
    wholes = all_pipelines(job, rows, numbers)
    if wholes is None:
        return
    began = time.perf_counter()
    search = ExactSearch(job, bar)
    try:
        for found in search.run(wholes):
            yield found, search.bound
        yield None, search.bound
    except TooManyError:
        return
    finally:
        job.took("exact", time.perf_counter() - began)


def is_few(job: Job, numbers: tuple[int, ...]) -> bool:
    """Whether the cuts alone do not make a space too large."""
    num_blocks = len(job.structure.blocks.blocks)
    return sum(comb(num_blocks - 1, number - 1) for number in numbers) <= MOST_PIPELINES


def all_pipelines(job: Job, rows: tuple[int, ...], numbers: tuple[int, ...]) -> list[Whole] | None:
    """Every pipeline under every schedule; None if there are more than ``MOST_PIPELINES``."""
    if not is_few(job, numbers):
        return None
    found: list[Whole] = []
    for each in rows:
        for stages in stagings(job, each, numbers):
            found += _scheduled(job, each, stages)
            if len(found) > MOST_PIPELINES:
                return None
    return found


def _scheduled(job: Job, rows: int, stages: tuple[StageChoice, ...]) -> Iterator[Whole]:
    needs = edges(job, rows, stages)
    depths = stage_depths(needs, len(stages))
    for schedule in schedules(job, len(stages), is_chain=needs is None):
        held = tuple(job.held(schedule, len(stages), rows, depth) for depth in depths)
        yield Whole(rows, schedule, stages, held, needs)


def stagings(job: Job, rows: int, numbers: tuple[int, ...]) -> Iterator[tuple[StageChoice, ...]]:
    """Every cut of the blocks on every tiling of the devices, as far as cuts are free."""
    num_blocks = len(job.structure.blocks.blocks)

    def extend(
        tiling: Tiling, left: int, block: int, position: int
    ) -> Iterator[tuple[StageChoice, ...]]:
        if left == 0:
            yield ()
            return
        for move in tiling.moves_from(left, position):
            stops = (num_blocks,) if left == 1 else range(block + 1, num_blocks - left + 2)
            for stop in stops:
                choice = StageChoice(block, stop, move.first_device, move.num_devices)
                for rest in extend(tiling, left - 1, stop, move.stop):
                    yield (choice, *rest)

    seen: set[tuple[StageChoice, ...]] = set()
    mixed = job.request.features.allows("mixed-stages")
    for tiling, number in tilings(job.cluster, numbers, job.costs(rows).place, mixed=mixed):
        if number <= min(tiling.most, num_blocks):
            for stages in extend(tiling, number, 0, 0):
                if stages not in seen and job.begins_as_asked(stages):
                    seen.add(stages)
                    yield stages
