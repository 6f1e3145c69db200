"""Candidates with several stages (chunks) per pipeline rank: interleaved, BFS, ZB-V, DualPipeV.

In: pipelines of one stage per rank with equal ranks. Out: candidates with the layouts and ZeRO
stages of such a pipeline, whose blocks are cut into more stages, placed by the schedule. Cuts
balance the FLOPs of all stages, or of all ranks. Every stage is priced with the tables that solved
the pipeline, and blocks are recomputed only if a rank's stages would not fit (``rank_memory``).

Options are ordered by a lower bound of the step, the work of the busiest rank,

    T >= F before it + N (F + B) of its chunks + B behind it + the end of the step,

where "before" are the forwards and messages that the first micro-batch passes before the rank's
first stage, and "behind" the backwards and messages that the last micro-batch passes from that
stage on. A schedule that defers weight gradients may compute them meanwhile: then T is at least the
bound without B behind it, and at least the bound with B less these gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import itemgetter

from ..errors import UsageError
from ..graph.layout import Mesh
from ..inter_op.inter_op import Pipeline, total_seconds
from ..intra_op.intra_op import StageAnswer
from ..requests.options import microbatch_rows
from ..requests.request import MOST_CHUNKS
from ..schedules.held import most_held, splits, stage_half_pairs
from ..schedules.schedules import can_have, find_schedule, parts_of_ranks
from ..search.branch_and_bound import PipelineProposal
from ..search.candidates import (
    Candidate,
    Chosen,
    build_simulated,
    candidate,
    edges,
    models_of,
    reindex_solution,
)
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..stage.branches import stage_depths
from ..stage.recompute_policy import NO_RECOMPUTE, RecomputePolicy
from ..stage.stage_cost import TRANSIENT, StageCost, StageTable, combine_bytes
from ..stage.stage_model import StageModel
from ..stage.stage_problem import Solution, StageProblem
from .balanced import balanced, block_flops, rebalance
from .rank_memory import RankStage, recomputed_to_fit

MOST_ACTIONS = 16_384
"""Maximum number of stages times micro-batches of a pipeline to try."""

NUM_CHUNKS = (2, 3, 4, 6, MOST_CHUNKS)
FEW_CHUNKS, MOST_STAGES = 4, 128
"""Numbers of stages per rank to try; more than ``FEW_CHUNKS`` only up to ``MOST_STAGES`` stages, as
the time to price and simulate a pipeline grows with its stages."""

MOST_SIMULATED = 12
"""Maximum number of cuts per schedule that are simulated."""

ROUNDING = 1e-9
"""Relative excess of a bound over a simulated step that rounding explains."""


def interleaved(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield candidates with several stages per rank, made from the pool's pipelines, the most
    promising first."""
    if not context.request.chunked_schedules:
        return
    for bases in groups_of_bases(context, pool):
        is_found = False
        for found in _of_bases(context, pool, bases):
            is_found = True
            yield found
        if is_found:
            return


