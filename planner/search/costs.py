"""Costs of stages at one micro-batch size, priced lazily.

In: solvers for the meshes of each submesh, the classes of runs. Out: for each place (a class of
equal submeshes) and number of stages to the end, the cost of every class of runs: exact on request,
otherwise a lower bound. A stage with forward and backward c, messages r and end of step e takes

    q = c + r   once, and   m = (B − 1)·c + e   more, if it is the slowest, for B micro-batches:

messages overlap the compute of other micro-batches, and only one stage's end of step counts.

Two bounds are cheap. Without the memory limit: the solver's bound of a run, which is computed only
for some lengths of long series (``run_classes.chord_bounds``). With it: the cost of a shorter run
of the series, or with fewer micro-batches in flight. So the best pipeline under these bounds is
found first and its stages priced, repeatedly, until the best pipeline has only exact stages: then
no other can be better. Only competitive lengths, places and numbers of stages are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..inter_op.cuts import Cuts
from ..inter_op.inter_op import StageChoice
from ..intra_op.intra_op import IntraOp, StageAnswer
from ..requests.goal import Budget
from ..stage.range_classes import (
    NO_RUN,
    Floats,
    Ints,
    RunClasses,
    Series,
    at_least,
    chord_bounds,
    sampled_lengths,
)
from ..stage.stage_problem import context_bytes
from ..stage.structure import Run, Structure
from .least_bytes import LeastBytes

SAME = 1 + 1e-9

FEW_MICROBATCHES = 16
"""Micro-batches per step above which a stage's end of step is not bounded separately."""

MANY = 10**9
"""Number of micro-batches that makes the end of a step negligible."""


@dataclass(frozen=True)
class Known:
    """Exact costs by class (runs of blocks that cost the same): the solver's objective, and q and m
    (seconds that count ``once`` per stage, and for the ``slowest`` stage only); nan if not
    priced."""

    objective: Floats
    once: Floats
    slowest: Floats

    @staticmethod
    def nothing(number: int) -> Known:
        return Known(*(np.full(number, np.nan) for _ in range(3)))

    def take(self, number: int, found: StageAnswer | None, count: int) -> None:
        """Record the cost ``found`` of class ``number``; infinite if None: it does not fit."""
        if found is None:
            self.objective[number] = self.once[number] = self.slowest[number] = np.inf
            return
        cost = found.cost
        once, slowest = cost.warmup_and_steady(count)
        self.once[number], self.slowest[number] = once, slowest
        self.objective[number] = once + cost.step_seconds / count

    def copy(self, other: Known, number: int) -> None:
        """Copy the costs of class ``number`` from ``other``."""
        for own, theirs in (
            (self.objective, other.objective),
            (self.once, other.once),
            (self.slowest, other.slowest),
        ):
            own[number] = theirs[number]


