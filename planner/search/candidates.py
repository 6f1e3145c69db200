"""From drafts to candidates: each stage's best mesh and layouts, and the simulated step.

In: a job, pipelines of the dynamic program. Out: candidates, simulated under the schedules
that are allowed and fit. A step of very many micro-batches is simulated at two smaller numbers
and continued: once the pipeline is full each further micro-batch takes equally long. Only the
winner's whole step is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ..inter_op.inter_op import StageChoice
from ..inter_op.pipeline_bound import least_seconds
from ..intra_op.intra_op import IntraOp, StageAnswer
from ..pricing.assembly import Setting
from ..pricing.branches import Places, WeightedEdges, stage_depths, stage_edges
from ..pricing.stage_cost import StageCost
from ..pricing.step import Pipeline, Step, latency_seconds, simulated_step
from ..schedules.held import Halves, is_split, most_held, splits
from .job import Job
from .quests import Draft, open_seconds, turning_seconds
from .report_plan import Candidate

Chosen = tuple[IntraOp, StageAnswer]

MOST_STEPS = 4096
"""Stages times micro-batches that are simulated one by one."""

MORE_HELD = 2
"""Where what waits for gradients of weights does not fit, the stage is solved as if it held
more micro-batches whole: so many more at most."""


def stage(
    job: Job, rows: int, choice: StageChoice, held: Halves, *, programs: int = 0
) -> Chosen | None:
    """The best mesh of a stage of a pipeline, and its answer; None where it does not fit.

    ``programs``: with its gap narrowed by up to so many integer programs.
    """
    for more in range(1 + (MORE_HELD if is_split(held) else 0)):
        number = most_held(held) + more
        found = _stage(job, rows, choice, number)
        if found is not None and programs:
            found[0].refine(found[1].run, job.num_microbatches(rows), number, programs)
            found = _stage(job, rows, choice, number)
        if found is None or not is_split(held):
            return found
        found = splitting(*found, held)
        if found[1].cost.total_bytes <= found[0].limits.memory_bytes:
            return found
    return None


def _stage(job: Job, rows: int, choice: StageChoice, in_flight: int) -> Chosen | None:
    costs = job.costs(rows)
    place = costs.places[costs.place(choice.first_device, choice.num_devices)]
    number = int(costs.runs.classes.numbers[choice.start, choice.stop])
    return place.answer(number, in_flight)


def splitting(solver: IntraOp, answer: StageAnswer, held: Halves) -> Chosen:
    """The answer with its backward in two halves."""
    setting: Setting = replace(answer.setting, halves=held)
    return solver, replace(answer, setting=setting)


def edges(job: Job, rows: int, stages: Sequence[StageChoice]) -> WeightedEdges | None:
    """Which stage needs which; None for a chain."""
    ends = tuple((s.first_device, s.first_device + s.num_devices - 1) for s in stages)
    return stage_edges(job.at(rows), [s.start for s in stages], Places(job.cluster, ends))


def schedules(job: Job, num_stages: int, *, is_chain: bool) -> tuple[str, ...]:
    """The schedules to simulate. Those that split backwards run chains of stages only."""
    allowed = job.request.schedules
    if num_stages == 1:
        return allowed[:1]
    return tuple(name for name in allowed if is_chain or not splits(name))


def candidate(
    job: Job, draft: Draft, schedule: str | None = None, *, programs: int = 0
) -> Candidate | None:
    """A draft under a schedule, if not given the one that the dynamic program thought of.

    None where it does not fit. ``programs``: with the gaps of stages narrowed, each by up to so
    many integer programs.
    """
    schedule = schedule or job.in_flight_schedule
    stages, rows = draft.pipeline.stages, draft.rows
    depths = stage_depths(edges(job, rows, stages), len(stages))
    held = [job.held(schedule, len(stages), rows, depth) for depth in depths]
    chosen: list[Chosen] = []
    for choice, own in zip(stages, held, strict=True):
        found = stage(job, rows, choice, own)
        if found is None:
            return None
        chosen.append(found)
    if programs:
        _refine(job, rows, stages, held, chosen, programs)
    return simulated(job, rows, schedule, stages, chosen)


def _refine(
    job: Job, rows: int, stages: Sequence[StageChoice], held: Sequence[Halves],
    chosen: list[Chosen], programs: int,
) -> None:  # fmt: skip
    """Narrows the gaps of stages, the slowest first, as long as that can make the step shorter.

    T = Σ q + max m (``costs``) is within half the gap of its least once the slowest stages
    are: what the others take counts once.
    """
    count, left = job.num_microbatches(rows), set(range(len(stages)))
    while left:
        figures = [answer.cost.once_and_slowest(count) for _, answer in chosen]
        gaps = [answer.gap if at in left else 0.0 for at, (_, answer) in enumerate(chosen)]
        if open_seconds(figures, gaps) >= turning_seconds(figures) * (1 - job.request.gap / 2):
            return
        at = max(left, key=lambda each: (figures[each][1], -each))
        left.remove(at)
        chosen[at] = stage(job, rows, stages[at], held[at], programs=programs) or chosen[at]


def candidates(
    job: Job, draft: Draft, *, programs: int = 0, below: float = float("inf"),
    without: Collection[str] = (),
) -> Iterator[Candidate]:  # fmt: skip
    """The draft under every schedule that is allowed and fits, ``without`` some.

    A schedule that splits backwards only where it can take less than the first of the others
    that fits, and than ``below``: the stages' own work takes as long in any order, and with more
    micro-batches in flight not less.
    """
    stages = draft.pipeline.stages
    needs = edges(job, draft.rows, stages)
    work = 0.0
    for schedule in schedules(job, len(stages), is_chain=needs is None):
        if schedule in without or (splits(schedule) and work >= below):
            continue
        found = candidate(job, draft, schedule, programs=programs)
        if found is not None:
            yield found
            below = min(below, found.step_seconds)
            work = work or _work_seconds(found, needs)


def _work_seconds(found: Candidate, needs: WeightedEdges | None) -> float:
    """What these stages take in any order, whatever part of their backwards may wait."""
    costs = [answer.cost for _, answer in found.answers]
    figures = [
        (c.forward_seconds, 0.0, *c.receive_seconds, c.step_seconds, c.backward_seconds)
        for c in costs
    ]
    return float(least_seconds(figures, found.num_microbatches, needs))


def simulated(
    job: Job,
    rows: int,
    schedule: str,
    stages: tuple[StageChoice, ...],
    chosen: Sequence[Chosen],
    *,
    whole: bool = False,
) -> Candidate:
    """A candidate with its step; ``whole``: every micro-batch of it simulated."""
    began = time.perf_counter()
    costs = [answer.cost for _, answer in chosen]
    count = job.num_microbatches(rows)
    step, bubble = _step(job, schedule, count, costs, needs=edges(job, rows, stages), whole=whole)
    job.took("simulator", time.perf_counter() - began)
    return Candidate(
        rows, count, schedule, stages,
        tuple((solver.model, answer) for solver, answer in chosen),
        step, bubble, max(cost.total_bytes for cost in costs),
    )  # fmt: skip


def _step(
    job: Job,
    schedule: str,
    count: int,
    costs: Sequence[StageCost],
    *,
    needs: WeightedEdges | None,
    whole: bool,
) -> tuple[float, float]:
    """Seconds of a step, and the share of them that devices wait."""

    def run(number: int) -> Step:
        least = latency_seconds(job.cluster)
        pipeline = Pipeline(schedule, number, edges=needs)
        return simulated_step(pipeline, costs, latency_seconds=least, known=job.steps)

    few, more = _simulated_numbers(len(costs))
    if whole or is_whole(len(costs), count):
        return run(count)
    first = run(few).seconds
    second = run(more)
    seconds = second.seconds + (count - more) * (second.seconds - first) / (more - few)
    busy = (1 - second.bubble_fraction) * second.seconds * count / more
    return seconds, max(0.0, 1 - busy / seconds)


def _simulated_numbers(num_stages: int) -> tuple[int, int]:
    """Two numbers of micro-batches that are simulated in place of very many."""
    return 4 * num_stages, 5 * num_stages


def is_whole(num_stages: int, num_microbatches: int) -> bool:
    """Whether every micro-batch of a step is simulated."""
    _, more = _simulated_numbers(num_stages)
    return num_stages * num_microbatches <= MOST_STEPS or num_microbatches <= 2 * more


def completed(job: Job, best: Candidate) -> Candidate:
    """The winner with its whole step simulated."""
    count = best.num_microbatches
    costs = [answer.cost for _, answer in best.answers]
    needs = edges(job, best.rows, best.stages)
    step, bubble = _step(job, best.schedule, count, costs, needs=needs, whole=True)
    return replace(best, step_seconds=step, bubble_fraction=bubble)
