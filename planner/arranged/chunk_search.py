"""Pipelines cut again into several stages per rank, where that makes them faster.

In: what ``search`` found. Out: plans under schedules of several stages (chunks) per rank
(interleaved, breadth-first, ZB-V, DualPipeV), as ``evaluate`` prices them, and what was tried:
of what does not fit, or cannot be fast enough, with about what it takes.

The candidates whose ranks are alike in mesh and devices are considered, the first ``MOST_BASES``
by what their ranks' work takes at least. For each, every schedule that is allowed and number of
chunks is simulated with a stage's figures shared out over its blocks (``chunk_guesses``); those
that come out faster than the best are cut for real (``chunks.chunked``) and priced, the most
promising first, with more blocks recomputed where they would not fit (``chunk_memory``). So
this is a search near good pipelines, not over all of several chunks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import UsageError
from ..plan import Alternative, Plan
from ..schedules.rank_held import rank_held
from ..search.candidates import edges
from ..search.job import Job
from ..search.narrowing import narrowed
from ..search.report_plan import LESS_SIMPLE, Candidate
from ..search.search import Searched
from ..search.simplest import equals, shape_of_plan, simplest_first
from .balanced import block_flops
from .chunk_guesses import NUM_CHUNKS, Guess, Way, fastest
from .chunk_memory import fitting
from .priced import Wanted

MOST_BASES = 4
"""Pipelines that are cut again."""

MOST_PRICED = 6
"""Cut pipelines that are priced node by node."""

MOST_WALKED = 3_072
"""Stages and blocks that are gone through to price them, and again with more recomputed."""


HARDLY = 1.01
"""A schedule that is faster by no more than this factor is hardly so."""


class Cut(Protocol):
    """A plan of one stage per rank → the plan cut, and priced if it is wanted.

    ``starts``: the blocks that stages begin with, if that is not for the cut to say.
    """

    def __call__(
        self, base: Plan, schedule: str, count: int, wanted: Wanted | None = None,
        starts: tuple[int, ...] | None = None,
    ) -> Plan: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Others:
    """Plans of other schedules than those of one stage per rank.

    ``best`` is the simplest within the tolerance of the ``fastest`` that fits and takes less than
    all of one stage per rank; both are None where there is none. ``lost`` are the others that
    were priced.
    """

    best: Plan | None
    fastest: Alternative | None
    lost: list[Alternative]


def cut_again(found: Searched, cut: Cut, deadline: float, tolerance: float = 0.0) -> Others:
    """The plans that are cut again.

    ``deadline`` is of ``perf_counter``; where all of one stage per rank are out of the question
    the first that fits is found after it too.
    """
    fit: list[Fitting] = []
    bar, lost = found.ranking[0].step_seconds, []
    if not found.request.allows_one_stage and len(found.ranking[0].stages) > 1:
        bar = float("inf")
    limit, modes = found.job.limits.memory_bytes, found.request.recomputations
    num_blocks, walked = len(found.blocks.blocks), 0
    with found.job.stoppable():
        flops = block_flops(found.graph, found.blocks, found.job.rules)
        every = fastest(
            bases(found), found.request.chunked_schedules, flops,
            most=MOST_PRICED, bar=bar, numbers=_numbers(found),
        )  # fmt: skip
        for guess in thrifty_first(every):
            way = guess.way
            is_late = time.perf_counter() > deadline and bar < float("inf")
            if guess.seconds >= bar or walked >= MOST_WALKED or is_late:
                break

            wanted = Wanted(limit, bar)

            def own(base: Plan, way: Way = way, wanted: Wanted = wanted) -> Plan:
                nonlocal walked
                walked += len(base.stages) * way.chunks + num_blocks
                return cut(base, way.schedule, way.chunks, wanted, way.starts)

            try:
                base = found.plan(way.base.candidate, with_others=False)
                plan = fitting(own, base, limit, modes, bar=bar)
            except UsageError:
                continue
            step, peak = plan.prediction.step_seconds, plan.prediction.peak_memory_bytes
            if peak <= limit and step < bar:
                fit.append(Fitting(plan, way))
                bar = step
            else:
                reason = "more messages, uneven chunks, or more recomputed"
                reason = "does not fit" if peak > limit else reason
                lost.append(Alternative(way.summary, max(step, guess.seconds), peak, reason))
    if not fit:
        return Others(None, None, lost)
    near = equals(fit, _step_seconds, tolerance)
    best = simplest_first(near, _step_seconds, lambda each: shape_of_plan(each.plan))[0]
    lost += [each.alternative(LESS_SIMPLE) for each in fit if each is not best]
    with found.job.stoppable():
        plan = _with_proven_layouts(best.plan, best.way.base.candidate, found.job)
        return Others(plan, min(fit, key=_step_seconds).alternative(LESS_SIMPLE), lost)
    return Others(best.plan, None, lost)


@dataclass(frozen=True, slots=True)
class Fitting:
    """A cut plan that fits, and the way in which it was cut."""

    plan: Plan
    way: Way

    def alternative(self, reason: str) -> Alternative:
        own = self.plan.prediction
        return Alternative(self.way.summary, own.step_seconds, own.peak_memory_bytes, reason)


def _step_seconds(fit: Fitting) -> float:
    return fit.plan.prediction.step_seconds


def _with_proven_layouts(best: Plan, of: Candidate, job: Job) -> Plan:
    """The plan with what is proven of the pipeline that it was cut of."""
    proven = narrowed(job, of)
    gap = 1 - proven.step_seconds * (1 - proven.layouts_gap) / of.step_seconds
    return replace(best, solver=replace(best.solver, layouts_gap=gap))


def thrifty_first(every: Sequence[Guess]) -> list[Guess]:
    """The guesses in their order, but of a pipeline cut into as many stages the schedule that
    holds fewer micro-batches before those that are hardly faster: it has less to recompute."""
    found: list[Guess] = []
    for guess in every:
        own = guess.way
        at = len(found)
        for number, other in enumerate(found):
            is_like = other.way.base is own.base and other.way.chunks == own.chunks
            is_hardly = guess.seconds <= other.seconds * HARDLY
            if is_like and is_hardly and _held(own) < _held(other.way):
                at = min(at, number)
        found.insert(at, guess)
    return found


def _held(way: Way) -> float:
    """Micro-batches that all stages hold."""
    held = rank_held(way.schedule, way.num_ranks, way.chunks, way.num_microbatches)
    return float("inf") if held is None else sum(held)


def _numbers(found: Searched) -> tuple[int, ...]:
    """The numbers of stages per rank that are tried."""
    asked = found.request.forced.chunks
    return NUM_CHUNKS if asked is None else (asked,)


def bases(found: Searched) -> list[Candidate]:
    """The candidates to cut: their ranks alike, the least work first, each pipeline once."""
    best = found.ranking[0].step_seconds
    if not found.request.allows_one_stage:
        best = float("inf")
    work: dict[object, tuple[float, int, Candidate]] = {}
    for number, each in enumerate(found.ranking):
        meshes = {model.prices.mesh for model, _ in each.answers}
        is_chain = edges(found.job, each.rows, each.stages) is None
        if len(each.stages) > 1 and len(meshes) == 1 and is_chain:
            costs = [answer.cost for _, answer in each.answers]
            busiest = max(c.forward_seconds + c.backward_seconds for c in costs)
            seconds = each.num_microbatches * busiest
            key = each.rows, len(each.stages), meshes.pop()
            if seconds < best:
                work.setdefault(key, (seconds, number, each))
    return [each for *_, each in sorted(work.values(), key=lambda own: own[:2])[:MOST_BASES]]
