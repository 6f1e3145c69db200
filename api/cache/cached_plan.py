"""Whole plans, kept between commands.

In: what a search takes, a cache, the search. Out: the plan of an earlier search of exactly the
same, or of this one. The key holds the graph with the lines that its nodes come from, the blocks,
the cluster, the request, and the measurements with the way in which they are used.

Kept are plans of searches that ended by themselves. A search for another objective than time is
several searches that share the time limit, so its plan is not kept; nor is one of a placer, which
learns for as long as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoparallel.cache.codec import Codec, CodecError
from autoparallel.cache.plan_cache import MISSING, Cache, UnkeyedError, digest, graph_digest
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph import Blocks, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.pricing.basis import Basis
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Request

PLAN = "plan"


@dataclass(frozen=True)
class PlanCodec(Codec):
    """Writes plans as the text of their files."""

    classes: tuple[type, ...] = ()

    def encode(self, value: Plan) -> bytes:
        return Codec.encode(self, dumps(value))

    def decode(self, blob: bytes) -> Plan:
        """The plan. Raises ``CodecError``."""
        text = Codec.decode(self, blob)
        if not isinstance(text, str):
            raise CodecError("no plan")
        try:
            return loads(text)
        except PlanError as error:
            raise CodecError(str(error)) from error


def kept_plan(
    cache: Cache,
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    basis: Basis,
    search: Callable[[], Plan],
) -> Plan:
    """The plan of an earlier search of the same, marked as reused; else that of ``search``."""
    if cache.shelf is None or request.placer is not None or request.goal.objective != "time":
        return search()
    try:
        key = plan_key(graph, blocks, cluster, request, basis)
    except UnkeyedError:
        cache.faults["functions"] += 1
        return search()
    plan: Plan = cache.get(PLAN, PlanCodec(), key)
    if plan is not MISSING:
        return replace(plan, solver=replace(plan.solver, is_reused=True))
    plan = search()
    if not plan.solver.stopped:
        cache.put(plan, PLAN, PlanCodec(), key)
    return plan


def plan_key(graph: Graph, blocks: Blocks, cluster: Cluster, request: Request, basis: Basis) -> str:
    """A hash of everything that a plan follows from.

    Raises ``UnkeyedError`` where the work of an op is given by a function.
    """
    used = basis.used
    return digest(
        graph_digest(graph, blocks), tuple(node.source for node in graph.nodes), cluster,
        replace(request, features=Features()), sorted(request.features.denied),
        sorted(request.features.changes),
        basis.mode, basis.only, basis.assumptions, used,
        () if used is None else sorted(used.factors.items()),
    )  # fmt: skip
