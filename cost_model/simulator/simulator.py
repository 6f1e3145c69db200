"""Discrete-event simulation of a schedule: when each rank computes, waits and sends.

In: an action table and the seconds and bytes of each stage. Out: a timeline: the length of
the step, the bubble, the exposed communication and the memory of each pipeline rank.

Stages form a chain or, with the schedule's ``edges``, any directed acyclic graph: a stage
waits for the messages of all that it needs, and stages that do not need each other run at the
same time.

A rank has one compute stream that runs its compute actions in order, and the calls that send a
message or post a receive. A message is ready when its send is called and its receive is posted; a
rank's messages share its two ports (see ``link_contention``). Gradient sums and parameter gathers
stop a rank, or run beside its compute, which they slow down (see ``overlap``).

With no communication, GPipe and 1F1B of D equal stages and N micro-batches have the bubble
(D-1)/(D-1+N), and interleaved 1F1B of K chunks per rank (D-1)/(D-1+KN) (Narayanan et al.
2021, arXiv:2104.04473, section 2.2). Seconds may be any numbers: with ``fractions.Fraction``
every time is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Schedule
from .simulation import Simulation
from .stage_costs import StageCosts, of_replicas
from .timeline import Timeline

__all__ = ["StageCosts", "Timeline", "simulate", "step_and_bubble", "step_seconds"]


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    *,
    replicas: Sequence[int] = (),
) -> Timeline:
    """Simulate one training step of a pipeline schedule; return its timeline. ``replicas``: number
    of devices that each pipeline rank represents, by default 1. Raises ValueError if the schedule
    deadlocks or does not match the costs.

    >>> from autoparallel.cost_model.simulator.actions import parse_table
    >>> table = parse_table("0F0 0SEND_F0 0RECV_B0 0B0\\n1RECV_F0 1F0 1B0 1SEND_B0")
    >>> costs = StageCosts((1.0, 1.0), (2.0, 2.0), send_seconds=(0.5,))
    >>> simulate(Schedule("example", 1, (0, 1), table), costs).step_seconds
    7.0
    """
    if len(replicas) not in (0, schedule.num_ranks):
        raise ValueError(f"replicas of {len(replicas)} ranks for {schedule.num_ranks}")
    costs = _checked(schedule, costs)
    return Simulation(schedule, costs).timeline(tuple(replicas))


def step_seconds(schedule: Schedule, costs: StageCosts) -> float:
    """Return the seconds of one training step as ``simulate`` does, but without a timeline."""
    costs = _checked(schedule, costs)
    return Simulation(schedule, costs, records=False).step_seconds()


def step_and_bubble(schedule: Schedule, costs: StageCosts) -> tuple[float, float]:
    """Return the seconds of one training step and its bubble fraction (the share of time in which
    ranks wait), without recording a timeline."""
    costs = _checked(schedule, costs)
    return Simulation(schedule, costs, records=False).step_and_bubble()


def _checked(schedule: Schedule, costs: StageCosts) -> StageCosts:
    """Return the costs by stage of the schedule, given costs by stage or by part of the model.
    Raises ValueError if they do not match the schedule."""
    if len(costs.forward_seconds) != schedule.num_parts:
        raise ValueError(
            f"costs of {len(costs.forward_seconds)} stages for a schedule of {schedule.num_parts}"
        )
    costs = of_replicas(costs, schedule)
    if schedule.edges is not None and costs.edges is not None and schedule.edges != costs.edges:
        raise ValueError(f"costs of the edges {costs.edges} for a schedule of {schedule.edges}")
    if (schedule.edges is None) != (costs.edges is None) and costs.send_seconds:
        raise ValueError("the costs are of a chain and the schedule is none, or the reverse")
    return costs
