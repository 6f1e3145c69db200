"""Timeline of a step of a plan's pipeline, drawn as text.

In: a plan. Out: the text, from the predicted seconds of the stages. It is None for a plan without a
pipeline, and for stages that are no chain: a plan file does not store dependencies of stages, so a
step is drawn only if its simulated time equals the predicted time.
"""

from __future__ import annotations

from math import isclose

from autoparallel.cost_model.simulator.simulator import simulate
from autoparallel.cost_model.simulator.stage_costs import Buckets, StageCosts
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.planner.evaluate.step import message_seconds
from autoparallel.planner.plan import Plan
from autoparallel.planner.schedules.schedules import SCHEDULES, build_schedule, registered_schedule

MOST_ACTIONS = 100_000
"""Limit for stages times micro-batches, above which no step is simulated for a drawing."""

SAME = 0.01


MEANINGS = {
    "W": "weights' gradients",
    "g": "parameters gathered",
    "r": "gradients summed",
    "s": "optimizer",
    ".": "waiting",
}


def legend(drawn: str) -> str:
    """Explain the letters and signs in the drawing of a pipeline's timeline, except F and B.

    >>> legend("rank 0  FFfWW.")
    "W weights' gradients, . waiting, small letters: every second stage of a rank"
    """
    rows = [line.partition("  ")[2] for line in drawn.splitlines() if "rank" in line]
    signs = set("".join(rows).replace(" ", ""))
    parts = [f"{sign} {meaning}" for sign, meaning in MEANINGS.items() if sign in signs]
    if signs & set("fbw"):
        parts.append("small letters: every second stage of a rank")
    return ", ".join(parts)


def timeline_of(plan: Plan) -> Timeline | None:
    """Simulate a pipeline's step from the plan; None if the time differs from the prediction."""
    stages = len(plan.stages)
    is_known = plan.schedule in SCHEDULES or registered_schedule(plan.schedule) is not None
    if not plan.has_pipeline or not is_known or stages * plan.num_microbatches > MOST_ACTIONS:
        return None
    schedule = build_schedule(
        plan.schedule, stages, plan.num_microbatches, num_chunks=plan.num_chunks
    )
    timeline = simulate(schedule, plan_costs(plan))
    if not isclose(timeline.step_seconds, plan.prediction.step_seconds, rel_tol=SAME):
        return None
    return timeline


def plan_costs(plan: Plan) -> StageCosts:
    """Return the seconds of a plan's stages and messages, from its predictions, for a simulation.
    "receive" seconds of a stage cover its messages both ways."""

    def each(name: str) -> list[float]:
        return [stage.prediction.seconds.get(name, 0.0) for stage in plan.stages]

    sends, receives = each("send")[:-1], each("receive")[1:]
    message = message_seconds(plan.cluster)
    late = each("weight_gradients")
    return StageCosts(
        each("forward"),
        each("backward"),
        send_seconds=sends,
        send_backward_seconds=[
            max(0.0, both - there) for both, there in zip(receives, sends, strict=True)
        ],
        send_latency_seconds=[message.latency] * len(sends),
        send_call_seconds=[message.call] * len(sends),
        receive_call_seconds=[message.call] * len(sends),
        gather_seconds=each("parameter_gather"),
        gradient_sync_seconds=each("gradient_sync"),
        slowed_share=each("slowed_share"),
        buckets=[Buckets.equal(len(stage.blocks)) for stage in plan.stages],
        step_seconds=each("optimizer"),
        weight_backward_seconds=late if all(late) else (),
    )
