"""Measurements worth making before planning a request, the most important first.

In: the arguments of ``find_plan.plan``, and the profile so far. Out: the op cases and transfers
that the search queried and that are not measured. The search runs once and records its queries.
Cases in fast candidates come first, ranked by their largest fraction of a candidate's step,
weighted by the candidate's speed; then all other queries, by predicted seconds. Equal layers, and
equal ops, are one case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...cost_model.cluster.cluster import Cluster
from .. import ops as default_rules
from ..costs.basis import DEFAULT, Basis, CostQueries, QueriedOp, QueriedTransfer, uses_of
from ..evaluate.evaluate import evaluate
from ..find_plan import search
from ..graph.graph import Blocks, Graph
from ..requests.goal import Observe, ignore
from ..requests.request import Request
from ..search.candidates import Candidate
from ..search.report_plan import make_plan

NUM_CANDIDATES = 12
"""Number of fastest candidates whose cases are measured before all others."""

OTHERS = 1e-3
"""Weight of a case that only slower candidates need, relative to one of the fastest."""


@dataclass(frozen=True, slots=True)
class ProfilingTargets:
    """Ops and transfers to measure, most important first; ``num_asked``: number of ops whose prices
    were queried, measured or not."""

    ops: tuple[QueriedOp, ...]
    transfers: tuple[QueriedTransfer, ...]
    num_asked: int


def asked_cases(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    basis: Basis = DEFAULT,
    observe: Observe = ignore,
) -> ProfilingTargets:
    """Return the ops and transfers that planning the request prices and that were not measured,
    most important first.

    Raises the errors of ``find_plan.plan``.
    """
    everything = CostQueries(uses_of(blocks))
    basis = replace(basis, mode="auto", asked=everything)
    found = search(graph, blocks, cluster, request, observe=observe, basis=basis)
    candidates = found.pool.ranked()
    fastest = candidates[0].step_seconds
    weights: dict[object, float] = {}
    for candidate in candidates[:NUM_CANDIDATES]:
        plan = make_plan(
            found.context.structure, cluster, request, candidate, (), found.context.budget.spent()
        )
        own = CostQueries()
        evaluate(graph, blocks, plan, cluster, rules=default_rules, basis=replace(basis, asked=own))
        _weigh(weights, own, candidate, fastest)
        everything.add(own)
    _weigh_others(weights, everything)
    ops = [op for op in everything.ops.values() if op.source != "measured"]
    transfers = [t for t in everything.transfers.values() if set(t.sources) != {"measured"}]
    return ProfilingTargets(
        tuple(sorted(ops, key=lambda op: -weights[op.case])),
        tuple(sorted(transfers, key=lambda t: -weights[t.kind, t.group])),
        len(everything.ops),
    )


def _seconds(asked: CostQueries) -> dict[object, float]:
    found: dict[object, float] = {case: op.seconds for case, op in asked.ops.items()}
    found.update({key: transfer.seconds for key, transfer in asked.transfers.items()})
    return found


def _weigh(
    weights: dict[object, float], own: CostQueries, candidate: Candidate, fastest: float
) -> None:
    """Raise the weight of each op and transfer in ``own`` to its fraction of the candidate's step,
    times the candidate's speed relative to the fastest."""
    factor = fastest / candidate.step_seconds**2 if candidate.step_seconds else 0.0
    for key, seconds in _seconds(own).items():
        weights[key] = max(weights.get(key, 0.0), seconds * factor)


def _weigh_others(weights: dict[object, float], everything: CostQueries) -> None:
    found = _seconds(everything)
    total = sum(found.values()) or 1.0
    for key, seconds in found.items():
        weights.setdefault(key, OTHERS * seconds / total)
