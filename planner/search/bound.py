"""What no plan of a large space is faster than.

In: a job whose search is done, the best step, the gap asked for. Out: a lower bound of the
step over all micro-batch sizes, cuts, tilings, meshes, layouts, ZeRO stages, rungs and
schedules of the request.

A stage of forward and backward c, messages r and end of step e takes, whatever its layouts, at
least Q <= c + r and, the first one, E <= c + e: the stage solver proves them (for infinitely many
micro-batches and for 1). And it computes and communicates at least C <= c + e/N, and C' <= c, of
what fits in memory with as many micro-batches in flight as its place in the pipeline has at
least: bounds of its blocks, one by one (``memory_bounds``). A pipeline takes at least
(``pipeline_bound``)

    max_i  Σ_{0<j<=i} Q_j + (N - 1)·C'_i + E     and     max_i  N·C_i,

each the least over all pipelines by one sweep of ``inter_op_sweep``. Where the tables of blocks
would be too wide, C is what the integer programs prove, W <= c + r + e/N, without the most R that
messages can take, and memory is left out. The part of the space that has the least bound is
given its next form, until the least is near enough to the best step or has no form left: the
best-first order makes that the bound of the whole space.

Where blocks that follow each other do not need each other, stages may be a graph and not a
chain: then only the second form holds.

Where a schedule may put the gradients of weights off, the way to a stage and back is shorter by
theirs, and they need not come between its first and its last micro-batch: in the first form all
Q but the first stage's count without the most that these can take. Then there is a third form,
of a stage that does all of its work after the first micro-batch has come: with F the least that
a forward takes

    max_i  Σ_{j<i} F_j + N·C_i.

Before any of this each part of the space has the bound of ``work_bound``, which takes no time,
and then that of the mean device: of D devices, D times the step is at least N times the sum over
blocks of the least devices·seconds that one takes on any mesh. Stages of any sizes then have the
bound of ``counted``, which takes less time than a sweep.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count as counting

import numpy as np

from ..inter_op.cuts import Bands
from ..inter_op.sweep import Sweep, Tiling, larger, turning
from ..pricing.branches import block_edges
from ..pricing.run_classes import Floats
from ..schedules.held import splits
from .costs import Costs, MeshCosts
from .counted import counted_bounds
from .job import Job
from .memory_bounds import Priced, rounded
from .space import tilings
from .stage_bounds import FORMS, Form, HeldBounds, StageBounds
from .work_bound import work_bound

MANY_BLOCKS = 256
"""With more, a step of a sweep takes longer, by the square of how many times more; stages of any
sizes are then only counted."""


class _LateError(Exception):
    """There is no time left for a better bound; caught below."""


PATIENT = 1e12
"""Work that is never done."""


@dataclass
class Space:
    """The pipelines of a tiling at one micro-batch size; nothing is bounded after ``until``, in
    work of the effort, nor after its time limit where there is an ``until``.

    Those with a stage that takes more than ``most_seconds`` are left out.
    """

    costs: Costs
    tiling: Tiling
    is_chain: bool
    splits: bool
    priced: Priced
    until: float = float("inf")
    most_seconds: float = float("inf")
    _plain: dict[tuple[int, bool, bool], StageBounds] = field(default_factory=dict)
    _bounds: dict[tuple[int, bool, bool, int], HeldBounds] = field(default_factory=dict)
    _sweeps: dict[tuple[int, Form], Sweep] = field(default_factory=dict)
    _figures: dict[tuple[int, Form], tuple[Floats, Floats]] = field(default_factory=dict)

    def stage(self, left: int, place: int, first: bool) -> HeldBounds | None:
        """The bounds of a stage, the same for about as many micro-batches in flight; None on a
        place without meshes."""
        held = self._held(left, first)
        key = (place, first, left == 1, held)
        if key not in self._bounds and self.costs.places[place].meshes:
            plain = self.plain(place, first, left == 1)
            self._bounds[key] = HeldBounds(plain, partial(self._fitting, plain.meshes, held))
        return self._bounds.get(key)

    def plain(self, place: int, first: bool, last: bool) -> StageBounds:
        """The bounds of a stage on a place with meshes, whatever is in flight."""
        key = place, first, last
        if key not in self._plain:
            runs = self.costs.runs
            numbers = runs.role(first, last)
            series = {runs.series_of[number][0] for number in numbers.tolist()}
            ordered = tuple(sorted(series, key=lambda each: each.classes))
            meshes = self.costs.places[place].meshes
            self._plain[key] = StageBounds(meshes, ordered, numbers, runs.count, first, self.splits)
        return self._plain[key]

    def _held(self, left: int, first: bool) -> int:
        if not self.is_chain or (first and left == 1):
            return 1
        return self._by_left[left]

    @cached_property
    def _by_left(self) -> list[int]:
        """About how many micro-batches a stage has in flight, by the stages to come with it."""
        lefts = range(1, self.tiling.most + 1)
        return [0, *(rounded(self.costs.in_flight(left, False)) for left in lefts)]

    def _fitting(self, meshes: Sequence[MeshCosts], held: int, count: int) -> list[Floats | None]:
        """By mesh what fits with so many micro-batches in flight."""
        return [self.priced.least(mesh, count, held, self._every_held) for mesh in meshes]

    @cached_property
    def _every_held(self) -> list[int]:
        return sorted({self._held(left, False) for left in range(1, self.tiling.most + 1)})

    def seconds(self, left: int, place: int, first: bool, *, form: Form) -> tuple[Floats, Floats]:
        """``inter_op.cuts.Seconds``. Raises ``_LateError`` where the time is up."""
        effort = self.costs.effort
        effort.num_steps += 1 + 3 * (self.costs.runs.classes.num_blocks // MANY_BLOCKS) ** 2
        self._check_time()
        own = self.stage(left, place, first)
        if own is None:
            nothing = np.full(len(self.costs.runs.classes.firsts), np.inf)
            return nothing, nothing
        if (id(own), form) not in self._figures:
            self._figures[id(own), form] = FORMS[form](own)
        return self._figures[id(own), form]

    def least(self, num_stages: int, form: Form) -> float:
        """The bound of so many stages, of one form."""
        return self._sweep(num_stages, form).least(num_stages)

    def _sweep(self, num_stages: int, form: Form) -> Sweep:
        """One sweep is for all numbers of stages."""
        number = num_stages if self.tiling.fixed else self.tiling.most
        if (number, form) not in self._sweeps:
            seconds = partial(self.seconds, form=form)
            bands = Bands(self.costs.runs.every, seconds, self.most_seconds)
            combine = larger if form == "largest" else turning
            self._sweeps[number, form] = Sweep.of(self.tiling, bands, combine, most=number)
        return self._sweeps[number, form]

    @cached_property
    def counted(self) -> Mapping[int, float]:
        """By number of stages what counting blocks proves. Raises ``_LateError``."""
        classes = self.costs.runs.classes
        taken: dict[int, Floats] = {}

        def of_stage(left: int, place: int, first: bool) -> Floats | None:
            own = self.stage(left, place, first)
            if own is None:
                return None
            if id(own) not in taken:
                self._check_time()
                self.costs.effort.num_steps += 1
                taken[id(own)] = own.largest()[1]
            return taken[id(own)]

        low = max(self.mean_seconds, 1e-9 * self.most_seconds)
        if low >= self.most_seconds:
            return {}
        return counted_bounds(
            self.tiling, classes.lengths, of_stage, low=low, high=self.most_seconds
        )

    @cached_property
    def mean_seconds(self) -> float:
        """What a device works at least, the mean of all. Raises ``_LateError``."""
        self._check_time()
        places = dict.fromkeys(move.place for move in self.tiling.moves)
        meshes = [mesh for place in places for mesh in self.costs.places[place].meshes]
        ranks = {
            rank
            for move in self.tiling.moves
            for rank in range(move.first_device, move.first_device + move.num_devices)
        }
        return self.costs.runs.count * self.priced.device_seconds(meshes) / len(ranks)

    def _check_time(self) -> None:
        effort = self.costs.effort
        if effort.work > self.until or (self.until < float("inf") and effort.left_seconds <= 0):
            raise _LateError

    def forms(self, number: int) -> tuple[Form, ...]:
        """The forms that hold of so many stages and are worth a sweep."""
        if not self.tiling.fixed and self.costs.runs.classes.num_blocks > MANY_BLOCKS:
            return ()
        if number == 1 or not self.is_chain:
            return ("largest",)
        return ("largest", "filling", "turning") if self.splits else ("largest", "turning")


@dataclass(order=True)
class _Part:
    """The pipelines of one number of stages, and what none of them is faster than.

    ``has_mean``: it has the bound of the mean device's work; ``is_counted``: that of counting
    blocks, if its stages are of any sizes; ``tried`` are the forms that it has.
    """

    least: float
    order: int
    space: Space = field(compare=False)
    number: int = field(compare=False)
    tried: list[Form] = field(default_factory=list, compare=False)
    has_mean: bool = field(default=False, compare=False)
    is_counted: bool = field(default=False, compare=False)

    def narrow(self) -> bool:
        """Finds a better bound; whether there was one to look for."""
        if not self.has_mean:
            self.has_mean = True
            self.least = max(self.least, self.space.mean_seconds)
            return True
        if not self.is_counted:
            self.is_counted = True
            if not self.space.tiling.fixed:
                self.least = max(self.least, self.space.counted.get(self.number, 0.0))
                return True
        untried = [each for each in self.space.forms(self.number) if each not in self.tried]
        if untried:
            self.tried.append(untried[0])
            self.least = max(self.least, self.space.least(self.number, untried[0]))
        return bool(untried)


def step_bound(
    job: Job,
    rows: tuple[int, ...],
    numbers: tuple[int, ...],
    step: float,
    gap: float,
    patience: float = PATIENT,
    enough: float = float("inf"),
) -> float:
    """No plan takes less than this. ``step`` is the best known, within ``gap`` of it is enough, and
    so is ``enough``.

    ``patience``: the work (``Effort.work``) that may be spent on it.
    """
    began = time.perf_counter()
    until = job.effort.work + patience
    order, least = counting(), work_bound(job, rows)
    every = list(spaces(job, tuple(sorted(rows, reverse=True)), numbers, most_seconds=step))
    for space, _ in every:
        space.until = until
    heap = [_Part(least, next(order), *each) for each in every]
    with suppress(_LateError):
        _narrow(heap, min(step * (1 - gap), enough))
    job.took("bound", time.perf_counter() - began)
    return min(heap[0].least, step)


def bounds(
    job: Job,
    rows: tuple[int, ...],
    numbers: tuple[int, ...],
    step: float,
    gap: float,
    patience: float,
) -> tuple[float, float]:
    """``step_bound``, and what plans of several stages per rank take at least, if any are allowed:
    the plan is as good as the less of them says, so the first need be no better."""
    others = float("inf")
    if job.others_bound is not None:
        others = work_bound(job, rows) if job.stopped else job.others_bound(job, rows)
    return step_bound(job, rows, numbers, step, gap, patience, others), others


def _narrow(heap: list[_Part], enough: float) -> None:
    """Narrows the parts, the least first, until that is enough or cannot be narrowed."""
    while heap[0].least < enough and heap[0].narrow():
        heapq.heapreplace(heap, heap[0])


def spaces(
    job: Job,
    rows: tuple[int, ...],
    numbers: tuple[int, ...],
    *,
    most_seconds: float = float("inf"),
) -> Iterator[tuple[Space, int]]:
    """Every tiling that the search goes through, by number of stages."""
    edges, num_blocks = block_edges(job.structure), len(job.structure.blocks.blocks)
    is_chain = all((at, at + 1) in edges for at in range(num_blocks - 1))
    has_split = any(splits(name) for name in job.request.schedules)
    mixed = job.request.features.allows("mixed-stages")
    for each in rows:
        costs = job.costs(each)
        priced = Priced(costs.runs, most_seconds)
        known: dict[int, Space] = {}
        for tiling, number in tilings(job.cluster, numbers, costs.place, mixed=mixed):
            space = Space(costs, tiling, is_chain, has_split, priced, most_seconds=most_seconds)
            yield known.setdefault(id(tiling), space), number
