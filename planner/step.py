"""The step of a pipeline: from each stage's cost to a simulated timeline.

In: a schedule, how many micro-batches, what each stage costs. Out: the timeline.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost_model.simulator import simulate
from ..cost_model.stage_costs import Overlap, StageCosts
from ..cost_model.timeline import Timeline
from .schedules import build_schedule
from .stage_cost import StageCost


def simulate_stages(
    schedule: str,
    num_microbatches: int,
    costs: Sequence[StageCost],
    *,
    overlap: Overlap | None = None,
    gradient_buckets: Sequence[int] = (),
    num_chunks: int = 1,
) -> Timeline:
    """The step of a pipeline of these stages.

    With an ``overlap`` gradients are summed beside the last backward, in ``gradient_buckets``
    parts per stage (its blocks), and slow it down; without one they are summed after it.
    """
    return simulate(
        build_schedule(schedule, len(costs), num_microbatches, num_chunks=num_chunks),
        stage_costs(costs, gradient_buckets),
        overlap=overlap,
    )


def stage_costs(costs: Sequence[StageCost], gradient_buckets: Sequence[int] = ()) -> StageCosts:
    """What the simulator asks of stages that were priced.

    ``gradient_sync`` holds the gathering of ZeRO 1 and 2 too: it is taken with the gradients.
    """
    receives = [cost.receive_seconds for cost in costs]
    own = [cost.seconds for cost in costs]
    return StageCosts(
        forward_seconds=[cost.forward_seconds for cost in costs],
        backward_seconds=[cost.backward_seconds for cost in costs],
        send_seconds=[forward for forward, _ in receives[1:]],
        send_backward_seconds=[backward for _, backward in receives[1:]],
        gradient_sync_seconds=[each.gradient_sync for each in own],
        step_seconds=[each.optimizer for each in own],
        gradient_buckets=gradient_buckets,
        activation_bytes=[int(cost.activation_bytes) for cost in costs],
        forward_communication_seconds=[e.forward_communication + e.forward_states for e in own],
        backward_communication_seconds=[e.backward_communication + e.backward_states for e in own],
    )
