"""Schedules with replicas of stages (Chimera): the replicas' devices and additional costs.

In: a plan whose stages are listed once. Out: its stages with their replicas. In: the costs of these
stages. Out: the costs with an all-reduce of each stage's gradients over the pipeline ranks that
hold it, once per step, in ``gradient_sync``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.collectives.collectives import collective_seconds, group_of
from ..costs.seconds import Seconds
from ..errors import PlanError
from ..graph.graph import Graph
from ..plan import Plan, StagePlan
from ..schedules.schedules import parts_of_ranks
from ..stage.stage_cost import StageCost


def placed_stages(plan: Plan) -> tuple[StagePlan, ...]:
    """Return the plan's stages in the schedule's numbering, which includes replicas of stages.

    In Chimera with D stages, stage D + s replicates stage s on the devices of stage D - 1 - s.
    """
    if plan.schedule != "chimera" or len(plan.stages) == 1:
        return plan.stages
    up = zip(plan.stages, reversed(plan.stages), strict=True)
    return (*plan.stages, *(replace(part, devices=place.devices) for part, place in up))


def stages_of_ranks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return, for each pipeline rank, the numbers of the model's stages that it runs."""
    if plan.schedule == "chimera" and plan.has_pipeline:
        return parts_of_ranks(plan.schedule, len(plan.stages), 1)
    found: dict[frozenset[int], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        found.setdefault(frozenset(stage.devices), []).append(index)
    return tuple(map(tuple, found.values()))


def check_replicas(graph: Graph) -> None:
    """Raise PlanError AP547 if the graph has buffers that replicas would change independently."""
    changed = sorted(graph.updates)
    if changed:
        raise PlanError(
            "AP547",
            f"training changes buffers (such as {changed[0]}) of which each replica would have "
            "a copy",
            why="each replica of a stage sees only some of the micro-batches",
            where="schedule",
            fix="a schedule without stage replicas, such as 1f1b",
        )


def with_replica_sums(
    costs: Sequence[StageCost], schedule: str, cluster: Cluster, num_ranks: int
) -> tuple[StageCost, ...]:
    """Return the stages' costs with the sums of gradients between Chimera's two replicas of a
    stage; unchanged under other schedules.

    Each device sums its gradients with the corresponding device of the other pipeline rank.
    """
    if schedule != "chimera" or num_ranks == 1:
        return tuple(costs)
    devices = cluster.num_devices // num_ranks
    found = []
    for first, second in parts_of_ranks(schedule, num_ranks, 1):
        group = group_of(cluster, (first * devices, second * devices))
        cost = costs[first]
        seconds = collective_seconds("all_reduce", cost.memory_bytes["gradients"], group)
        # summed after the last backward, without overlap
        sums = Seconds(gradient_sync=seconds, sync_slowed=seconds)
        found.append(replace(cost, seconds=cost.seconds.plus(sums)))
    return tuple(found)
