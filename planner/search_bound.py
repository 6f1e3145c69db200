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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count as counting
from typing import Literal

import numpy as np

from .branches import block_edges
from .inter_op_sweep import Move, Sweep, Tiling, larger, turning
from .schedules_held import splits
from .search_costs import MANY, Costs, MeshCosts
from .search_job import Job
from .search_runs import Floats, Ints, Series, at_least
from .search_space import tilings
from .seconds import Seconds
from .stage_model import StageModel
from .work_bound import work_bound

BOUND_SHARE = 0.1
LEAST_SECONDS = 1.5
"""Of the time that the search took, and at least: what narrowing the bound may take besides."""

FORWARD_COMPUTE = Seconds._fields.index("forward_compute")

MOST_RAISED = 32
"""Bounds of stages that are found again with the memory limit."""

Stages = Sequence[tuple[int, int, Move]]

Form = Literal["largest", "filling", "turning"]
"""Of a bound: the stage of the most work; that after the way to it; or with the way back."""


@dataclass
class StageBounds:
    """Bounds of every class of runs on one place in one role, ``held`` micro-batches in flight.

    By mesh: ``micro`` are Q, ``share`` W, ``alone`` E, ``received`` R; ``splits``: gradients of
    weights may be put off.
    """

    meshes: Sequence[MeshCosts]
    series: tuple[Series, ...]
    numbers: Ints
    count: int
    first: bool
    held: int
    splits: bool = False
    _raised: set[tuple[str, int, int]] = field(default_factory=set)

    @cached_property
    def share(self) -> list[Floats]:
        return [mesh.least(self.series, self.count) for mesh in self.meshes]

    @cached_property
    def micro(self) -> list[Floats]:
        return [mesh.least(self.series, MANY) for mesh in self.meshes]

    @cached_property
    def sooner(self) -> list[Floats]:
        """Q without gradients of weights: by the most seconds and the largest share they have."""
        if not self.splits or self.first:
            return self.micro
        found = []
        for mesh, micro in zip(self.meshes, self.micro, strict=True):
            least = micro.copy()
            for number in self.numbers.tolist():
                counts = mesh.runs.run(number).counts
                most = {kind: mesh.solver.model.most_late(kind) for kind in counts}
                share = max(share for share, _ in most.values())
                seconds = sum(count * most[kind][1] for kind, count in counts.items())
                own = micro[number]
                least[number] = max(own * (1 - share), own - seconds, 0.0)
            found.append(least)
        return found

    @cached_property
    def forward(self) -> list[Floats]:
        """By mesh the least that a forward computes."""
        found = []
        for mesh in self.meshes:
            least = np.zeros(len(mesh.runs.classes.firsts))
            seconds: dict[str, float] = {}
            for number in self.numbers.tolist():
                for kind, count in mesh.runs.run(number).counts.items():
                    if kind not in seconds:
                        seconds[kind] = _least_forward(mesh.solver.model, kind)
                    least[number] += count * seconds[kind]
            found.append(least)
        return found

    def filling(self) -> tuple[Floats, Floats]:
        """By class the forward of the first micro-batch, and more for all that a stage does."""
        once = self._least(self.forward)
        _, every = self.largest()
        rest = every - np.where(np.isfinite(once), once, 0.0)
        return once, np.maximum(rest, 0.0)

    @cached_property
    def alone(self) -> list[Floats]:
        if not self.first:
            return self.micro
        return [mesh.least(self.series, 1) for mesh in self.meshes]

    @cached_property
    def received(self) -> list[Floats]:
        return [mesh.most_received(self.series) for mesh in self.meshes]

    def turning(self) -> tuple[Floats, Floats]:
        """By class what a stage takes once, and more for all other micro-batches."""
        more = self.count - 1
        micro = self.sooner
        alone = self.alone if self.first else micro
        once = [np.maximum(a, q) for a, q in zip(alone, micro, strict=True)]
        rest = [more * np.maximum(q - r, 0.0) for q, r in zip(micro, self.received, strict=True)]
        if self.first:
            whole = [self.count * each for each in self.share]
            rest = [
                np.maximum(np.where(np.isfinite(w), w, 0.0) - np.where(np.isfinite(o), o, 0.0), r)
                for w, o, r in zip(whole, once, rest, strict=True)
            ]
        return self._least(once), self._least(rest)

    def largest(self) -> tuple[Floats, Floats]:
        """By class nothing, and all that a stage takes."""
        own = zip(self.share, self.received, strict=True)
        every = self._least([self.count * np.maximum(w - r, 0.0) for w, r in own])
        return np.where(np.isfinite(every), 0.0, np.inf), every

    def _least(self, every: list[Floats]) -> Floats:
        found = np.full(len(self.meshes[0].runs.classes.firsts), np.inf)
        found[self.numbers] = np.minimum.reduce(every)[self.numbers]
        return found

    def raise_by_memory(self, number: int, form: Form) -> int:
        """Bounds a class with its memory on the meshes that may be its best; on how many.

        Only what counts: W but where Q does, which is for a later stage of a pipeline that turns.
        """
        forms = [("share", self.count)] if self.first or form != "turning" else []
        forms += [("micro", MANY)] if form == "turning" else []
        raised = 0
        for name, count in forms:
            every: list[Floats] = getattr(self, name)
            while True:
                at = min(range(len(every)), key=lambda each: float(every[each][number]))
                if (name, at, number) in self._raised:
                    break
                self._raised.add((name, at, number))
                self._raise(every, at, number, count)
                raised += 1
        return raised

    def _raise(self, every: list[Floats], at: int, number: int, count: int) -> None:
        """A run takes at least what a shorter one of its series does."""
        mesh = self.meshes[at]
        found = mesh.solver.memory_bound_seconds(mesh.runs.run(number), count, self.held)
        if found <= every[at][number]:
            return
        every[at] = every[at].copy()
        every[at][number] = found
        for series in self.series:
            own = list(series.classes)
            if number in own:
                every[at][own] = at_least(series.lengths, every[at][own], 0.0)


