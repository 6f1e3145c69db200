"""Simulated step of a pipeline, from the costs of its stages.

In: a schedule, the number of micro-batches, the cost of each stage. Out: the timeline of the step.
For a plan: its schedule, the actions of each rank and the messages between stages.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.simulator.actions import (
    INPUT_BACKWARD,
    RECV_FORWARD,
    SEND_FORWARD,
    Action,
    Edges,
    Schedule,
    chain,
    compute_only,
)
from ...cost_model.simulator.simulator import simulate, step_and_bubble
from ...cost_model.simulator.stage_costs import StageCosts
from ...cost_model.simulator.timeline import Timeline
from ..plan import Plan, StagePrediction
from ..schedules.messages import complete
from ..schedules.schedules import build_schedule
from ..stage.branches import WeightedEdges, reduce_edges
from ..stage.stage_cost import StageCost
from ..variants.slice_costs import SliceShares

_UNSIMULATED = frozenset(
    {
        "activation_bytes",
        "static_bytes",
        "forward_communication_seconds",
        "backward_communication_seconds",
        "forward_states_seconds",
        "backward_states_seconds",
        "forward_copies_seconds",
        "backward_copies_seconds",
    }
)
_SIMULATED = tuple(e.name for e in fields(StageCosts) if e.name not in _UNSIMULATED)
"""Fields that determine a step's time and bubble; other fields only add data to a timeline."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Schedule of a pipeline, by name, with the number of micro-batches and the dependences of
    stages.

    ``edges`` are (earlier stage, later stage, fraction of the bytes that the later stage receives);
    without them each stage depends on the stage before. ``slices``: sequence slices with their
    shares of time, if any.
    """

    schedule: str
    num_microbatches: int
    num_chunks: int = 1
    edges: WeightedEdges | None = None
    slices: SliceShares | None = None


class MessageSeconds(NamedTuple):
    """Seconds of a message besides the transfer of its bytes.

    ``latency`` passes before the first byte arrives, and delays no other message. ``call`` is the
    time that both the sending and the receiving host spend on it while their devices wait.
    """

    latency: float = 0.0
    call: float = 0.0


NO_SECONDS = MessageSeconds()


def simulate_stages(
    pipeline: Pipeline,
    costs: Sequence[StageCost],
    *,
    message: MessageSeconds = NO_SECONDS,
) -> Timeline:
    """Simulate a pipeline's step from the costs of its stages; return the timeline with all events.
    ``message``: fixed seconds of every message."""
    own = _own_costs(pipeline, costs, message)
    return simulate(pipeline_table(pipeline, len(costs)), own)


class Step(NamedTuple):
    """Seconds of a simulated step, and the fraction of them in which ranks wait (the bubble)."""

    seconds: float
    bubble_fraction: float


KnownSteps = dict[tuple[object, ...], Step]
"""Cache of simulated steps, keyed by all facts that determine them."""


def simulated_step(
    pipeline: Pipeline,
    costs: Sequence[StageCost],
    *,
    message: MessageSeconds = NO_SECONDS,
    known: KnownSteps | None = None,
) -> Step:
    """Simulate a pipeline's step from the costs of its stages; return only its seconds and bubble.
    ``message``: fixed seconds of every message.

    ``known`` caches the steps of earlier calls.
    """
    own = _own_costs(pipeline, costs, message)
    key = (
        pipeline.schedule,
        pipeline.num_microbatches,
        pipeline.num_chunks,
        pipeline.slices,
        *(_figures(getattr(own, name)) for name in _SIMULATED),
    )
    known = {} if known is None else known
    if key not in known:
        known[key] = Step(*step_and_bubble(pipeline_table(pipeline, len(costs)), own))
    return known[key]


def _figures(values: Sequence[object] | None) -> object:
    return None if values is None else tuple(values)


def _own_costs(
    pipeline: Pipeline, costs: Sequence[StageCost], message: MessageSeconds
) -> StageCosts:
    """Return the simulator's input for these stages; a chain of stages gets no edges."""
    edges, slices = pipeline.edges, pipeline.slices
    if edges is not None and _pairs(edges) == chain(len(costs)):
        edges = None
    own = stage_costs(costs, edges, message=message)
    if slices is None:
        return own
    return replace(own, slice_forward_shares=slices.forward, slice_backward_shares=slices.backward)


