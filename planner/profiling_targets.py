"""What is worth measuring for a planning context, the most important first.

In: what ``find_plan.plan`` takes, and the profile there is so far. Out: the op cases and
transfers that the search asked for and no measurement answers. The search runs once and
records its questions. What the candidates that were simulated spend time on comes first, by
the largest share of a candidate's step that hangs on it, less the slower the candidate; then
what else was asked for, by its predicted seconds. Equal layers, and equal ops, are one case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cost_model.cluster.cluster import Cluster
from . import rules as default_rules
from .evaluate import evaluate
from .find_plan import search
from .graph import Blocks, Graph
from .pricing.basis import DEFAULT, Asked, AskedOp, AskedTransfer, Basis, uses_of
from .requests.request import Request
from .search.candidates import Candidate
from .search.context import Observe, ignore
from .search.report_plan import make_plan

NUM_CANDIDATES = 12
"""Candidates whose every op is put before the rest."""

OTHERS = 1e-3
"""The weight of what no such candidate needs, relative to the candidates'."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Cases and transfers, the most important first; ``num_asked`` counts known ones too."""

    ops: tuple[AskedOp, ...]
    transfers: tuple[AskedTransfer, ...]
    num_asked: int


def asked_cases(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    basis: Basis = DEFAULT,
    observe: Observe = ignore,
) -> Wanted:
    """What the search for this request asks for and was not measured. Raises as ``plan``."""
    everything = Asked(uses_of(blocks))
    basis = replace(basis, mode="auto", asked=everything)
    found = search(graph, blocks, cluster, request, observe=observe, basis=basis)
    candidates = found.pool.ranked()
    fastest = candidates[0].step_seconds
    weights: dict[object, float] = {}
    for candidate in candidates[:NUM_CANDIDATES]:
        plan = make_plan(
            found.context.structure, cluster, request, candidate, (), found.context.spent()
        )
        own = Asked()
        evaluate(graph, blocks, plan, cluster, rules=default_rules, basis=replace(basis, asked=own))
        _weigh(weights, own, candidate, fastest)
        everything.add(own)
    _weigh_others(weights, everything)
    ops = [op for op in everything.ops.values() if op.source != "measured"]
    transfers = [t for t in everything.transfers.values() if set(t.sources) != {"measured"}]
    return Wanted(
        tuple(sorted(ops, key=lambda op: -weights[op.case])),
        tuple(sorted(transfers, key=lambda t: -weights[t.kind, t.group])),
        len(everything.ops),
    )


def _seconds(asked: Asked) -> dict[object, float]:
    found: dict[object, float] = {case: op.seconds for case, op in asked.ops.items()}
    found.update({key: transfer.seconds for key, transfer in asked.transfers.items()})
    return found


def _weigh(weights: dict[object, float], own: Asked, candidate: Candidate, fastest: float) -> None:
    """Each case's share of the candidate's step, times how near that is to the fastest."""
    factor = fastest / candidate.step_seconds**2 if candidate.step_seconds else 0.0
    for key, seconds in _seconds(own).items():
        weights[key] = max(weights.get(key, 0.0), seconds * factor)


def _weigh_others(weights: dict[object, float], everything: Asked) -> None:
    found = _seconds(everything)
    total = sum(found.values()) or 1.0
    for key, seconds in found.items():
        weights.setdefault(key, OTHERS * seconds / total)
