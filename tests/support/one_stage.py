"""The planner with pipelines of one stage per rank only."""

from __future__ import annotations

from typing import Any

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner import find_plan
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT, Basis
from autoparallel.planner.find_plan import ONE_STAGE_PER_RANK, SearchMethod, run_proposers
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.candidates import Candidate
from autoparallel.planner.search.context import SearchContext


def plan(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    is_bounded: bool = False,
    **options: Any,
) -> Plan:
    """``find_plan.plan`` with these pipelines.

    ``is_bounded``: the plan says how far from the best it can be, which takes about as long again.
    """
    method = SearchMethod(ONE_STAGE_PER_RANK, is_bounded=is_bounded)
    return find_plan.plan(graph, blocks, cluster, request, method=method, **options)


def ranked(
    graph: Graph, blocks: Blocks, cluster: Cluster, request: Request, basis: Basis = DEFAULT
) -> tuple[SearchContext, list[Candidate]]:
    """The job and the candidates, the fastest first."""
    job = SearchContext.of(graph, blocks, cluster, request, rules=rules, basis=basis)
    return job, run_proposers(job, ONE_STAGE_PER_RANK).ranked()