@dataclass
class MeshCosts:
    """Costs of stages on one mesh, by class of runs: lower bounds and exact costs.

    ``lower`` bounds the objective, ``once`` the q and ``slowest`` the m (see ``Known``) of a class.
    """

    solver: IntraOp
    runs: Runs
    lower: Floats = field(init=False)
    once: Floats = field(init=False)
    slowest: Floats = field(init=False)
    exact: dict[int, Known] = field(default_factory=dict)
    _bounded: set[Series] = field(default_factory=set)

    def __post_init__(self) -> None:
        number = len(self.runs.classes.firsts)
        self.lower, self.once, self.slowest = (np.full(number, np.nan) for _ in range(3))

    def bound(self, wanted: Iterable[Series]) -> None:
        """Compute lower bounds for all classes of the series; infinite for runs that cannot fit."""
        asked_for = [series for series in wanted if series not in self._bounded]
        self._bounded.update(asked_for)
        for series in asked_for:
            numbers = list(series.classes)
            self.lower[numbers] = self.once[numbers] = self.slowest[numbers] = np.inf
        new = [each for each in map(self._fitting, asked_for) if each.classes]
        asked = {series: sampled_lengths(series) for series in new}
        number = {
            (series, length): own
            for series in new
            for own, length in zip(series.classes, series.lengths, strict=True)
        }
        chosen = [self.runs.run(number[each, length]) for each in new for length in asked[each]]
        few = self.runs.count <= FEW_MICROBATCHES
        self._prepare(chosen, self.runs.count)
        if few:
            self._prepare(chosen, MANY)
        for series in new:
            runs = [self.runs.run(number[series, length]) for length in asked[series]]
            own = self._bounds(runs, self.runs.count)
            once = self._bounds(runs, MANY) if few else own
            received = max(self._receive_seconds(run) for run in runs)
            lengths, known = np.array(series.lengths), np.array(asked[series])
            numbers = list(series.classes)
            self.lower[numbers] = chord_bounds(lengths, known, own, series.regular)
            self.once[numbers] = chord_bounds(lengths, known, once, series.regular)
            least = np.maximum(self.lower[numbers] - received, 0.0)
            every = (self.runs.count - 1) * np.where(np.isfinite(least), least, 0.0)
            self.slowest[numbers] = np.where(np.isfinite(least), every, np.inf)

    def _fitting(self, series: Series) -> Series:
        """Return the series without the lengths that cannot fit whatever the layouts."""
        excess = self.excess_bytes[list(series.classes)]
        if (excess <= 0).any():
            excess = np.maximum(excess, self.excess_on_mesh[list(series.classes)])
        number = int(np.argmax(excess > 0)) if (excess > 0).any() else len(excess)
        if number < len(excess):
            self.solver.note_excess(float(excess[number]))
        return Series(series.classes[:number], series.lengths[:number], series.regular)

    @cached_property
    def excess_bytes(self) -> Floats:
        """Return, by class, a lower bound of the bytes by which runs exceed a device's memory."""
        model, limit = self.solver.model, self.solver.limits.memory_bytes
        least = self.runs.least_bytes.on(model.prices.mesh.size, model.prices)
        found: Floats = least + context_bytes(model) - limit
        return found

    @cached_property
    def excess_on_mesh(self) -> Floats:
        """Return ``excess_bytes`` with states as small as the tables of the mesh allow."""
        model, limit = self.solver.model, self.solver.limits.memory_bytes
        least = self.runs.least_bytes.on_mesh(model, self.solver.zeros)
        found: Floats = least + context_bytes(model) - limit
        return found

    def _prepare(self, runs: Sequence[Run], count: int) -> None:
        families: dict[int, list[Run]] = {}
        for run in runs:
            families.setdefault(run.family, []).append(run)
        for own in families.values():
            self.solver.prepare(sorted(own, key=lambda run: run.num_blocks), count)

    def _bounds(self, runs: Sequence[Run], count: int) -> Floats:
        return np.array([self.solver.bound_seconds(run, count) for run in runs])

    def _receive_seconds(self, run: Run) -> float:
        """Return the largest possible seconds of the messages that a run receives."""
        model = self.solver.model
        return sum(
            float(boundary.term.entries.sum(axis=-1).max())
            for boundary, _ in model.boundaries(run)
            if boundary.is_received
        )

    def price(self, number: int, in_flight: int) -> Known:
        """Return the exact costs known for ``in_flight`` micro-batches in flight, by class; class
        ``number`` is priced first."""
        known = self.exact.setdefault(in_flight, Known.nothing(len(self.lower)))
        if np.isnan(known.objective[number]):
            answer = self.solver.best(self.runs.run(number), self.runs.count, in_flight)
            known.take(number, answer, self.runs.count)
        return known


@dataclass(frozen=True)
class Bounds:
    """Lower bounds by class, infinite for runs that cannot be the first, inner or last stage."""

    lower: Floats
    once: Floats
    slowest: Floats


