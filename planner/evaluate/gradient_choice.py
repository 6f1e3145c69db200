"""Choice of how each gradient is summed over ranks, the last decision of a plan.

In: a plan whose stages are decided. Out: the plan with the algorithm of each gradient all-reduce,
their order, and predictions that count both (``gradient_sums``).
"""

from __future__ import annotations

from dataclasses import replace

from ..costs.basis import Basis
from ..costs.prices import Rules
from ..errors import UsageError
from ..graph.graph import Blocks, Graph
from ..plan import Plan
from ..requests.request import Forced
from ..variants.gradient_sums import (
    LEAST_GAIN,
    only_library,
    why_not_priority,
    with_algorithms,
    with_priority,
)
from .evaluate import Evaluator


def with_sums(
    plan: Plan, graph: Graph, blocks: Blocks, forced: Forced, *, rules: Rules, basis: Basis
) -> Plan:
    """Return the plan with an algorithm for each gradient all-reduce, and their order: the fastest,
    or as ``forced`` requires.

    Raises UsageError AP196 for an all-reduce algorithm that cannot run, AP197 if the gradient order
    "priority" is impossible.
    """
    evaluator = Evaluator(graph, blocks, rules, replace(basis, asked=None))
    backward = with_algorithms(plan, graph, blocks, forced.allreduce)
    best = backward if only_library(backward) else _predicted(backward, evaluator)
    why = why_not_priority(plan, graph, blocks)
    if forced.gradients == "priority" and why:
        raise UsageError(
            "AP197",
            "gradients=priority: the plan cannot sum gradients beside the next forward",
            why=why,
            where="--parallel",
            fix="gradients=backward, or dp= of all devices with zero=0 on CPUs",
        )
    if forced.gradients == "backward" or why:
        return best
    (cost,) = evaluator.staged(plan, plan.cluster).costs
    ordered = with_priority(plan, graph, blocks, cost, forced.allreduce)
    ordered = _predicted(ordered, evaluator)
    before, after = best.prediction.step_seconds, ordered.prediction.step_seconds
    return ordered if forced.gradients or after <= (1 - LEAST_GAIN) * before else best


def _predicted(plan: Plan, evaluator: Evaluator) -> Plan:
    """Return the plan with the step time and stage seconds that ``evaluator`` predicts."""
    found, before = evaluator.evaluation(plan, plan.cluster), plan.prediction
    faster = before.step_seconds / found.step_seconds
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, seconds=own.seconds))
        for stage, own in zip(plan.stages, found.stages, strict=True)
    )
    prediction = replace(
        before,
        step_seconds=found.step_seconds,
        bubble_fraction=found.bubble_fraction,
        tokens_per_second=before.tokens_per_second * faster,
        model_flops_utilization=before.model_flops_utilization * faster,
    )
    bound = min(plan.solver.bound_seconds, found.step_seconds)
    gap = min(plan.solver.gap, 1 - bound / found.step_seconds)
    solver = replace(plan.solver, bound_seconds=bound, gap=gap)
    return replace(plan, stages=stages, prediction=prediction, solver=solver)
