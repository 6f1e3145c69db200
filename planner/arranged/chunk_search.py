"""Pipelines cut again into several stages per rank, where that makes them faster.

In: what ``search`` found. Out: plans under schedules of several stages (chunks) per rank
(interleaved, breadth-first, ZB-V, DualPipeV), as ``evaluate`` prices them, and what was tried.

The candidates whose ranks are alike in mesh and devices are considered, the first ``MOST_BASES``
by what their ranks' work takes at least. For each, every schedule that is allowed and number of
chunks up to ``MOST_CHUNKS`` is simulated with a rank's figures shared out over its chunks; those
that come out faster than the best are cut for real (``chunks.chunked``) and priced, the most
promising first, with more blocks recomputed where they would not fit (``chunk_memory``). So
this is a search near good pipelines, not over all of several chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...cost_model.simulator import simulate
from ...cost_model.stage_costs import StageCosts
from ..errors import UsageError
from ..plan import Alternative, Plan
from ..schedules.orders import round_size
from ..schedules.schedules import build_schedule, find_schedule
from ..search.candidates import edges
from ..search.report_plan import Candidate
from ..search.search import Searched
from .chunk_memory import fitting

MOST_BASES = 4
"""Pipelines that are cut again."""

MOST_CHUNKS = 4
"""Stages per rank."""

MOST_PRICED = 3
"""Cut pipelines that are priced node by node."""

MOST_WALKED = 1_024
"""Stages and blocks that are gone through to price them, and again with more recomputed."""

MOST_ACTIONS = 16_384
"""Stages times micro-batches that are simulated here."""


class Cut(Protocol):
    """A plan of one stage per rank → the plan cut and priced."""

    def __call__(self, base: Plan, schedule: str, count: int) -> Plan: ...


@dataclass(frozen=True)
class Guess:
    """A way to cut a candidate, and about what its step would take."""

    seconds: float
    base: Candidate
    schedule: str
    chunks: int

    @property
    def summary(self) -> str:
        pipeline = self.base.summary.rsplit(", ", 1)[0]
        return f"{pipeline}, {self.schedule}, each cut in {self.chunks}"


def cut_again(found: Searched, cut: Cut, deadline: float) -> tuple[Plan | None, list[Alternative]]:
    """The fastest cut plan that fits and is faster than all of one stage per rank, if there is
    one, and the others that were priced. ``deadline`` is of ``perf_counter``."""
    best: Plan | None = None
    bar, lost = found.ranking[0].step_seconds, []
    if not found.request.allows_one_stage and len(found.ranking[0].stages) > 1:
        bar = float("inf")
    limit, mode = found.job.limits.memory_bytes, found.request.most_recomputed
    num_blocks, walked = len(found.blocks.blocks), 0
    for guess in sorted(guesses(found), key=lambda each: each.seconds)[:MOST_PRICED]:
        if guess.seconds >= bar or walked >= MOST_WALKED or time.perf_counter() > deadline:
            break

        def own(base: Plan, guess: Guess = guess) -> Plan:
            nonlocal walked
            walked += len(base.stages) * guess.chunks + num_blocks
            return cut(base, guess.schedule, guess.chunks)

        try:
            plan = fitting(own, found.plan(guess.base), limit, mode, bar=bar)
        except UsageError:
            continue
        step, peak = plan.prediction.step_seconds, plan.prediction.peak_memory_bytes
        if peak <= limit and step < bar:
            best, bar = plan, step
        else:
            reason = "more messages, uneven chunks, or more recomputed"
            reason = "does not fit" if peak > limit else reason
            lost.append(Alternative(guess.summary, step, peak, reason))
    return best, lost


def guesses(found: Searched) -> Iterator[Guess]:
    """Every way to cut the candidates that may be worth it."""
    request, num_blocks = found.request, len(found.blocks.blocks)
    for base in bases(found):
        ranks, count = len(base.stages), base.num_microbatches
        for name in request.chunked_schedules:
            low, high = find_schedule(name).chunks
            for chunks in range(low, min(high, MOST_CHUNKS) + 1):
                number = ranks * chunks
                if chunks < 2 or number > num_blocks or number * count > MOST_ACTIONS:
                    continue
                try:
                    seconds = extrapolated(
                        partial(_about, base, name, chunks), ranks, chunks, count
                    )
                except UsageError:
                    continue
                yield Guess(seconds, base, name, chunks)


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
            key = each.rows, each.stages, meshes.pop()
            if seconds < best:
                work.setdefault(key, (seconds, number, each))
    return [each for *_, each in sorted(work.values(), key=lambda own: own[:2])[:MOST_BASES]]


def extrapolated(
    step: Callable[[int], float], num_ranks: int, chunks: int, num_microbatches: int
) -> float:
    """``step(num_microbatches)``, from two shorter ones if there are many micro-batches.

    What a micro-batch adds is the same once all stages are full: as many micro-batches as two
    and three times the stages are simulated, and the rest goes on as between them.
    """
    size = chunks * (round_size(num_ranks, num_microbatches) or num_microbatches)
    few, many = 2 * size, 3 * size
    if num_microbatches <= few + many:
        return step(num_microbatches)
    less, more = step(few), step(many)
    return more + (more - less) / (many - few) * (num_microbatches - many)


def _about(base: Candidate, name: str, chunks: int, num_microbatches: int) -> float:
    """The step where each chunk takes its share of its rank's seconds. Raises UsageError."""
    ranks = len(base.stages)
    schedule = build_schedule(name, ranks * chunks, num_microbatches, num_chunks=chunks)
    costs = [base.answers[rank][1].cost for rank in schedule.stage_rank]
    own = [answer.figures.late(answer.run)[0] / chunks for _, answer in base.answers]
    late = [own[rank] for rank in schedule.stage_rank]
    sent = [max(c.receive_seconds[way] for c in costs) for way in range(2)]
    between = len(costs) - 1
    return float(
        simulate(
            schedule,
            StageCosts(
                [c.forward_seconds / chunks for c in costs],
                [c.backward_seconds / chunks for c in costs],
                send_seconds=[sent[0]] * between,
                send_backward_seconds=[sent[1]] * between,
                step_seconds=[c.step_seconds / chunks for c in costs],
                weight_backward_seconds=late,
            ),
        ).step_seconds
    )
