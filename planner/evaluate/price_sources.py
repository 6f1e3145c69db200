"""Shares of a predicted step by source of its prices: measurement, interpolation, specification.

In: a plan and the basis of its prices. Out: the plan with the shares. For each source the plan is
priced again, node by node, with seconds from other sources taken as zero; the result is that
source's part, as a stage's seconds are sums (collectives that overlap compute count in full). The
rest is from specifications, so the shares add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...cost_model.cluster.cluster import Source
from ..costs.basis import Basis, CostQueries
from ..costs.prices import Rules
from ..graph.graph import Blocks, Graph
from ..plan import Plan, ProfileUse, StagePrediction
from .evaluate import evaluate

PARTS = ("compute", "communication")


def with_sources(plan: Plan, graph: Graph, blocks: Blocks, *, basis: Basis, rules: Rules) -> Plan:
    """Return ``plan`` with the fractions of its predicted step whose prices are measured,
    interpolated or from specifications."""
    profile = basis.used
    whole = _seconds([stage.prediction for stage in plan.stages], plan.num_microbatches)
    total = sum(whole.values())
    parts: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    asked = CostQueries()
    kinds: tuple[Source, ...] = ("measured", "interpolated") if profile is not None else ()
    for source in kinds:
        only = replace(basis, only=source, asked=asked)
        found = evaluate(graph, blocks, plan, plan.cluster, rules=rules, basis=only)
        for part, seconds in _seconds(found.stages, plan.num_microbatches).items():
            if seconds > 0:
                parts[part][source] = seconds
    for part in PARTS:
        rest = whole[part] - sum(parts[part].values())
        if rest > 1e-9 * total or (not parts[part] and whole[part] > 0):
            parts[part]["spec"] = rest
    summed = sum(sum(shares.values()) for shares in parts.values())
    shares = {
        part: {source: seconds / summed for source, seconds in own.items()}
        for part, own in parts.items()
    }
    use = None
    if profile is not None:
        where = profile.environment
        use = ProfileUse(
            where.device,
            where.driver,
            where.torch,
            where.threads,
            profile.mismatch,
            _interpolation_error(asked),
        )
    prediction = replace(plan.prediction, sources=_joined(shares), sources_of=shares, profile=use)
    return replace(plan, prediction=prediction)


def _seconds(
    stages: list[StagePrediction] | tuple[StagePrediction, ...], count: int
) -> dict[str, float]:
    """Return the seconds of a step of ``count`` micro-batches, over all stages, by ``PARTS``."""
    compute = communication = 0.0
    for stage in stages:
        own = stage.seconds
        compute += own["compute"] * count + own["optimizer"]
        per_microbatch = own["communication"] + own["hidden_states"] + own["receive"]
        communication += per_microbatch * count + own["parameter_gather"] + own["gradient_sync"]
    return dict(zip(PARTS, (compute, communication), strict=True))


def _joined(shares: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    order: tuple[Source, ...] = ("measured", "interpolated", "spec")
    totals = {source: sum(own.get(source, 0.0) for own in shares.values()) for source in order}
    return {source: share for source, share in totals.items() if share > 0}


def _interpolation_error(asked: CostQueries) -> float:
    """Return the mean relative error of interpolated prices of ops, weighted by their seconds."""
    found = [op for op in asked.ops.values() if op.source == "interpolated"]
    total = sum(op.seconds for op in found)
    return sum(op.error * op.seconds for op in found) / total if total else 0.0