@dataclass
class PlaceCosts:
    """Costs of stages on a place (all submeshes on which stages cost the same): the best over its
    meshes."""

    meshes: list[MeshCosts]
    runs: Runs
    exact: dict[int, Known] = field(default_factory=dict)
    _bounds: dict[tuple[bool, bool], Bounds] = field(default_factory=dict)
    _known: dict[tuple[int, bool, bool], tuple[int, tuple[Floats, Floats]]] = field(
        default_factory=dict
    )
    _per_block: dict[Series, float] = field(default_factory=dict)
    version: int = 0

    def bounds(self, first: bool, last: bool) -> Bounds:
        """Return the least bounds over the place's meshes, for runs that may be a ``first`` or
        ``last`` stage, or an inner stage if both are false."""
        if (first, last) not in self._bounds:
            size = len(self.runs.classes.firsts)
            lower, once, slowest = (np.full(size, np.inf) for _ in range(3))
            numbers = self.runs.role(first, last)
            series = dict.fromkeys(self.runs.series_of[number][0] for number in numbers.tolist())
            for mesh in self.meshes:
                mesh.bound(series)
                lower[numbers] = np.minimum(lower[numbers], mesh.lower[numbers])
                once[numbers] = np.minimum(once[numbers], mesh.once[numbers])
                slowest[numbers] = np.minimum(slowest[numbers], mesh.slowest[numbers])
            self._bounds[first, last] = Bounds(lower, once, slowest)
        return self._bounds[first, last]

    def seconds(self, in_flight: int, first: bool, last: bool) -> tuple[Floats, Floats]:
        """Return q and m (see ``Known``) of each class that may be a ``first`` or ``last`` stage,
        or an inner stage: exact costs, or lower bounds."""
        key = (in_flight, first, last)
        version, found = self._known.get(key, (-1, None))
        if found is None or version != self.version:
            bounds = self.bounds(first, last)
            found = bounds.once, bounds.slowest
            if self.exact:
                found = self._raised(bounds, in_flight)
            self._known[key] = self.version, found
        return found

    def _raised(self, bounds: Bounds, in_flight: int) -> tuple[Floats, Floats]:
        """Return ``bounds`` raised by exact costs known for as many or fewer micro-batches in
        flight.

        q rises by as much as the objective, m by B − 1 times as much (B micro-batches per step).
        """
        lower = np.where(np.isfinite(bounds.lower), bounds.lower, -np.inf)
        found = lower
        for held, exact in self.exact.items():
            if held <= in_flight:
                found = np.fmax(found, exact.objective)
        for series in self.runs.classes.series:
            numbers = list(series.classes)
            if len(numbers) > 1 and np.isfinite(found[numbers]).any():
                slope = self._block_seconds(series)
                found[numbers] = at_least(series.lengths, found[numbers], slope)
        more = found - np.where(np.isfinite(lower), lower, 0.0)
        more[~np.isfinite(lower)] = 0.0
        once = bounds.once + more
        slowest = bounds.slowest + (self.runs.count - 1 or 0.0) * np.where(more < np.inf, more, 0.0)
        slowest = np.where(more < np.inf, slowest, np.inf)
        own = self.exact.get(in_flight)
        if own is not None:
            is_known = ~np.isnan(own.objective) & np.isfinite(lower)
            once = np.where(is_known, own.once, once)
            slowest = np.where(is_known, own.slowest, slowest)
        return once, slowest

    def _block_seconds(self, series: Series) -> float:
        """Return the least seconds, over the place's meshes, by which each further block of the
        series raises a run's cost."""
        if series not in self._per_block:
            least, most = (self.runs.run(series.classes[at]).counts for at in (0, -1))
            kinds = [kind for kind in most if most[kind] > least.get(kind, 0)]
            self._per_block[series] = min(
                mesh.solver.block_seconds(kind, self.runs.count)
                for mesh in self.meshes
                for kind in kinds
            )
        return self._per_block[series]

    def price(self, number: int, in_flight: int, first: bool, last: bool) -> tuple[float, float]:
        """Return the exact q and m of class ``number``."""
        lower = self.bounds(first, last).lower
        known = self.exact.setdefault(in_flight, Known.nothing(len(lower)))
        if np.isnan(known.objective[number]):
            self._between(number, in_flight)
        if not np.isfinite(lower[number]):
            known.take(number, None, self.runs.count)
        if np.isnan(known.objective[number]):
            self._solve(number, in_flight)
        return float(known.once[number]), float(known.slowest[number])

    def _between(self, number: int, in_flight: int) -> None:
        """Copy a class's cost if equal with fewer and with more micro-batches in flight."""
        held = sorted(h for h, own in self.exact.items() if not np.isnan(own.objective[number]))
        fewer = [self.exact[h] for h in held if h < in_flight]
        more = [self.exact[h] for h in held if h > in_flight]
        if fewer and more:
            least, most = fewer[-1].objective[number], more[0].objective[number]
            if most <= least * SAME:
                self.exact[in_flight].copy(more[0], number)
                self.version += 1

    def _solve(self, number: int, in_flight: int) -> None:
        """Record the exact costs of class ``number`` on its cheapest mesh."""
        best = Known.nothing(len(self.runs.classes.firsts))
        best.take(number, None, self.runs.count)
        for mesh in sorted(self.meshes, key=lambda mesh: float(mesh.lower[number])):
            if mesh.lower[number] * SAME >= best.objective[number]:
                break
            own = mesh.price(number, in_flight)
            if own.objective[number] * SAME < best.objective[number]:
                best = own
        self.exact[in_flight].copy(best, number)
        self.version += 1

    def answers(self, number: int, in_flight: int) -> Iterator[tuple[IntraOp, StageAnswer]]:
        """Yield (solver, solution) for the meshes that may be the cheapest for class ``number``."""
        run, count = self.runs.run(number), self.runs.count
        least = np.inf
        for mesh in sorted(self.meshes, key=lambda mesh: mesh.solver.bound_seconds(run, count)):
            if mesh.solver.bound_seconds(run, count) >= least * SAME:
                break
            found = mesh.solver.best(run, count, in_flight)
            if found is not None:
                least = min(least, answer_seconds(found, count))
                yield mesh.solver, found

    def answer(self, number: int, in_flight: int) -> tuple[IntraOp, StageAnswer] | None:
        """Return the fastest answer over all meshes, with its solver; None if none fits."""
        every = list(self.answers(number, in_flight))
        count = self.runs.count
        return min(every, key=lambda each: answer_seconds(each[1], count), default=None)


