"""Chimera: a plan whose stages each have a replica, in a pipeline the other way.

In: what ``search.plan`` takes, with ``schedule=chimera`` forced. Out: a plan of ``pp`` stages,
which the schedule places twice (``replicas.placed_stages``): stage ``s`` on the devices of its
own and of stage ``pp - 1 - s``. Cuts, layouts, ZeRO stages and recomputation are those that the
search finds for 1F1B; where both stages of a rank do not fit it, those it finds with half of the
memory. The step is priced by ``evaluate`` under the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import rules as default_rules
from ..errors import InfeasibleError, UsageError
from ..evaluate import Evaluator
from ..graph import Blocks, Graph
from ..plan import Plan
from ..price_sources import with_sources
from ..pricing.basis import DEFAULT, Basis
from ..pricing.prices import Rules
from ..replicas import check_replicas
from ..requests.request import Request, divisors
from ..schedules.schedules import build_schedule
from .forced_chunks import check_memory, of_one_mesh, usable_bytes
from .priced import priced


def plan(
    graph: Graph,
    blocks: Blocks,
    request: Request,
    found: Callable[[Request], Plan],
    *,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Plan:
    """The fastest plan found that fits; ``found`` searches.

    Raises as ``search.plan`` does; UsageError AP153 for an odd number of ranks or a single
    micro-batch, AP546 without a pipeline or where the ranks' meshes differ; PlanError AP547
    where forwards change buffers.
    """
    ranks = request.forced.pp
    if ranks is None or ranks < 2:
        raise UsageError(
            "AP546", "schedule=chimera needs a pipeline of several ranks",
            where="--parallel", fix="pp=2 or more",
        )  # fmt: skip
    build_schedule("chimera", ranks, 2)
    check_replicas(graph)
    plain = replace(request, forced=replace(request.forced, schedule="1f1b"))
    is_free = request.forced.num_microbatches is None and request.microbatch_size is None

    evaluator = Evaluator(graph, blocks, rules, basis)

    def both_ways(asked: Request) -> Plan:
        base = of_one_mesh(found(asked), found, asked)
        if is_free and base.num_microbatches < 2:
            least = next((n for n in divisors(request.global_batch) if n >= ranks), 2)
            forced = replace(asked.forced, num_microbatches=least)
            asked = replace(asked, forced=forced)
            base = of_one_mesh(found(asked), found, asked)
        build_schedule("chimera", ranks, base.num_microbatches)
        two = replace(base, schedule="chimera")
        return priced(two, evaluator)

    best = both_ways(plain)
    limit = usable_bytes(best, request)
    if best.prediction.peak_memory_bytes > limit:
        try:
            best = both_ways(replace(plain, memory_limit_bytes=limit // 2))
        except InfeasibleError:
            check_memory(best, request, "the two stages of a rank")
    check_memory(best, request, "the two stages of a rank")
    return with_sources(best, graph, blocks, basis=basis, rules=rules)