@dataclass
class Space:
    """The pipelines of a tiling at one micro-batch size."""

    costs: Costs
    tiling: Tiling
    is_chain: bool
    splits: bool
    _bounds: dict[tuple[int, bool, bool, int], StageBounds] = field(default_factory=dict)

    def stage(self, left: int, place: int, first: bool) -> StageBounds | None:
        """The bounds of a stage; None on a place without meshes."""
        held = self.costs.in_flight(left, first) if self.is_chain else 1
        key = (place, first, left == 1, held)
        own = self.costs.places[place]
        if key not in self._bounds and own.meshes:
            runs = self.costs.runs
            numbers = runs.role(first, left == 1)
            series = {runs.series_of[number][0] for number in numbers.tolist()}
            ordered = tuple(sorted(series, key=lambda each: each.classes))
            self._bounds[key] = StageBounds(
                own.meshes, ordered, numbers, runs.count, first, held, self.splits
            )
        return self._bounds.get(key)

    def band(
        self, left: int, place: int, first: bool, bound: float, *, form: Form
    ) -> tuple[Floats, Floats]:
        """``inter_op_sweep.Band``."""
        runs = self.costs.runs
        rows = slice(0, 1) if first else slice(None)
        own = self.stage(left, place, first)
        if own is None:
            nothing = np.full((1 if first else len(runs.band), 0), np.inf)
            return nothing, nothing
        once, slowest = _FORMS[form](own)
        band = runs.band[rows]
        return np.append(once, np.inf)[band], np.append(slowest, np.inf)[band]

    def least(self, num_stages: int, form: Form) -> tuple[float, Stages]:
        """The bound of so many stages, of one form, and who has it."""
        sweep = Sweep.of(
            self.tiling, self.costs.runs.classes.num_blocks,
            lambda *asked: self.band(*asked, form=form), larger if form == "largest" else turning,
            most=num_stages,
        )  # fmt: skip
        found = sweep.least(num_stages)
        return found, sweep.stages(num_stages) if found < float("inf") else ()

    def forms(self, number: int) -> tuple[Form, ...]:
        """The forms that hold of so many stages."""
        if number == 1 or not self.is_chain:
            return ("largest",)
        return ("largest", "filling", "turning") if self.splits else ("largest", "turning")

    def raise_by_memory(self, stages: Stages, form: Form) -> int:
        """Bounds the stages of a pipeline with their memory; how many bounds that were."""
        raised = 0
        for at, (start, stop, move) in enumerate(stages):
            own = self.stage(len(stages) - at, move.place, at == 0)
            number = int(self.costs.runs.classes.numbers[start, stop])
            if own is not None:
                raised += own.raise_by_memory(number, form)
        return raised


def _least_forward(model: StageModel, kind: str) -> float:
    """What a block's forward computes at least, each op in the layout in which it is fastest."""
    decisions = model.kind(kind).decisions
    return sum(float(each.seconds[:, :, FORWARD_COMPUTE].min()) for each in decisions)


_FORMS: Mapping[Form, Callable[[StageBounds], tuple[Floats, Floats]]] = {
    "largest": StageBounds.largest,
    "filling": StageBounds.filling,
    "turning": StageBounds.turning,
}


@dataclass(order=True)
class _Part:
    """The pipelines of one number of stages, and what none of them is faster than.

    Of the forms that were tried, the last of ``tried``, ``best`` has that bound with ``stages``.
    """

    least: float
    order: int
    space: Space = field(compare=False)
    number: int = field(compare=False)
    tried: list[Form] = field(default_factory=list, compare=False)
    best: Form = field(default="largest", compare=False)
    stages: Stages = field(default=(), compare=False)

    def narrow(self, left: int) -> int | None:
        """Finds a better bound; how many stages that bounded by memory, None if there is none."""
        untried = [each for each in self.space.forms(self.number) if each not in self.tried]
        if untried:
            self.tried.append(untried[0])
            self._take(untried[0])
            return 0
        raised = self.space.raise_by_memory(self.stages, self.best) if left > 0 else 0
        if not raised:
            return None
        self.stages = ()
        for form in self.tried:
            self._take(form)
        return raised

    def _take(self, form: Form) -> None:
        found, stages = self.space.least(self.number, form)
        if found >= self.least or not self.stages:
            self.best, self.stages = form, stages
        self.least = max(self.least, found)


def step_bound(
    job: Job, rows: tuple[int, ...], numbers: tuple[int, ...], step: float, gap: float
) -> float:
    """No plan takes less than this. ``step`` is the best known, within ``gap`` of it is enough."""
    began = time.perf_counter()
    order = counting()
    least = work_bound(job, rows)
    heap = [_Part(least, next(order), *each) for each in spaces(job, rows, numbers)]
    left = MOST_RAISED
    until = began + max(LEAST_SECONDS, BOUND_SHARE * (began - job.began))
    while heap[0].least < step * (1 - gap) and job.effort.left_seconds > 0:
        if time.perf_counter() > until:
            break
        raised = heap[0].narrow(left)
        if raised is None:
            break
        left -= raised
        heapq.heapreplace(heap, heap[0])
    job.took("bound", time.perf_counter() - began)
    return min(heap[0].least, step)


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
        for tiling, number in tilings(job.cluster, numbers, costs.place, mixed=mixed):
            yield Space(costs, tiling, is_chain, has_split), number
