"""Candidates from proposals: the best mesh and layouts of each stage, and the simulated step.

In: a search context, pipelines of the dynamic program. Out: candidates, simulated under the allowed
schedules that fit. A step of very many micro-batches is extrapolated from two smaller numbers: in a
full pipeline each further micro-batch takes equally long. The winner's step is simulated in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..evaluate.step import Pipeline, Step, message_seconds, simulated_step
from ..graph.layout import NodeLayout, split_axes
from ..inter_op.inter_op import StageChoice, gap_adjusted_seconds, total_seconds
from ..intra_op.intra_op import IntraOp, StageAnswer
from ..schedules.held import HalfPairs, is_split, most_held, splits
from ..schedules.orders import round_size
from ..schedules.schedules import can_have, find_schedule, parts_of_ranks
from ..stage.branches import StagePlacement, WeightedEdges, stage_depths, stage_edges
from ..stage.decisions import Decision
from ..stage.stage_cost import TRANSIENT, StageCost, combine_bytes
from ..stage.stage_model import StageModel
from ..stage.stage_problem import Solution, StageOptions
from ..summary import RankSummary, schedule_text, summary_text
from ..variants.asynchronous import num_versions, with_versions
from ..variants.slice_costs import SliceShares
from .branch_and_bound import PipelineProposal
from .context import SearchContext

Chosen = tuple[IntraOp, StageAnswer]

MOST_STEPS = 4096
"""Maximum of stages times micro-batches for which every micro-batch is simulated."""

MORE_HELD = 2
"""Maximum micro-batches in flight added in solving a stage whose bytes for weight gradients, or
older weight versions, do not fit."""


def stage(
    context: SearchContext,
    rows: int,
    choice: StageChoice,
    held: HalfPairs,
    *,
    versions: int = 1,
    programs: int = 0,
) -> Chosen | None:
    """Return the best solver (of a mesh) for a pipeline stage and its solution; None if the stage
    does not fit in memory.

    ``versions`` of its weights are kept. At most ``programs`` integer programs narrow its gap.
    """
    holds_more = is_split(held) or versions > 1
    for more in range(1 + (MORE_HELD if holds_more else 0)):
        number = most_held(held) + more
        chosen = _stage(context, rows, choice, number)
        if chosen is not None and programs:
            chosen[0].refine(chosen[1].run, context.num_microbatches(rows), number, programs)
            chosen = _stage(context, rows, choice, number)
        if chosen is None or not holds_more:
            return chosen
        solver, answer = chosen
        setting: StageOptions = replace(answer.setting, in_flight=most_held(held))
        chosen = solver, replace(answer, setting=setting)
        if is_split(held):
            chosen = split_backward(*chosen, held)
        answer = chosen[1]
        cost = with_versions(answer.cost, versions, solver.model.prices.policy)
        excess = cost.total_bytes - solver.limits.memory_bytes
        if excess <= 0:
            return chosen
    solver.note_excess(excess)
    return None


def _stage(context: SearchContext, rows: int, choice: StageChoice, in_flight: int) -> Chosen | None:
    costs = context.solvers.costs(rows)
    place = costs.places[costs.place(choice.first_device, choice.num_devices)]
    return place.answer(int(costs.runs.classes.numbers[choice.start, choice.stop]), in_flight)


def split_backward(solver: IntraOp, answer: StageAnswer, held: HalfPairs) -> Chosen:
    """Return the stage's solution under a schedule that splits backwards in two halves."""
    setting: StageOptions = replace(answer.setting, halves=held)
    return solver, replace(answer, setting=setting)


def edges(context: SearchContext, rows: int, stages: Sequence[StageChoice]) -> WeightedEdges | None:
    """Return the data dependences between stages; None if the stages form a chain."""
    ends = tuple((s.first_device, s.first_device + s.num_devices - 1) for s in stages)
    return stage_edges(
        context.tables.at(rows), [s.start for s in stages], StagePlacement(context.cluster, ends)
    )