def _of_bases(
    context: SearchContext, pool: CandidatePool, bases: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield the candidates made from the pipelines ``bases``, in order of their lower bounds."""
    bounded = sorted(
        (
            (option.least_seconds(), number, option)
            for number, option in enumerate(_options(context, bases))
        ),
        key=itemgetter(0),
    )
    simulated_of: dict[str, int] = {}
    for least, _, option in bounded:
        if least >= pool.bar:
            return
        tried = simulated_of.get(option.schedule, 0)
        if tried < MOST_SIMULATED:
            simulated_of[option.schedule] = tried + 1
            candidate = option.candidate()
            if candidate is not None:
                yield candidate


def _options(context: SearchContext, bases: Sequence[Candidate]) -> Iterator[Interleaving]:
    """Yield every cut of the pipelines under every allowed schedule, unless too large."""
    request, flops = (
        context.request,
        block_flops(context.structure.graph, context.structure.blocks, context.rules),
    )
    chunk_numbers = tuple(sorted({*NUM_CHUNKS, max(2, request.forced.least_chunks)}))
    if request.forced.chunks is not None:
        chunk_numbers = (request.forced.chunks,)
    starts: dict[int, tuple[int, ...]] = {}
    for base in bases:
        ranks, count, pricing = len(base.stages), base.num_microbatches, ChunkPricing(context, base)
        for schedule in request.chunked_schedules:
            low, high = find_schedule(schedule).chunks
            for chunks in chunk_numbers:
                number = ranks * chunks
                is_few = chunks <= FEW_CHUNKS or number <= MOST_STAGES
                is_few &= number * count <= MOST_ACTIONS
                is_possible = low <= chunks <= high and number <= len(flops)
                if not is_possible or not (is_few or len(chunk_numbers) == 1):
                    continue
                if not can_have(schedule, number, count, chunks):
                    continue
                even = starts.setdefault(number, balanced(flops, number))
                by_rank = rebalance(flops, even, parts_of_ranks(schedule, ranks, chunks))
                for cuts in dict.fromkeys((even, by_rank)):
                    option = Interleaving(context, base, pricing, schedule, chunks, cuts)
                    if option.is_priced and context.begins_as_asked(option.stages):
                        yield option


@dataclass
class ChunkPricing:
    """Prices of any runs of blocks as stages on a pipeline's ranks, with the pipeline's layouts.

    A kind of block has the layouts of the first stage that contains it: with one stage per rank
    this has the most micro-batches in flight, and with chunks all ranks hold about as many.
    """

    context: SearchContext
    base: Candidate
    layouts: dict[str, tuple[StageModel, tuple[int, ...]]] = field(init=False)
    _tables: dict[tuple[int, int], StageTable | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layouts = {
            owner: (model, choices)
            for model, answer in reversed(self.base.answers)
            for owner, choices in answer.solution.items()
        }

    def model(self, rank: int, before: int) -> StageModel:
        """Return the model of a rank's mesh, which receives values from rank ``before``."""
        base = self.base
        stage, source = base.stages[rank], base.stages[before]
        link = None
        if before != rank - 1:
            link = self.context.cluster.send_link(source.devices, stage.devices)
        solvers, mesh = self.context.solvers, base.answers[rank][0].prices.mesh
        return solvers.on_mesh(base.rows, mesh, stage.first_device, link=link).model

    def stage(self, rank: int, before: int, start: int, stop: int) -> RankStage | None:
        """Return a rank's stage without recomputation; None if the layouts do not cover it."""
        model, base = self.model(rank, before), self.base
        run = self.context.tables.at(base.rows).run(start, stop)
        key = id(model), run.family
        if key not in self._tables:
            problem = StageProblem(model, run)
            solution = self._solution(model, problem)
            table = None
            if solution is not None:
                table = StageTable(problem, problem.choices(solution))
            self._tables[key] = table
        known, zero = self._tables[key], base.answers[rank][1].setting.zero
        if known is None:
            return None
        return RankStage(known, run, zero, ((1, 0),), base.num_microbatches, splits=False)

    def _solution(self, model: StageModel, problem: StageProblem) -> Solution | None:
        found: dict[str, tuple[int, ...]] = {}
        for owner in problem.start:
            if owner not in self.layouts:
                return None
            source, choices = self.layouts[owner]
            own = reindex_solution(source, model, {owner: choices})
            if own is None:
                return None
            found.update(own)
        return found


class Interleaving:
    """A pipeline cut further, into several stages per rank, which begin at the blocks ``starts``: a
    candidate before its simulation."""

    def __init__(
        self,
        context: SearchContext,
        base: Candidate,
        pricing: ChunkPricing,
        schedule: str,
        chunks: int,
        starts: tuple[int, ...],
    ) -> None:
        self.context, self.base, self.schedule, self.chunks = context, base, schedule, chunks
        self.parts = parts_of_ranks(schedule, len(base.stages), chunks)
        rank_of = {stage: rank for rank, stages in enumerate(self.parts) for stage in stages}
        self.ranks = [rank_of[stage] for stage in range(len(starts))]
        ends = tuple(pairwise((*starts, len(context.structure.blocks.blocks))))
        self.stages = tuple(
            replace(base.stages[rank], start=start, stop=stop)
            for rank, (start, stop) in zip(self.ranks, ends, strict=True)
        )
        before = [self.ranks[0] - 1, *self.ranks]
        priced = [
            pricing.stage(rank, source, start, stop)
            for rank, source, (start, stop) in zip(self.ranks, before, ends, strict=False)
        ]
        self.priced = [stage for stage in priced if stage is not None]

    @property
    def is_priced(self) -> bool:
        """Return whether every stage has a price: the pipeline's layouts cover it."""
        return len(self.priced) == len(self.stages)

    def least_seconds(self) -> float:
        """Return a lower bound of the step time without recomputation."""
        count = self.base.num_microbatches
        costs = [stage.cost(NO_RECOMPUTE) for stage in self.priced]
        late = [0.0] * len(costs)
        if splits(self.schedule):
            late = [stage.table.weight_grads(stage.run)[0] for stage in self.priced]
        before = self._waits([c.forward_seconds for c in costs], costs, 0)
        backwards = [c.backward_seconds - own for c, own in zip(costs, late, strict=True)]
        behind = self._waits(backwards, costs, 1)
        # gradients of one stage are summed beside the backward of another
        steps = [sum(costs[stage].seconds.optimizer for stage in stages) for stages in self.parts]
        ends = []
        for step, stages in zip(steps, self.parts, strict=True):
            first = min(stages)
            work = count * sum(
                costs[stage].forward_seconds + costs[stage].backward_seconds for stage in stages
            )
            ends.append(before[first] + work + step)
            work -= count * sum(late[stage] for stage in stages)
            ends.append(before[first] + work + behind[first] + steps[self.ranks[0]])
        return max(ends) * (1 - ROUNDING)

    def _waits(
        self, seconds: Sequence[float], costs: Sequence[StageCost], direction: int
    ) -> list[float]:
        """Return, by stage, the summed seconds of all stages before it and of the messages between
        ranks."""
        received = [cost.receive_seconds[direction] for cost in costs[1:]]
        moves = [
            seconds if rank != other else 0.0
            for seconds, (rank, other) in zip(received, pairwise(self.ranks), strict=True)
        ]
        pairs = zip(seconds, moves, strict=False)
        return list(accumulate((own + move for own, move in pairs), initial=0.0))

    def candidate(self) -> Candidate | None:
        """Return the simulated candidate, with blocks recomputed if ranks would not fit otherwise;
        None if the schedule cannot run its stages."""
        context, base = self.context, self.base
        if edges(context, base.rows, self.stages) is not None:
            return None
        number, count = len(self.stages), base.num_microbatches
        held = stage_half_pairs(self.schedule, number, count, self.chunks)
        is_split = splits(self.schedule)
        stages = [
            replace(stage, held=own, splits=is_split)
            for stage, own in zip(self.priced, held, strict=True)
        ]
        fitted: dict[object, tuple[tuple[RecomputePolicy, ...], int]] = {}
        answers: dict[int, tuple[StageModel, StageAnswer]] = {}
        for rank, members in enumerate(self.parts):
            own = [stages[member] for member in members]
            limit = context.limits_on(base.stages[rank].devices).memory_bytes
            key = (limit, *((id(s.table), s.run.key, s.zero, s.held) for s in own))
            if key not in fitted:
                fitted[key] = self._fitted(own, limit)
            policies, zero = fitted[key]
            gap = base.answers[rank][1].gap
            for member, stage, policy in zip(members, own, policies, strict=True):
                answers[member] = _answered(replace(stage, zero=zero), policy, gap)
        try:
            return build_simulated(
                context,
                base.rows,
                self.schedule,
                self.stages,
                [answers[member] for member in range(number)],
                num_chunks=self.chunks,
                base=base,
            )
        except UsageError:
            return None

    def _fitted(
        self, stages: list[RankStage], limit: float
    ) -> tuple[tuple[RecomputePolicy, ...], int]:
        """Return the recomputation policies of a rank's stages, and their choice of ZeRO: the
        pipeline's, or a choice that shards more if they do not fit."""
        request = self.context.request
        zero, prices = stages[0].zero, stages[0].table.problem.model.prices
        found: tuple[tuple[RecomputePolicy, ...], int] | None = None
        for number in prices.sharding_more(zero, request.zeros):
            own = [replace(stage, zero=number) for stage in stages]
            policies = recomputed_to_fit(own, limit, request.recomputations)
            if found is None or number == zero:
                found = policies, number
            if fits(own, policies, limit):
                return policies, number
        assert found is not None, "there is one choice at least"
        return found


def fits(
    stages: Sequence[RankStage], policies: Sequence[RecomputePolicy], limit_bytes: float
) -> bool:
    """Return whether the stages of a rank fit in memory together."""
    costs = [stage.cost(policy) for stage, policy in zip(stages, policies, strict=True)]
    total = sum(combine_bytes([cost.memory_bytes for cost in costs], once=TRANSIENT).values())
    return total <= limit_bytes


def _answered(
    stage: RankStage, policy: RecomputePolicy, gap: float
) -> tuple[StageModel, StageAnswer]:
    """Return (model of the mesh, solution) of a stage under a recomputation policy."""
    table, setting = stage.table, stage.setting(policy)
    solution = table.problem.solution(table.choices)
    objective = stage.cost(policy).objective(stage.num_microbatches)
    answer = StageAnswer(stage.run, table, solution, setting, objective, gap)
    return table.model, answer


MOST_BASES = 4
"""Maximum number of pipelines that serve as bases of other candidates."""


def groups_of_bases(context: SearchContext, pool: CandidatePool) -> Iterator[list[Candidate]]:
    """Yield the bases: pipelines to be cut further or replicated. If plans of one stage per rank
    are not allowed and the caller, who found no candidate, continues, yield further bases."""
    bases = alike_pipelines(context, pool)
    yield bases
    if not context.request.allows_one_stage:
        of_one_mesh = list(with_one_mesh(context, pool))
        yield of_one_mesh
        yield list(at_other_sizes(context, bases or of_one_mesh))


def alike_pipelines(context: SearchContext, pool: CandidatePool) -> list[Candidate]:
    """Return the pool's best pipelines with equal ranks, by micro-batch size, length and mesh."""
    below = pool.step_seconds if context.request.allows_one_stage else float("inf")
    by_kind: dict[object, tuple[float, int, Candidate]] = {}
    for number, each in enumerate(pool.ranked()):
        if not each.is_pipeline or not is_alike(context, each):
            continue
        busiest = max(cost.forward_seconds + cost.backward_seconds for cost in each.costs)
        work = each.num_microbatches * busiest
        kind = each.rows, len(each.stages), each.answers[0][0].prices.mesh
        if work < below:
            by_kind.setdefault(kind, (work, number, each))
    ordered = sorted(by_kind.values(), key=lambda entry: entry[:2])
    return [each for *_, each in ordered[:MOST_BASES]]


def is_alike(context: SearchContext, made: Candidate) -> bool:
    """Return whether all stages of a candidate are on one mesh and form a chain."""
    meshes = {model.prices.mesh for model, _ in made.answers}
    return len(meshes) == 1 and edges(context, made.rows, made.stages) is None


def with_one_mesh(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield the pool's pipelines of equally large stages, solved again with one mesh for all."""
    seen: set[object] = set()
    for each in pool.ranked():
        sizes = {stage.num_devices for stage in each.stages}
        if not each.is_pipeline or len(sizes) > 1:
            continue
        for mesh in dict.fromkeys(model.prices.mesh for model, _ in each.answers):
            key = each.rows, each.stages, mesh
            if key not in seen:
                seen.add(key)
                made = _on_mesh(context, each, mesh)
                if made is not None and is_alike(context, made):
                    yield made


def _on_mesh(context: SearchContext, pipeline: Candidate, mesh: Mesh) -> Candidate | None:
    """Solve a pipeline again with each stage on ``mesh``.

    Return None if a stage does not fit in memory.
    """
    chosen: list[Chosen] = []
    number = len(pipeline.stages)
    for stage, depth in zip(pipeline.stages, stage_depths(None, number), strict=True):
        solver = context.solvers.on_mesh(pipeline.rows, mesh, stage.first_device)
        held = context.held(context.in_flight_schedule, number, pipeline.rows, depth)
        run = context.tables.at(pipeline.rows).run(stage.start, stage.stop)
        answer = solver.best(run, pipeline.num_microbatches, most_held(held))
        if answer is None:
            return None
        chosen.append((solver, answer))
    schedule, stages = context.in_flight_schedule, pipeline.stages
    return build_simulated(context, pipeline.rows, schedule, stages, models_of(chosen))


def at_other_sizes(context: SearchContext, bases: list[Candidate]) -> Iterator[Candidate]:
    """Yield the pipelines ``bases`` at other micro-batch sizes, more micro-batches first."""
    every = set(microbatch_rows(context.structure.graph, context.request, context.cluster))
    for base in bases:
        for rows in sorted(every - {base.rows}, key=lambda rows: (rows > base.rows, -rows)):
            made = candidate(context, PipelineProposal(rows, Pipeline(base.stages, _seconds(base))))
            if made is not None and not is_alike(context, made):
                made = _on_mesh(context, made, base.answers[0][0].prices.mesh)
            if made is not None:
                yield made


def _seconds(base: Candidate) -> float:
    """Return the estimated step time T of the pipeline ``base``."""
    return total_seconds([cost.warmup_and_steady(base.num_microbatches) for cost in base.costs])
