"""What no plan of a large space is faster than.

In: a job whose search is done, the best step, the gap asked for. Out: a lower bound of the
step over all micro-batch sizes, cuts, tilings, meshes, layouts, ZeRO stages, rungs and
schedules of the request.

A stage of forward and backward c, messages r and end of step e takes, whatever its layouts,
at least Q <= c + r, W <= c + r + e/N and, the first one, E <= c + e: all three are bounds that
the stage solver proves (for N, infinitely many and 1 micro-batches). With R the most that its
messages can take, a pipeline takes at least (``pipeline_bound``)

    max_i  Σ_{0<j<=i} Q_j + (N - 1)·(Q_i - R_i) + E     and     max_i  N·(W_i - R_i),

each the least over all pipelines by one sweep of ``inter_op_sweep``. Where memory binds the
stages of the pipeline that has the least are bounded again with it (Lagrangian, see
``intra_op``), and the sweep is repeated, until the least is near enough to the best step or
its stages have no better bound. The best-first order makes that the bound of the whole space.

Where blocks that follow each other do not need each other, stages may be a graph and not a
chain: then only the second form holds.

Where a schedule may put the gradients of weights off, the way to a stage and back is shorter by
theirs, and they need not come between its first and its last micro-batch: in the first form all
Q but the first stage's count without the most that these can take. Then there is a third form,
of a stage that does all of its work after the first micro-batch has come: with F the least that
a forward takes

    max_i  Σ_{j<i} F_j + N·(W_i - R_i).

Before any of this each part of the space has the bound of ``work_bound``, which takes no time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counting

import numpy as np

from ..inter_op.branches import block_edges
from ..inter_op.cuts import Bands
from ..inter_op.sweep import Move, Sweep, Tiling, larger, turning
from ..schedules.held import splits
from .costs import Costs
from .job import Job
from .memory_bounds import Priced, rounded
from .runs import Floats
from .space import tilings
from .stage_bounds import FORMS, Form, StageBounds
from .work_bound import work_bound

MANY_BLOCKS = 256
"""With more, a step of a sweep takes longer, by the square of how many times more."""

ROUNDING = 1e-6
"""Of bytes and rows that are no whole numbers of each device."""

MOST_RAISED = 32
"""Bounds of stages that are found again with the memory limit."""

Stages = Sequence[tuple[int, int, Move]]


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
    _bounds: dict[tuple[int, bool, bool, int], StageBounds] = field(default_factory=dict)
    until: float = float("inf")
    most_seconds: float = float("inf")
    has_memory: bool = False
    priced: Priced | None = None
    is_priced: bool = False
    _sweeps: dict[tuple[int, Form], Sweep] = field(default_factory=dict)
    _figures: dict[tuple[int, Form], tuple[Floats, Floats]] = field(default_factory=dict)

    def stage(
        self, left: int, place: int, first: bool, *, is_raised: bool = False
    ) -> StageBounds | None:
        """The bounds of a stage; None on a place without meshes.

        They are the same for any micro-batches in flight until some are raised by memory.
        """
        held = self._held(left, first)
        key = (place, first, left == 1, held)
        if key not in self._bounds and not is_raised and not self.is_priced:
            key = (place, first, left == 1, 0)
        own = self.costs.places[place]
        if key not in self._bounds and own.meshes:
            plain = self._bounds.get((*key[:3], 0)) or self._plain(place, first, left == 1)
            self._bounds[(*key[:3], 0)] = plain
            if key[3]:
                self._bounds[key] = plain.in_flight(held, self._computed(place, held))
        return self._bounds.get(key)

    def _held(self, left: int, first: bool) -> int:
        held = self.costs.in_flight(left, first) if self.is_chain else 1
        return rounded(held) if self.is_priced else held

    def _plain(self, place: int, first: bool, last: bool) -> StageBounds:
        """The bounds of a stage without memory."""
        runs = self.costs.runs
        numbers = runs.role(first, last)
        series = {runs.series_of[number][0] for number in numbers.tolist()}
        ordered = tuple(sorted(series, key=lambda each: each.classes))
        meshes = self.costs.places[place].meshes
        return StageBounds(meshes, ordered, numbers, runs.count, first, 0, self.splits)

    def _computed(self, place: int, held: int) -> list[Floats]:
        """By mesh what fits with so many micro-batches in flight, if it is priced."""
        if not self.is_priced or self.priced is None:
            return []
        others = {self._held(left, False) for left in range(1, self.tiling.most + 1)}
        meshes = self.costs.places[place].meshes
        return [self.priced.least(mesh, held, sorted(others)) for mesh in meshes]

    def price(self) -> bool:
        """Has all bounds made again with memory; whether they were without."""
        if self.is_priced or self.priced is None:
            return False
        self.is_priced = self.has_memory = True
        self._sweeps.clear()
        self._figures.clear()
        return True

    def seconds(self, left: int, place: int, first: bool, *, form: Form) -> tuple[Floats, Floats]:
        """``inter_op.cuts.Seconds``. Raises ``_LateError`` where the time is up."""
        effort = self.costs.effort
        effort.num_steps += 1 + 3 * (self.costs.runs.classes.num_blocks // MANY_BLOCKS) ** 2
        if effort.work > self.until or (self.until < float("inf") and effort.left_seconds <= 0):
            raise _LateError
        own = self.stage(left, place, first)
        if own is None:
            nothing = np.full(len(self.costs.runs.classes.firsts), np.inf)
            return nothing, nothing
        if (id(own), form) not in self._figures:
            self._figures[id(own), form] = FORMS[form](own)
        return self._figures[id(own), form]

    def passes(self, left: int, place: int, first: bool, *, both: bool) -> Floats:
        """As ``seconds``: what a forward, or both passes, of a stage compute at least."""
        own = self.stage(left, place, first)
        if own is None:
            return np.full(len(self.costs.runs.classes.firsts), np.inf)
        return own.passes(both=both)

    def least(self, num_stages: int, form: Form) -> float:
        """The bound of so many stages, of one form."""
        return self._sweep(num_stages, form).least(num_stages)

    def stages(self, num_stages: int, form: Form) -> Stages:
        """Who has that bound."""
        return self._sweep(num_stages, form).stages(num_stages)

    def _sweep(self, num_stages: int, form: Form) -> Sweep:
        """One sweep is for all numbers of stages, until a stage's bound is raised."""
        number = num_stages if self.tiling.fixed else self.tiling.most
        if (number, form) not in self._sweeps:
            seconds = partial(self.seconds, form=form)
            bands = Bands(self.costs.runs.every, seconds, self.most_seconds)
            combine = larger if form == "largest" else turning
            self._sweeps[number, form] = Sweep.of(self.tiling, bands, combine, most=number)
        return self._sweeps[number, form]

    def forms(self, number: int) -> tuple[Form, ...]:
        """The forms that hold of so many stages."""
        if number == 1 or not self.is_chain:
            return ("largest",)
        return ("largest", "filling", "turning") if self.splits else ("largest", "turning")

    def raise_by_memory(self, stages: Stages, form: Form) -> int:
        """Bounds the stages of a pipeline with their memory; how many bounds that were."""
        raised = 0
        for at, (start, stop, move) in enumerate(stages):
            own = self.stage(len(stages) - at, move.place, at == 0, is_raised=True)
            number = int(self.costs.runs.classes.numbers[start, stop])
            if own is not None:
                raised += own.raise_by_memory(number, form)
        if raised:
            self.has_memory = True
            self._sweeps.clear()
            self._figures.clear()
        return raised