def schedules(context: SearchContext, num_stages: int, *, is_chain: bool) -> tuple[str, ...]:
    """Return the schedules to simulate; for parallel branches, not any that splits backwards."""
    allowed = context.request.schedules
    if num_stages == 1:
        return allowed[:1]
    return tuple(name for name in allowed if is_chain or not splits(name))


def candidate(
    context: SearchContext,
    proposal: PipelineProposal,
    schedule: str | None = None,
    *,
    programs: int = 0,
) -> Candidate | None:
    """Return the candidate of a proposed pipeline under a schedule; None if it does not fit.

    ``schedule`` defaults to the dynamic program's. ``programs``: maximum integer programs to narrow
    each stage's gap.
    """
    schedule = schedule or context.in_flight_schedule
    stages, rows = proposal.pipeline.stages, proposal.rows
    needs, count = edges(context, rows, stages), context.num_microbatches(rows)
    is_own = find_schedule(schedule).is_registered
    if is_own and (needs or not can_have(schedule, len(stages), count, 1)):
        return None
    depths = stage_depths(needs, len(stages))
    held = [context.held(schedule, len(stages), rows, depth) for depth in depths]
    versions = num_versions(schedule, len(stages), count)
    chosen: list[Chosen] = []
    for choice, in_flight, kept in zip(stages, held, versions, strict=True):
        found = stage(context, rows, choice, in_flight, versions=kept)
        if found is None:
            return None
        chosen.append(found)
    if programs:
        _refine(context, rows, stages, held, chosen, programs)
    return build_simulated(context, rows, schedule, stages, models_of(chosen))


def _refine(
    context: SearchContext,
    rows: int,
    stages: Sequence[StageChoice],
    held: Sequence[HalfPairs],
    chosen: list[Chosen],
    programs: int,
) -> None:
    """Narrow the stages' gaps between cost and bound, the slowest stage first, while this can
    shorten the step.

    The pipeline time T = Σ q + max m (``costs``) is within half the gap of its minimum once the
    slowest stages are: the others count only once.
    """
    count, left = context.num_microbatches(rows), set(range(len(stages)))
    while left:
        figures = [answer.cost.warmup_and_steady(count) for _, answer in chosen]
        gaps = [answer.gap if at in left else 0.0 for at, (_, answer) in enumerate(chosen)]
        least = total_seconds(figures) * (1 - context.request.gap / 2)
        if gap_adjusted_seconds(figures, gaps) >= least:
            return
        at = max(left, key=lambda each: (figures[each][1], -each))
        left.remove(at)
        chosen[at] = stage(context, rows, stages[at], held[at], programs=programs) or chosen[at]


def candidates(
    context: SearchContext,
    proposal: PipelineProposal,
    *,
    below: float = float("inf"),
) -> Iterator[Candidate]:
    """Yield a proposed pipeline's candidates under all schedules that fit.

    A schedule that splits backwards is only tried if it can be faster than the first other schedule
    that fits, and than ``below``: the stages' own work takes as long in any order, and no less with
    more micro-batches in flight.
    """
    stages = proposal.pipeline.stages
    needs = edges(context, proposal.rows, stages)
    work = 0.0
    for schedule in schedules(context, len(stages), is_chain=needs is None):
        if splits(schedule) and work >= below:
            continue
        found = candidate(context, proposal, schedule)
        if found is not None:
            yield found
            below = min(below, found.step_seconds)
            work = work or _work_seconds(found, needs)


def _work_seconds(found: Candidate, needs: WeightedEdges | None) -> float:
    """Return a lower bound of the step time in any order of actions, split backwards included."""
    costs = [answer.cost for _, answer in found.answers]
    figures = [
        (c.forward_seconds, 0.0, *c.receive_seconds, c.end_seconds, c.backward_seconds)
        for c in costs
    ]
    return float(least_seconds(figures, found.num_microbatches, needs))