def answer_seconds(answer: StageAnswer, count: int) -> float:
    """Return a stage's seconds per micro-batch, with a share of its end of step."""
    cost = answer.cost
    return cost.warmup_and_steady(count)[0] + cost.step_seconds / count


@dataclass
class Costs:
    """Costs of stages on all places (groups of submeshes with equal costs) at one micro-batch size;
    places are numbered as they are first requested.

    ``key(first, size)`` is equal for submeshes that cost the same; ``solvers`` makes a submesh's
    solvers; ``held`` maps a stage's number of stages to the end to its least micro-batches in
    flight.
    """

    runs: Runs
    key: Callable[[int, int], Hashable]
    solvers: Callable[[int, int], list[IntraOp]]
    held: Callable[[int], int]
    budget: Budget
    places: list[PlaceCosts] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Return a number that grows whenever an exact cost is added; never 0."""
        return 1 + sum(place.version for place in self.places)

    def place(self, first_device: int, num_devices: int) -> int:
        """Return the number of the place that a submesh belongs to."""
        key = self.key(first_device, num_devices)
        if key not in self._numbers:
            self._numbers[key] = len(self.places)
            meshes = [
                MeshCosts(each, self.runs) for each in self.solvers(first_device, num_devices)
            ]
            self.places.append(PlaceCosts(meshes, self.runs))
        return self._numbers[key]

    def in_flight(self, left: int, first: bool) -> int:
        if first and left == 1:
            return 1
        if left not in self._held:
            self._held[left] = self.held(left)
        return self._held[left]

    def seconds(self, left: int, place: int, first: bool) -> tuple[Floats, Floats]:
        """Return q and m of all classes as known so far, as a ``inter_op.cuts.Seconds``."""
        self.budget.num_steps += 1
        return self.places[place].seconds(self.in_flight(left, first), first, left == 1)

    def known(self, stages: Sequence[StageChoice]) -> list[tuple[float, float]]:
        """Return the q and m (see ``Known``) of each stage of a pipeline as known so far: exact, or
        lower bounds."""
        return [self._known(len(stages) - at, at == 0, own) for at, own in enumerate(stages)]

    def _known(self, left: int, first: bool, stage: StageChoice) -> tuple[float, float]:
        place, number = self._of(stage)
        if number == NO_RUN:
            return float("inf"), float("inf")
        once, slowest = self.seconds(left, place, first)
        return float(once[number]), float(slowest[number])

    def price(self, left: int, first: bool, stage: StageChoice) -> tuple[float, float]:
        """Return the exact q and m (see ``Known``) of a stage; infinite if it does not fit."""
        place, number = self._of(stage)
        return self.places[place].price(number, self.in_flight(left, first), first, left == 1)

    def _of(self, stage: StageChoice) -> tuple[int, int]:
        number = int(self.runs.classes.numbers[stage.start, stage.stop])
        return self.place(stage.first_device, stage.num_devices), number


@dataclass(frozen=True)
class Runs:
    """All runs of blocks at one micro-batch size; ``count`` micro-batches make a step."""

    structure: Structure
    classes: RunClasses
    count: int

    def run(self, number: int) -> Run:
        """Return the first run of class ``number``."""
        return self.structure.run(*self.classes.firsts[number])

    @cached_property
    def least_bytes(self) -> LeastBytes:
        return LeastBytes(self.structure, self.classes)

    @cached_property
    def every(self) -> Cuts:
        """Return the cuts before and after every block."""
        return self.cuts(range(self.classes.num_blocks + 1))

    def cuts(self, at: Iterable[int]) -> Cuts:
        """Return cuts before the blocks ``at``, which include the first block and the end."""
        places = np.fromiter(at, dtype=np.int64)
        numbers = self.classes.numbers[np.ix_(places, places)]
        none = len(self.classes.firsts)
        return Cuts(places, np.where(numbers == NO_RUN, none, numbers), self.classes.lengths)

    def role(self, first: bool, last: bool) -> Ints:
        """Return the classes of runs that may be a first, last or inner stage (neither)."""
        return self.classes.roles[first, last]

    @cached_property
    def series_of(self) -> dict[int, tuple[Series, int]]:
        """Map each class to its series and its position in the series."""
        return {
            number: (series, at)
            for series in self.classes.series
            for at, number in enumerate(series.classes)
        }