@dataclass(order=True)
class _Part:
    """The pipelines of one number of stages, and what none of them is faster than.

    Of the forms that were ``tried``, ``best`` has the bound.
    """

    least: float
    order: int
    space: Space = field(compare=False)
    number: int = field(compare=False)
    tried: list[Form] = field(default_factory=list, compare=False)
    best: Form = field(default="largest", compare=False)
    is_priced: bool = field(default=False, compare=False)

    def narrow(self, left: int) -> int | None:
        """Finds a better bound; how many stages that bounded by memory, None if there is none."""
        untried = [each for each in self.space.forms(self.number) if each not in self.tried]
        if self.tried and self.space.priced is not None and not self.is_priced:
            self.space.price()
            self.is_priced = True
            self._take()
            return 0
        if untried:
            self.tried.append(untried[0])
            self._take()
            return 0
        raised = 0
        if left > 0 and self.least < float("inf"):
            stages = self.space.stages(self.number, self.best)
            raised = self.space.raise_by_memory(stages, self.best)
        if not raised:
            return None
        self._take()
        return raised

    def _take(self) -> None:
        found = {form: self.space.least(self.number, form) for form in self.tried}
        self.best = max(found, key=found.__getitem__)
        self.least = max(self.least, found[self.best])

    @property
    def count(self) -> int:
        return self.space.costs.runs.count

    @property
    def key(self) -> tuple[bool, int]:
        """Equal for the same tiling at any micro-batch size."""
        return self.space.tiling.fixed, self.number


