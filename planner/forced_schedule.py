"""A plan for the schedule that is forced: by the search alone, or arranged for the schedule.

In and out as in ``search.plan``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..cost_model.cluster import Cluster
from . import both_ways, chunks, search, sliced
from . import rules as default_rules
from .basis import DEFAULT, Basis
from .graph import Blocks, Graph
from .plan import Plan
from .prices import Rules
from .request import Request

ARRANGED = ("chimera", "terapipe")
"""Schedules whose plans are made of those of another schedule; they have their own memory."""


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

    Raises as ``search.plan``, ``chunks.plan``, ``both_ways.plan`` and ``sliced.plan`` do.
    """
    if request.forced.schedule not in ARRANGED:
        return chunks.plan(
            graph, blocks, cluster, request, observe=observe, rules=rules, basis=basis
        )

    def found(asked: Request) -> Plan:
        return search.plan(graph, blocks, cluster, asked, observe=observe, rules=rules, basis=basis)

    arranged = sliced.plan if request.forced.schedule == "terapipe" else both_ways.plan
    return arranged(graph, blocks, request, found, rules=rules, basis=basis)