def op_layouts(model: StageModel, answer: StageAnswer) -> dict[str, NodeLayout]:
    """Return the layouts of a stage's ops and parameters by node name."""
    found: dict[str, NodeLayout] = {}
    for owner, choices in answer.solution.items():
        shared = owner in model.structure.graph.by_name and owner not in (
            model.structure.blocks.kinds
        )
        decisions = (model.shared(owner),) if shared else model.kind(owner).decisions
        for decision, choice in zip(decisions, choices, strict=True):
            found.update(decision.choices[choice].layouts)
    return found


def _ops(model: StageModel, answer: StageAnswer) -> list[NodeLayout]:
    """Return the layouts of a stage's ops, without its parameters."""
    return [node for node in op_layouts(model, answer).values() if node.inputs]


def models_of(chosen: Sequence[Chosen]) -> tuple[tuple[StageModel, StageAnswer], ...]:
    """Return (model of the mesh, solution) of each stage from (solver, solution)."""
    return tuple((solver.model, answer) for solver, answer in chosen)


def build_simulated(
    context: SearchContext,
    rows: int,
    schedule: str,
    stages: tuple[StageChoice, ...],
    answers: Sequence[tuple[StageModel, StageAnswer]],
    *,
    num_chunks: int = 1,
    base: Candidate | None = None,
) -> Candidate:
    """Build a candidate of ``stages``, ``num_chunks`` per rank, and simulate its step."""
    count = context.num_microbatches(rows)
    policy = answers[0][0].prices.policy
    versions = num_versions(schedule, len(stages), count)
    costs = tuple(
        with_versions(answer.cost, number, policy)
        for (_, answer), number in zip(answers, versions, strict=True)
    )
    sizes = rank_bytes(stages, costs)
    limits = {stage.first_device: context.limits_on(stage.devices).memory_bytes for stage in stages}
    made = Candidate(
        rows,
        count,
        schedule,
        stages,
        tuple(answers),
        costs,
        0.0,
        0.0,
        max(sizes.values()),
        num_chunks,
        base=base,
        fits=base is None or all(size <= limits[rank] for rank, size in sizes.items()),
    )
    return _with_step(context, made, whole=False)


def complete_simulation(context: SearchContext, candidate: Candidate) -> Candidate:
    """Return the candidate with every micro-batch of its step simulated."""
    return replace(_with_step(context, candidate, whole=True), is_complete=True)


def _with_step(context: SearchContext, made: Candidate, *, whole: bool) -> Candidate:
    """Return the candidate with its simulated step; for many micro-batches, extrapolate from two
    shorter steps.

    In a full pipeline each further micro-batch takes equally long.
    """
    needs = edges(context, made.rows, made.stages)
    message = message_seconds(context.cluster)

    def run(number: int) -> Step:
        pipeline = Pipeline(made.schedule, number, made.num_chunks, edges=needs)
        return simulated_step(pipeline, made.costs, message=message, known=context.known.steps)

    count = made.num_microbatches
    with context.budget.timed("simulator"):
        if whole or is_whole(made):
            step = run(count)
        else:
            few, more = _simulated_numbers(made)
            first, second = run(few).seconds, run(more)
            seconds = second.seconds + (count - more) * (second.seconds - first) / (more - few)
            busy = (1 - second.bubble_fraction) * second.seconds * count / more
            step = Step(seconds, max(0.0, 1 - busy / seconds))
    return replace(made, step_seconds=step.seconds, bubble_fraction=step.bubble_fraction)


def _simulated_numbers(made: Candidate) -> tuple[int, int]:
    """Return two numbers of micro-batches, in whole rounds, to simulate instead of very many."""
    num_ranks = len(made.stages) // made.num_chunks
    if made.num_chunks == 1:
        return 4 * num_ranks, 5 * num_ranks
    size = made.num_chunks * (round_size(num_ranks, made.num_microbatches) or made.num_microbatches)
    return 2 * size, 3 * size