@dataclass
class _Fewer:
    """What pipelines take at least with fewer, larger micro-batches: so do they with more.

    Under specifications twice the rows take at most twice as long, whatever the layout, the ends
    of a step are the same, and a mesh that is allowed for few rows is so for many. That holds of
    work alone, so of the form "largest" where memory is left out.
    """

    holds: bool
    known: dict[tuple[bool, int], dict[int, float]] = field(default_factory=dict)

    def take(self, part: _Part) -> None:
        if self.holds and not part.space.has_memory and "largest" in part.tried:
            found = part.space.least(part.number, "largest")
            self.known.setdefault(part.key, {}).setdefault(part.count, found * (1 - ROUNDING))

    def least(self, part: _Part) -> float:
        own = self.known.get(part.key, {})
        return max((own[count] for count in own if part.count % count == 0), default=0.0)


def step_bound(
    job: Job,
    rows: tuple[int, ...],
    numbers: tuple[int, ...],
    step: float,
    gap: float,
    patience: float = PATIENT,
) -> float:
    """No plan takes less than this. ``step`` is the best known, within ``gap`` of it is enough.

    ``patience``: the work (``Effort.work``) that may be spent on it.
    """
    began = time.perf_counter()
    until = job.effort.work + patience
    order, least = counting(), work_bound(job, rows)
    largest_first = tuple(sorted(rows, reverse=True))
    every = list(spaces(job, largest_first, numbers))
    priced = {each: Priced(job.costs(each).runs, step) for each in rows}
    for space, _ in every:
        space.until, space.most_seconds = until, step
        space.priced = priced[job.request.global_batch // space.costs.runs.count]
    heap = [_Part(least, next(order), *each) for each in every]
    fewer = _Fewer(job.basis.used is None and job.basis.only is None)
    with suppress(_LateError):
        _narrow(heap, fewer, step * (1 - gap))
    job.took("bound", time.perf_counter() - began)
    return min(heap[0].least, step)


def _narrow(heap: list[_Part], fewer: _Fewer, enough: float) -> None:
    """Narrows the parts, the least first, until that is enough or cannot be narrowed."""
    left = MOST_RAISED
    while heap[0].least < enough:
        part, inherited = heap[0], fewer.least(heap[0])
        if inherited > part.least:
            part.least = inherited
        else:
            raised = part.narrow(left)
            if raised is None:
                return
            left -= raised
            fewer.take(part)
        heapq.heapreplace(heap, part)


def space_of(costs: Costs, tiling: Tiling) -> Space:
    """The stages of a tiling in any order of actions."""
    return Space(costs, tiling, is_chain=False, splits=False)


def spaces(
    job: Job, rows: tuple[int, ...], numbers: tuple[int, ...]
) -> Iterator[tuple[Space, int]]:
    """Every tiling that the search goes through, by number of stages."""
    edges, num_blocks = block_edges(job.structure), len(job.structure.blocks.blocks)
    is_chain = all((at, at + 1) in edges for at in range(num_blocks - 1))
    has_split = any(splits(name) for name in job.request.schedules)
    mixed = job.request.features.allows("mixed-stages")
    for each in rows:
        costs = job.costs(each)
        known: dict[int, Space] = {}
        for tiling, number in tilings(job.cluster, numbers, costs.place, mixed=mixed):
            own = known.setdefault(id(tiling), Space(costs, tiling, is_chain, has_split))
            yield own, number