def pipeline_table(pipeline: Pipeline, num_stages: int) -> Schedule:
    """Return the action table of a pipeline of ``num_stages`` stages (Chimera: per direction)."""
    number, chunks, slices = pipeline.num_microbatches, pipeline.num_chunks, pipeline.slices
    edges = None if pipeline.edges is None else _pairs(pipeline.edges)
    if slices is None and edges in (None, chain(num_stages)):
        return known_schedule(pipeline.schedule, num_stages, number, chunks)
    return build_schedule(
        pipeline.schedule,
        num_stages,
        number,
        num_chunks=chunks,
        edges=edges,
        slices=slices.lengths if slices is not None else (),
    )


def _pairs(edges: WeightedEdges) -> Edges:
    return tuple((source, target) for source, target, _ in edges)


@lru_cache(maxsize=16)
def known_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return the schedule of a chain of stages; cached, as it does not depend on costs."""
    return build_schedule(name, num_stages, num_microbatches, num_chunks=num_chunks)


def message_seconds(cluster: Cluster) -> MessageSeconds:
    """Return the fixed seconds of a message between devices of the cluster, with the least latency
    of its links."""
    links = [host.link for host in cluster.hosts if host.num_devices > 1]
    links += [host.detour for host in cluster.hosts if host.detour is not None]
    links += [cluster.inter_link] if len(cluster.hosts) > 1 else []
    latency = min((link.base_seconds + link.alpha_seconds for link in links), default=0.0)
    return MessageSeconds(latency, max(host.device.message_seconds for host in cluster.hosts))


def send_seconds(costs: Sequence[StageCost], edges: WeightedEdges | None = None) -> list[float]:
    """Return, by stage, the seconds of sending a micro-batch's activations to later stages."""
    found = [0.0] * len(costs)
    chained = [(target - 1, target, 1.0) for target in range(1, len(costs))]
    for source, target, share in chained if edges is None else edges:
        found[source] += share * costs[target].receive_seconds[0]
    return found


def stage_costs(
    costs: Sequence[StageCost],
    edges: WeightedEdges | None = None,
    *,
    message: MessageSeconds = NO_SECONDS,
) -> StageCosts:
    """Convert the costs of stages to the simulator's input. ``edges``: dependences of stages, None
    for a chain; ``message``: fixed seconds of every message."""
    received = [(target, 1.0) for target in range(1, len(costs))]
    if edges is not None:
        received = [(target, share) for _, target, share in edges]
    receives = [
        tuple(seconds * share for seconds in costs[target].receive_seconds)
        for target, share in received
    ]
    own = [cost.seconds for cost in costs]
    late = [cost.late_seconds for cost in costs if cost.late_seconds is not None]
    return StageCosts(
        forward_seconds=[cost.forward_seconds for cost in costs],
        backward_seconds=[cost.backward_seconds for cost in costs],
        send_seconds=[forward for forward, _ in receives],
        send_backward_seconds=[backward for _, backward in receives],
        gather_seconds=[each.parameter_gather for each in own],
        gradient_sync_seconds=[each.gradient_sync for each in own],
        forward_states_seconds=[each.forward_states for each in own],
        backward_states_seconds=[each.backward_states for each in own],
        forward_copies_seconds=[e.seconds.forward_copies + e.host_copies for e in costs],
        backward_copies_seconds=[e.seconds.backward_copies + e.host_copies for e in costs],
        slowed_share=[cost.slowed_share for cost in costs],
        buckets=[cost.buckets for cost in costs],
        step_seconds=[each.optimizer for each in own],
        activation_bytes=[int(cost.activation_bytes) for cost in costs],
        forward_communication_seconds=[
            cost.seconds.forward_communication + cost.exposed_states[0] for cost in costs
        ],
        backward_communication_seconds=[
            cost.seconds.backward_communication + cost.exposed_states[1] for cost in costs
        ],
        weight_backward_seconds=late if len(late) == len(costs) else (),
        edges=None if edges is None else _pairs(edges),
        send_latency_seconds=(message.latency,) * len(received),
        send_call_seconds=(message.call,) * len(received),
        receive_call_seconds=(message.call,) * len(received),
    )


