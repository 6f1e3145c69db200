"""Cache of plans between commands.

In: the arguments of a search, a cache, the search. Out: the plan of an earlier search with equal
arguments, or of this search. The key covers the graph with the source lines of its nodes, the
blocks, the cluster, the request with its own schedule, and the measured times with their use.

Only plans of searches that completed are stored, and the error that nothing fits, whose fix depends
on the time limit. An objective other than time takes several searches that share the time limit, so
its plan is not stored; nor is a learned placer's plan, because a placer always uses all its time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

from autoparallel.cache.captures import user_sources
from autoparallel.cache.codec import TextCodec
from autoparallel.cache.plan_cache import MISSING, Cache, UnkeyedError, digest, graph_digest
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Request
from autoparallel.planner.schedules.schedules import registered_schedule, table_text

PLAN = "plan"

NOTHING, NO_FIT = "nothing fits", "AP301"


@dataclass(frozen=True)
class _Refused:
    """Error AP301 of a search, and the time limit within which its fix was found."""

    limit_seconds: float
    what: str
    why: str
    where: str
    fix: str


def _write(value: Plan | _Refused | None) -> str:
    if isinstance(value, _Refused):
        return json.dumps(astuple(value))
    return NOTHING if value is None else dumps(value)


def _read(text: str) -> Plan | _Refused | None:
    if text.startswith("["):
        limit, what, why, where, fix = json.loads(text)
        return _Refused(limit, what, why, where, fix)
    return None if text == NOTHING else loads(text)


PLAN_TEXT = TextCodec(_write, _read)
"""Codec of cached plans: a plan is stored as its file's text, None as ``NOTHING``, and an error as
the list of its texts."""

Found = TypeVar("Found", Plan, Plan | None)


def reuse_or_search(
    cache: Cache,
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    basis: Basis,
    search: Callable[[], Found],
    method: tuple[str, ...] = (),
) -> Found:
    """Return the cached plan of an equal search, marked as reused, or else search and cache.

    ``basis`` is the source of op times; ``method`` tells searches of different thoroughness apart.
    """
    if cache.shelf is None or request.placer is not None or request.goal.objective != "time":
        return search()
    try:
        key = plan_key(graph, blocks, cluster, request, basis)
    except UnkeyedError:
        cache.faults["functions"] += 1
        return search()
    limit = request.time_limit_seconds
    known = cache.get(PLAN, PLAN_TEXT, key, *method)
    if isinstance(known, _Refused):
        if known.limit_seconds == limit:
            raise InfeasibleError(
                NO_FIT, known.what, why=known.why, where=known.where, fix=known.fix
            )
    elif known is not MISSING:
        plan: Found = known
        return plan and replace(plan, solver=replace(plan.solver, is_reused=True))
    try:
        plan = search()
    except InfeasibleError as error:
        if error.code == NO_FIT:
            refused = _Refused(limit, error.what, error.why, error.where, error.fix)
            cache.put(refused, PLAN, PLAN_TEXT, key, *method)
        raise
    if plan is None or not plan.solver.stopped:
        cache.put(plan, PLAN, PLAN_TEXT, key, *method)
    return plan


def plan_key(graph: Graph, blocks: Blocks, cluster: Cluster, request: Request, basis: Basis) -> str:
    """Return a hash of everything that a plan depends on, as its key in the cache.

    Raises ``UnkeyedError`` if a user's function computes the work of an op.
    """
    used, forced, chunks = basis.used, request.forced, request.forced.least_chunks
    return digest(
        graph_digest(graph, blocks),
        tuple(node.source for node in graph.nodes),
        cluster,
        replace(request, features=Features(), time_limit_seconds=1.0),  # completed within any
        sorted(request.features.denied),
        sorted(request.features.changes),
        user_sources() if registered_schedule(forced.schedule) else "",
        table_text(
            forced.schedule or "", (forced.pp or 4) * chunks, forced.num_microbatches or 8, chunks
        ),
        basis.mode,
        basis.only,
        basis.assumptions,
        used,
        () if used is None else sorted(used.factors.items()),
    )
