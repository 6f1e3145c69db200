"""Local search over cuts, for pipelines that the dynamic program does not propose.

In: a search context, the pool. Out: candidates that may be faster than the best so far, the most
promising first. The dynamic program's T = Σ q + max m ignores split backwards, whose weight
gradients may fill a wait, and stages that wait for the host: of pipelines with equal T, one may be
much faster under some schedule. If there are few pipelines, all are considered; otherwise only
neighbours of the best pipeline, with one cut moved by a block.

Each pipeline has the lower bound ``candidates.least_seconds`` from its stages' costs, with the
backward in halves if a schedule may split it; it is simulated only if its bound is below the best
step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import comb

from ..inter_op.inter_op import Pipeline, StageChoice, total_seconds
from ..inter_op.sweep import Tiling
from ..intra_op.intra_op import StageAnswer
from ..schedules.held import splits
from ..search.branch_and_bound import PipelineProposal
from ..search.candidates import Candidate, edges, least_seconds, stage
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..search.space import tilings
from ..stage.branches import WeightedEdges, stage_depths

MOST_DEVICES = 16
MOST_FEW = 2_000
"""Maximum number of pipelines, over all micro-batch sizes, that are all considered."""

MOST_CUTS = 5_000
"""Maximum number of cuts of the blocks into stages with which pipelines count as few."""

MOST_CLIMBED = 8
"""Maximum rounds of moving the best pipeline's cuts."""

MOST_STAGES = 8
"""Maximum stages of a pipeline whose cuts are moved, as simulating more stages takes long."""

Stages = tuple[StageChoice, ...]


def local_search(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield candidates of all possible pipelines if they are few; else of the fastest pipeline's
    neighbours (one cut moved by a block), then of the fastest neighbour's, and so on."""
    context.budget.observe("refining the best", 1, 1)
    if pool.best is None:
        return
    began = context.budget.work
    few = few_pipelines(context, context.microbatch_rows, context.stage_numbers)
    if few is not None:
        yield from _better(context, pool, few, began)
        return
    for _ in range(MOST_CLIMBED):
        best = pool.best
        if len(best.stages) > MOST_STAGES:
            return
        moved = filter(context.begins_as_asked, shift_cuts(best.stages))
        yield from _better(context, pool, [(best.rows, stages) for stages in moved], began)
        if pool.best is best or _is_late(context, began):
            return


def _is_late(context: SearchContext, began: float) -> bool:
    return context.budget.is_late(0.75) or context.budget.is_long(began)


def _better(
    context: SearchContext,
    pool: CandidatePool,
    pipelines: Iterable[tuple[int, Stages]],
    began: float,
) -> Iterator[Candidate]:
    """Yield candidates of pipelines not simulated so far that may be faster than the best."""
    known = {proposal.key for proposal in pool.proposals}
    new = [each for each in pipelines if each not in known]
    for least, proposal in bounded_below(
        context, new, pool.step_seconds, lambda: _is_late(context, began)
    ):
        if least < pool.step_seconds:
            yield from pool.simulate(proposal)


def few_pipelines(
    context: SearchContext, rows: Sequence[int], numbers: tuple[int, ...]
) -> list[tuple[int, Stages]] | None:
    """Return all pipelines at all micro-batch sizes; None if there are too many."""
    if context.cluster.num_devices > MOST_DEVICES or not is_few(context, numbers):
        return None
    every = ((each, stages) for each in rows for stages in stagings(context, each, numbers))
    found = list(islice(every, MOST_FEW + 1))
    return found if len(found) <= MOST_FEW else None


def is_few(context: SearchContext, numbers: tuple[int, ...]) -> bool:
    """Return whether the blocks can be cut into these numbers of stages in few ways only."""
    num_blocks = len(context.structure.blocks.blocks)
    return sum(comb(num_blocks - 1, number - 1) for number in numbers) <= MOST_CUTS


def stagings(
    context: SearchContext, rows: int, numbers: tuple[int, ...]
) -> Iterator[tuple[StageChoice, ...]]:
    """Yield every cut of the blocks, on every division of the devices that the request allows."""
    num_blocks = len(context.structure.blocks.blocks)

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
    mixed = context.request.features.allows("mixed-stages")
    place = context.solvers.costs(rows).place
    for tiling, number in tilings(context.cluster, numbers, place, mixed=mixed):
        if number <= min(tiling.most, num_blocks):
            for stages in extend(tiling, number, 0, 0):
                if stages not in seen and context.begins_as_asked(stages):
                    seen.add(stages)
                    yield stages


def shift_cuts(stages: Stages) -> Iterator[Stages]:
    """Yield the pipelines that differ from ``stages`` by one cut, moved by one block."""
    for at in range(len(stages) - 1):
        before, after = stages[at], stages[at + 1]
        for cut in (before.stop - 1, before.stop + 1):
            if before.start < cut < after.stop:
                moved = replace(before, stop=cut), replace(after, start=cut)
                yield (*stages[:at], *moved, *stages[at + 2 :])


def bounded_below(
    context: SearchContext,
    pipelines: Iterable[tuple[int, Stages]],
    below: float,
    is_late: Callable[[], bool] = lambda: False,
) -> list[tuple[float, PipelineProposal]]:
    """Return the pipelines with lower bounds below ``below``, sorted by bound; stop if late."""
    found = []
    for rows, stages in pipelines:
        if is_late():
            break
        if _slowest_seconds(context, rows, stages) >= below:
            continue
        found += [each for each in _draft(context, rows, stages) if each[0] < below]
    return sorted(found, key=lambda each: (each[0], each[1].seconds))


def _slowest_seconds(context: SearchContext, rows: int, stages: Stages) -> float:
    """Return a lower bound of the step time from the cost bounds known so far, without pricing: the
    slowest stage's work for all micro-batches but one."""
    return max(slowest for _, slowest in context.solvers.costs(rows).known(stages))


def _draft(
    context: SearchContext, rows: int, stages: Stages
) -> Iterator[tuple[float, PipelineProposal]]:
    """Yield (lower bound of the step time, pipeline) if it fits in memory, else nothing."""
    needs = edges(context, rows, stages)
    answers: list[StageAnswer] = []
    depths = stage_depths(needs, len(stages))
    for choice, depth in zip(stages, depths, strict=True):
        held = context.held(context.in_flight_schedule, len(stages), rows, depth)
        found = stage(context, rows, choice, held)
        if found is None:
            return
        answers.append(found[1])
    count = context.num_microbatches(rows)
    seconds = total_seconds([each.cost.warmup_and_steady(count) for each in answers])
    yield (
        answers_seconds(answers, count, needs, context.request.schedules),
        PipelineProposal(rows, Pipeline(stages, seconds)),
    )


def answers_seconds(
    answers: Sequence[StageAnswer],
    count: int,
    needs: WeightedEdges | None,
    schedules: Collection[str],
) -> float:
    """Return a lower bound of the step time of these stages under any of ``schedules``."""
    halved = needs is None and len(answers) > 1 and any(map(splits, schedules))
    figures = []
    for answer in answers:
        cost, late = answer.cost, 0.0
        if halved:
            known = cost.late_seconds
            late = answer.table.weight_grads(answer.run)[0] if known is None else known
        figures.append(
            (
                cost.forward_seconds,
                cost.backward_seconds - late,
                *cost.receive_seconds,
                cost.end_seconds,
                late,
            )
        )
    return float(least_seconds(figures, count, needs))