def is_whole(made: Candidate) -> bool:
    """Return whether every micro-batch of the candidate's step is simulated, none extrapolated."""
    few, more = _simulated_numbers(made)
    most = few + more if made.num_chunks > 1 else 2 * more
    count = made.num_microbatches
    is_few = len(made.stages) * count <= MOST_STEPS or count <= most
    return is_few or made.slices is not None or find_schedule(made.schedule).is_registered


@dataclass(frozen=True)
class Candidate:
    """A possible plan with its simulated step.

    ``stages`` are in model order; stages on the same devices belong to one pipeline rank, which has
    ``num_chunks``. ``costs`` are the stages' costs under the schedule. ``rows`` are the samples of
    a micro-batch. ``slices`` are TeraPipe's. ``base`` is the pipeline of one stage per rank whose
    layouts the candidate uses. ``is_complete``: all of very many micro-batches were simulated.
    """

    rows: int
    num_microbatches: int
    schedule: str
    stages: tuple[StageChoice, ...]
    answers: tuple[tuple[StageModel, StageAnswer], ...]
    costs: tuple[StageCost, ...]
    step_seconds: float
    bubble_fraction: float
    peak_bytes: float
    num_chunks: int = 1
    slices: SliceShares | None = None
    base: Candidate | None = None
    fits: bool = True
    is_complete: bool = False

    @property
    def is_pipeline(self) -> bool:
        """Return whether the candidate is a pipeline of one stage per rank, without replicas or
        slices, which can be the base of other candidates."""
        return self.base is None and len(self.stages) > 1

    @property
    def layouts_gap(self) -> float:
        """Return by which fraction the pipeline time T falls if all stages' layouts are optimal.

        A candidate with a ``base`` has the gap of its base.
        """
        if self.base is not None:
            return self.base.layouts_gap
        figures = [cost.warmup_and_steady(self.num_microbatches) for cost in self.costs]
        gaps = [answer.gap for _, answer in self.answers]
        return 1 - gap_adjusted_seconds(figures, gaps) / total_seconds(figures)

    @cached_property
    def has_idle_axis(self) -> bool:
        """Return whether the mesh of a stage has an axis of several ranks that shards no op."""
        return any(
            size > 1 and all(axis not in split_axes(node) for node in ops)
            for model, ops in ((each[0], _ops(*each)) for each in self.answers)
            for axis, size in enumerate(model.prices.mesh.shape)
        )

    @property
    def spent_seconds(self) -> dict[str, float]:
        """Return the busiest rank's seconds per step by category, waiting (the bubble) included.

        A rank has one part of the model or several chunks; with replicas it runs each of its two
        parts for half of the micro-batches.
        """
        num_ranks = len(self.costs) // self.num_chunks
        ranks = parts_of_ranks(self.schedule, num_ranks, self.num_chunks)
        count = self.num_microbatches * self.num_chunks / len(ranks[0])
        costs = max(
            ([self.costs[part] for part in parts] for parts in ranks),
            key=lambda own: sum(cost.forward_seconds + cost.backward_seconds for cost in own),
        )
        return {
            "compute": count * sum(sum(cost.compute_seconds) for cost in costs),
            "communication": count
            * sum(
                cost.seconds.forward_communication
                + cost.seconds.backward_communication
                + sum(cost.exposed_states)
                for cost in costs
            ),
            "gradient synchronization": sum(
                cost.step_seconds - cost.seconds.optimizer for cost in costs
            ),
            "optimizer": sum(cost.seconds.optimizer for cost in costs),
            "bubble": self.bubble_fraction * self.step_seconds,
        }

    @property
    def summary(self) -> str:
        """Return the configuration as one line."""
        ranks: dict[int, RankSummary] = {}
        for (model, answer), choice in zip(self.answers, self.stages, strict=True):
            zero, degree = model.prices.shardings[answer.setting.zero]
            new = RankSummary(model.prices.mesh, zero, 0, shard_degree=degree)
            before = ranks.get(choice.first_device, new)
            modes = tuple(m for m in answer.run.modes(answer.setting.policy) if m != "none")
            ranks[choice.first_device] = replace(
                new,
                num_blocks=before.num_blocks + choice.stop - choice.start,
                modes=before.modes + modes,
                shares=answer.shares,
            )
        num_slices = len(self.slices.lengths) if self.slices is not None else 0
        schedule = schedule_text(self.schedule, self.num_chunks, num_slices)
        return summary_text(
            list(ranks.values()),
            schedule,
            self.num_microbatches,
            self.rows,
            self.answers[0][0].prices.states.offload,
        )


