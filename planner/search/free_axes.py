"""Plans that use the axis "dp" for more than the batch.

In: a job; the winner, or several pipelines. Out: candidates whose meshes' axes are left to the
solver. They are no part of the space that is searched: its tables would be far wider. So neither
are they part of what a plan's bound holds for. The pipelines are tried in the order of what they
take at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..inter_op.inter_op import StageChoice
from ..inter_op.submesh import restriction
from ..intra_op.intra_op import IntraOp
from ..pricing.branches import stage_depths
from ..pricing.run_classes import NO_RUN
from ..schedules.held import Halves, is_split, most_held
from .candidates import Chosen, edges, schedules, simulated, splitting
from .costs import answer_seconds
from .job import Job
from .nearby import Stages, answers_seconds
from .report_plan import Candidate

WORTH_IT = 1e-9
"""The least gain for which a plan may use the axis "dp" for more than the batch: no rounding."""


def freed(job: Job, best: Candidate) -> Candidate:
    """The winner with the meshes' axes left to the solver, if that is faster.

    Only where tables can solve it: integer programs that wide take long.
    Unequal shares of the batch leave "dp" to the batch.
    """
    if any(answer.shares for _, answer in best.answers):
        return best
    chosen: list[Chosen] = []
    depths = stage_depths(edges(job, best.rows, best.stages), len(best.stages))
    for choice, (model, answer), depth in zip(best.stages, best.answers, depths, strict=True):
        mesh = model.prices.mesh
        solver = job.solver(best.rows, mesh, choice.first_device, free=True)
        held = job.held(best.schedule, len(best.stages), best.rows, depth)
        free = None
        if solver.is_quick(answer.run, best.num_microbatches):
            free = solver.best(answer.run, best.num_microbatches, most_held(held))
        if free is not None and is_split(held):
            free = splitting(solver, free, held)[1]
            fits = free.cost.total_bytes <= solver.limits.memory_bytes
            free = free if fits else None
        if free is None or free.objective >= answer.objective * (1 - 1e-9):
            found = job.solver(best.rows, mesh, choice.first_device, free=False)
            chosen.append((found, answer))
        else:
            chosen.append((solver, free))
    other = simulated(job, best.rows, best.schedule, best.stages, chosen)
    return other if other.step_seconds < best.step_seconds * (1 - WORTH_IT) else best


def free_candidates(
    job: Job, pipelines: Sequence[tuple[int, Stages]], best_seconds: Callable[[], float]
) -> Iterator[Candidate]:
    """Pipelines with a stage whose axes are left to the solver, under every schedule, as long as
    they may be faster than the best."""
    stages = _FreeStages(job)
    found = []
    for number, (rows, own) in enumerate(pipelines):
        chosen = stages.answers(rows, own, job.in_flight_schedule)
        if chosen is not None and any(stages.is_free(solver) for solver, _ in chosen):
            answers, count = [answer for _, answer in chosen], job.num_microbatches(rows)
            needs = edges(job, rows, own)
            found.append((answers_seconds(answers, count, needs, job.request.schedules), number))
    for least, number in sorted(found):
        if least >= best_seconds():
            return
        rows, own = pipelines[number]
        is_chain = edges(job, rows, own) is None
        for schedule in schedules(job, len(own), is_chain=is_chain):
            chosen = stages.answers(rows, own, schedule)
            if chosen is not None:
                yield simulated(job, rows, schedule, own, chosen)


@dataclass
class _FreeStages:
    """Stages with their best meshes, whose axes are left to the solver."""

    job: Job
    _known: dict[tuple[int, int, int, int], Chosen | None] = field(default_factory=dict)
    _free: set[int] = field(default_factory=set)

    def is_free(self, solver: IntraOp) -> bool:
        """Whether an axis is left to it that otherwise is not."""
        return id(solver) in self._free

    def answers(self, rows: int, stages: Stages, schedule: str) -> list[Chosen] | None:
        """How to run each stage of a pipeline; None where one does not fit."""
        found = []
        depths = stage_depths(edges(self.job, rows, stages), len(stages))
        for choice, depth in zip(stages, depths, strict=True):
            own = self._fitting(rows, choice, self.job.held(schedule, len(stages), rows, depth))
            if own is None:
                return None
            found.append(own)
        return found

    def _fitting(self, rows: int, choice: StageChoice, held: Halves) -> Chosen | None:
        found = self._best(rows, choice, most_held(held))
        if found is None or not is_split(held):
            return found
        solver, answer = splitting(*found, held)
        fits = answer.cost.total_bytes <= solver.limits.memory_bytes
        return (solver, answer) if fits else None

    def _best(self, rows: int, choice: StageChoice, in_flight: int) -> Chosen | None:
        costs = self.job.costs(rows)
        place = costs.place(choice.first_device, choice.num_devices)
        number = int(costs.runs.classes.numbers[choice.start, choice.stop])
        if number == NO_RUN:
            return None
        key = rows, place, number, in_flight
        if key not in self._known:
            run, count = costs.runs.run(number), self.job.num_microbatches(rows)
            every = [
                (solver, answer)
                for solver in self._solvers(rows, choice, place)
                if solver.is_quick(run, count)
                and (answer := solver.best(run, count, in_flight)) is not None
            ]
            self._known[key] = min(
                every, key=lambda each: answer_seconds(each[1], count), default=None
            )
        return self._known[key]

    def _solvers(self, rows: int, choice: StageChoice, place: int) -> Iterator[IntraOp]:
        """One for each mesh of a place, free where that makes a difference."""
        for mesh in self.job.costs(rows).places[place].meshes:
            axes, forced = mesh.solver.model.prices.mesh, self.job.request.forced
            if restriction(axes, forced, free=True) == restriction(axes, forced):
                yield mesh.solver
            else:
                solver = self.job.solver(rows, axes, choice.first_device, free=True)
                self._free.add(id(solver))
                yield solver
