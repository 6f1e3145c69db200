"""The simulated step of pipelines whose stages' figures are given."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.cost_model.simulator.actions import chain
from autoparallel.cost_model.simulator.simulator import step_seconds
from autoparallel.cost_model.simulator.stage_costs import StageCosts
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.planner.stage.branches import WeightedEdges


def simulate_figures(
    schedule: str,
    num_microbatches: int,
    figures: Sequence[Sequence[float]],
    *,
    edges: WeightedEdges | None = None,
) -> float:
    """The step's seconds from five figures of each stage: forward, backward, receive forward,
    receive backward, end of the step. Of a split backward the second is its first half, and a
    sixth figure is the weights'."""
    forward, backward, receive, receive_backward, end, *late = zip(*figures, strict=True)
    weights = late[0] if late else ()
    if late:
        backward = tuple(i + w for i, w in zip(backward, weights, strict=True))
    received = [(target, 1.0) for target in range(1, len(figures))]
    if edges is not None:
        received = [(target, share) for _, target, share in edges]
    pairs = None if edges is None else tuple((source, target) for source, target, _ in edges)
    if pairs == chain(len(figures)):
        pairs = None
    costs = StageCosts(
        forward,
        backward,
        send_seconds=[share * receive[target] for target, share in received],
        send_backward_seconds=[share * receive_backward[target] for target, share in received],
        step_seconds=end,
        weight_backward_seconds=weights,
        edges=pairs,
        send_latency_seconds=(0.0,) * len(received),
    )
    table = build_schedule(schedule, len(figures), num_microbatches, edges=pairs)
    return float(step_seconds(table, costs))