def rank_bytes(stages: Sequence[StageChoice], costs: Sequence[StageCost]) -> dict[int, float]:
    """Map each rank's first device to the bytes per device, summed over the rank's stages."""
    ranks: dict[int, list[StageCost]] = {}
    for choice, cost in zip(stages, costs, strict=True):
        ranks.setdefault(choice.first_device, []).append(cost)
    return {
        rank: sum(combine_bytes([cost.memory_bytes for cost in of_rank], once=TRANSIENT).values())
        for rank, of_rank in ranks.items()
    }


def least_seconds(figures: Sequence[Any], count: int, edges: WeightedEdges | None = None) -> Any:
    """Return a lower bound of a pipeline's step time for any order of its micro-batches.

    ``figures[stage]``: seconds of forward, backward, receive forward, receive backward, end of
    step; if backwards are split, the second is of input gradients, and a sixth of weight
    gradients. ``edges`` come from ``branches.stage_edges``. A stage waits until the first
    micro-batch has passed all stages before it; then it computes all forwards and backwards; then
    follows its own end of step, or the last micro-batch's path back through the stages before it
    and their ends.

    >>> float(least_seconds([(1, 2, 0, 0, 1), (2, 4, 0.5, 0.5, 1)], 3))
    23.0
    """
    before: list[list[tuple[int, float]]] = [[] for _ in figures]
    chained = [(target - 1, target, 1.0) for target in range(1, len(figures))]
    for source, target, share in chained if edges is None else edges:
        before[target].append((source, share))
    there: list[Any] = []
    back: list[Any] = []
    least: Any = 0.0
    for stage, (forward, backward, receive, receive_backward, end, *late) in enumerate(figures):
        weights = late[0] if late else 0.0
        arrived, after = 0.0 * forward, 0.0 * end
        for source, share in before[stage]:
            arrived = np.maximum(arrived, there[source] + figures[source][0] + share * receive)
            returned = share * receive_backward + figures[source][1] + back[source]
            after = np.maximum(after, returned)
        there.append(arrived)
        back.append(np.maximum(weights + end, after))
        ended = np.maximum(count * weights + end, after)
        least = np.maximum(least, arrived + count * (forward + backward) + ended)
    return least


def reindex_solution(one: StageModel, other: StageModel, solution: Solution) -> Solution | None:
    """Return a solution of model ``one`` with the choice numbers of ``other`` (another mesh or
    number of rows); None if ``other`` lacks one of its layouts.

    A split is only offered if it divides the rows, so equal layouts may have different numbers.
    """
    if one is other:
        return solution
    own = one.structure
    found: dict[str, tuple[int, ...]] = {}
    for owner, choices in solution.items():
        is_shared = owner in own.graph.by_name and owner not in own.blocks.kinds
        pairs = [
            (model.shared(owner),) if is_shared else model.kind(owner).decisions
            for model in (one, other)
        ]
        if len(pairs[0]) != len(pairs[1]):
            return None
        numbers = [
            _number_of(first.choices[choice].layouts, second, choice)
            for first, second, choice in zip(*pairs, choices, strict=True)
        ]
        if None in numbers:
            return None
        found[owner] = tuple(number for number in numbers if number is not None)
    return found


def _number_of(layouts: Mapping[str, NodeLayout], decision: Decision, near: int) -> int | None:
    """Return the number of the choice with ``layouts``, or None; ``near`` is tried first."""
    choices = decision.choices
    if near < len(choices) and choices[near].layouts == layouts:
        return near
    return next((at for at, each in enumerate(choices) if each.layouts == layouts), None)
