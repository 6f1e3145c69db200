"""A plan for the schedule that is forced: by the search alone, or arranged for the schedule.

In and out as in ``search.plan``.
"""

from __future__ import annotations

from collections.abc import Callable

from ...cost_model.cluster import Cluster
from .. import rules as default_rules
from ..evaluate import Evaluator
from ..graph import Blocks, Graph
from ..plan import Plan
from ..price_sources import with_sources
from ..pricing.basis import DEFAULT, Basis
from ..pricing.prices import Rules
from ..pricing.weight_versions import is_asynchronous
from ..requests.request import ARRANGED_SCHEDULES, Request
from ..search import search
from . import both_ways, chunks, sliced
from .asynchronous import (
    check_asynchronous,
    check_memory,
    plan_asynchronous,
)
from .priced import priced


def plan(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Callable[[str, float, float], None] | None = None,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Plan:
    """The fastest plan found that fits, of the schedule that is forced if one is.

    Raises as ``search.plan``, ``chunks.plan``, ``both_ways.plan``, ``sliced.plan`` and
    ``plan_asynchronous`` do.
    """
    is_async = is_asynchronous(request.forced.schedule)
    if request.forced.schedule not in ARRANGED_SCHEDULES and not is_async:
        return chunks.plan(
            graph, blocks, cluster, request, observe=observe, rules=rules, basis=basis
        )

    def found(asked: Request) -> Plan:
        return search.plan(graph, blocks, cluster, asked, observe=observe, rules=rules, basis=basis)

    if is_async:
        evaluator = Evaluator(graph, blocks, rules, basis)
        own = plan_asynchronous(
            request,
            found,
            lambda each: priced(each, evaluator),
        )
        check_asynchronous(own, graph, blocks)
        check_memory(own, request)
        return with_sources(own, graph, blocks, basis=basis, rules=rules)
    arranged = sliced.plan if request.forced.schedule == "terapipe" else both_ways.plan
    return arranged(graph, blocks, request, found, rules=rules, basis=basis)
