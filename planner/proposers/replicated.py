"""Candidates under Chimera: every stage has a replica in a second, opposite pipeline.

In: pipelines with an even number of equal ranks. Out: candidates in which stage ``s`` is on its own
devices and on the devices of stage ``pp - 1 - s``, with the layouts and ZeRO stages of the
pipeline. Blocks are recomputed only if the two stages of a rank would not fit (``rank_memory``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...cost_model.simulator.actions import FORWARD
from ..errors import PlanError
from ..evaluate.step import Pipeline, message_seconds, simulate_stages
from ..intra_op.intra_op import StageAnswer
from ..schedules.schedules import can_have, compute_orders
from ..search.candidates import Candidate
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..stage.recompute_policy import RecomputePolicy
from ..stage.stage_cost import TRANSIENT, StageCost
from ..stage.stage_model import StageModel
from ..variants.replicas import check_replicas, with_replica_sums
from .interleaved import groups_of_bases
from .rank_memory import RankStage, recomputed_to_fit

SCHEDULE = "chimera"


def replicated(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield candidates of the pool's pipelines under Chimera.

    Raises PlanError AP547 if Chimera is forced for a model whose forwards change buffers.
    """
    if SCHEDULE not in context.request.arranged_schedules:
        return
    try:
        check_replicas(context.structure.graph)
    except PlanError:
        if context.request.forced.schedule == SCHEDULE:
            raise
        return
    for bases in groups_of_bases(context, pool):
        is_found = False
        for base in bases:
            count = base.num_microbatches
            if can_have(SCHEDULE, len(base.stages), count, 1) and _least(context, base) < pool.bar:
                is_found = True
                yield _with_replicas(context, base)
        if is_found:
            return


def _least(context: SearchContext, base: Candidate) -> float:
    """Return a lower bound of the step time: two ranks share the work of two stages equally."""
    costs = with_replica_sums(base.costs, SCHEDULE, context.cluster, len(base.stages))
    work = [
        base.num_microbatches * (cost.forward_seconds + cost.backward_seconds) / 2
        + cost.seconds.optimizer / 2
        for cost in costs
    ]
    return max(map(sum, zip(work, reversed(work), strict=True)))


def _with_replicas(context: SearchContext, base: Candidate) -> Candidate:
    """Return the candidate of a pipeline under Chimera, simulated."""
    ranks, count = len(base.stages), base.num_microbatches
    answers = list(base.answers)
    held = _held(ranks, count)
    for rank in range(ranks // 2):
        pair = (rank, ranks - 1 - rank)
        stages = [
            RankStage(
                base.answers[part][1].table,
                base.answers[part][1].run,
                base.answers[part][1].setting.zero,
                ((held[part], 0),),
                count,
                splits=False,
            )
            for part in pair
        ]
        limit = min(context.limits_on(base.stages[part].devices).memory_bytes for part in pair)
        policies = recomputed_to_fit(stages, limit, context.request.recomputations)
        for part, policy in zip(pair, policies, strict=True):
            answers[part] = _recomputed(context, base, part, policy)
    costs = with_replica_sums(
        [answer.cost for _, answer in answers], SCHEDULE, context.cluster, ranks
    )
    timeline = simulate_stages(
        Pipeline(SCHEDULE, count), costs, message=message_seconds(context.cluster)
    )
    sizes = _rank_bytes(costs, timeline.peak_activation_bytes)
    limits = [context.limits_on(stage.devices).memory_bytes for stage in base.stages]
    return replace(
        base,
        schedule=SCHEDULE,
        answers=tuple(answers),
        costs=tuple(costs),
        base=base,
        step_seconds=timeline.step_seconds,
        bubble_fraction=timeline.bubble_fraction,
        peak_bytes=max(sizes),
        is_complete=True,
        fits=all(size <= limit for size, limit in zip(sizes, limits, strict=True)),
    )


def _recomputed(
    context: SearchContext, base: Candidate, part: int, policy: RecomputePolicy
) -> tuple[StageModel, StageAnswer]:
    """Return (model of the mesh, solution) of a stage under a recomputation policy."""
    model, answer = base.answers[part]
    ranks = len(base.stages)
    held = context.held(SCHEDULE, ranks, base.rows, ranks - part)
    setting = replace(answer.setting, policy=policy, in_flight=held[0][0], halves=())
    return model, replace(answer, setting=setting)


def _held(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return, for each stage, the most micro-batches in flight on either of its two ranks."""
    found = [0] * num_ranks
    for row in compute_orders(SCHEDULE, num_ranks, num_microbatches):
        held: dict[int, int] = {}
        for action in row:
            held[action.stage] = held.get(action.stage, 0) + (1 if action.kind == FORWARD else -1)
            part = action.stage % num_ranks
            found[part] = max(found[part], held[action.stage])
    return found


def _rank_bytes(costs: Sequence[StageCost], activation_bytes: Sequence[int]) -> list[float]:
    """Return the bytes per device of each rank with its two stages and simulated activations."""

    def lasting(cost: StageCost) -> float:
        return sum(
            size
            for name, size in cost.memory_bytes.items()
            if name not in (*TRANSIENT, "activations")
        )

    def brief(cost: StageCost) -> float:
        return sum(cost.memory_bytes.get(name, 0.0) for name in TRANSIENT)

    return [
        lasting(one) + lasting(other) + max(brief(one), brief(other)) + held
        for one, other, held in zip(costs, reversed(costs), activation_bytes, strict=True)
    ]
