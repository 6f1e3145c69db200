"""What schedules with replicas of stages cost beyond the stages themselves.

In: the costs of the parts of the model. Out: the same with the sum of each part's gradients
over the pipeline ranks that hold it, once per step, in ``gradient_sync``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cost_model.cluster import Cluster
from ..cost_model.collectives import collective_seconds, group_of
from .schedules import parts_of_ranks
from .stage_cost import StageCost


def with_replica_sums(
    costs: Sequence[StageCost], schedule: str, cluster: Cluster, num_ranks: int
) -> tuple[StageCost, ...]:
    """The costs as they are, but for Chimera, whose parts are each on two pipeline ranks.

    Each device sums its gradients with the device of the same place in the other rank.
    """
    if schedule != "chimera" or num_ranks == 1:
        return tuple(costs)
    devices = cluster.num_devices // num_ranks
    found = []
    for first, second in parts_of_ranks(schedule, num_ranks, 1):
        group = group_of(cluster, (first * devices, second * devices))
        cost = costs[first]
        seconds = collective_seconds("all_reduce", cost.memory_bytes["gradients"], group)
        gradient_sync = cost.seconds.gradient_sync + seconds
        found.append(replace(cost, seconds=cost.seconds._replace(gradient_sync=gradient_sync)))
    return tuple(found)