def prediction_of(cost: StageCost, send_seconds: float) -> StagePrediction:
    """Convert a stage's cost to the prediction in a plan. ``send_seconds``: seconds of sending a
    micro-batch's activations to later stages."""
    own = cost.seconds
    exposed = sum(cost.exposed_states)
    late = {} if cost.late_seconds is None else {"weight_gradients": cost.late_seconds}
    beside = {"hidden_exchanges": cost.hidden_exchanges} if cost.hidden_exchanges else {}
    if cost.offloaded_bytes:
        beside |= {"host_copies": cost.host_copies, "exposed_copies": cost.exposed_copies}
    if own.backward_copies:
        beside |= {"state_copies": own.forward_copies + own.backward_copies}
    return StagePrediction(
        seconds={
            "forward": cost.forward_seconds,
            "backward": cost.backward_seconds,
            "compute": sum(cost.compute_seconds),
            "communication": own.forward_communication + own.backward_communication + exposed,
            "states": own.forward_states + own.backward_states,
            "hidden_states": max(0.0, own.forward_states + own.backward_states - exposed),
            "parameter_gather": own.parameter_gather,
            "gradient_sync": own.gradient_sync,
            "slowed_share": cost.slowed_share,
            "exposed_sync": cost.step_seconds - own.optimizer,
            "optimizer": own.optimizer,
            "send": send_seconds,
            "receive": sum(cost.receive_seconds),
            **late,
            **beside,
        },
        memory_bytes={name: round(value) for name, value in cost.memory_bytes.items()},
        host_bytes=round(cost.offloaded_bytes),
    )


def schedule_of(plan: Plan, crossing: Set[tuple[int, int]]) -> Schedule:
    """Build the plan's schedule. ``crossing``: (earlier stage, later stage) pairs where a value
    computed in the earlier stage is read in the later.

    If a value skips stages, and no neighbouring stages connect their ranks, each pair has messages
    of its own.
    """
    num_stages = len(plan.stages)
    schedule = build_schedule(
        plan.schedule,
        num_stages,
        plan.num_microbatches,
        num_chunks=plan.num_chunks,
        edges=reduce_edges(set(crossing), num_stages),
        slices=plan.slices,
    )
    if _carries(schedule, crossing):
        return schedule
    edges = tuple(sorted(crossing))
    orders = tuple(compute_only(row) for row in schedule.table)
    return replace(schedule, table=complete(orders, edges=edges)[1], edges=edges)


def splits_backward(schedule: Schedule, stage: int) -> bool:
    """Return whether a stage computes input gradients and weight gradients in separate actions."""
    row = schedule.table[schedule.stage_rank[stage]]
    return any(action.kind == INPUT_BACKWARD and action.stage == stage for action in row)


def updating_plan(plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan of a single weight update, a part of the step if the schedule is
    asynchronous. Sums over micro-batches (``Graph.accumulation``) then cover one update only."""
    count = schedule.per_update
    model = replace(plan.model, global_batch=plan.microbatch_size * count)
    return replace(plan, num_microbatches=count, model=model)


def _carries(schedule: Schedule, crossing: Set[tuple[int, int]]) -> bool:
    """Return whether the schedule sends and receives every value that passes between ranks."""
    ranks = schedule.stage_rank
    known = {action for row in schedule.table for action in row if action.microbatch == 0}
    return all(
        Action(SEND_FORWARD, source, 0) in known and Action(RECV_FORWARD, target, 0) in known
        for source, target in crossing
        if ranks[source] != ranks[target]
    )
