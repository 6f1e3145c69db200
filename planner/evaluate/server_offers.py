"""Optional parameter servers: priced after the search if allowed and possibly faster.

In: the best plan of the search. Out: that plan, or a faster plan with servers; the slower becomes
an alternative. Servers pay off for devices of unequal speed, or for links that are slow compared
with the compute; they run on CPUs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.simulator.consistency import Consistency
from ..errors import InfeasibleError, UsageError
from ..graph.graph import Graph
from ..plan import Alternative, Plan
from ..requests.request import Forced, Request, divisors
from ..summary import plan_summary
from .evaluate import Evaluation

THIN = 0.1
"""Fraction of a step: a link is thin if the transfer of all gradients over it takes longer."""

STALENESS = 2


def with_offered_servers(
    best: Plan, graph: Graph, request: Request, price: Callable[[Request], Plan]
) -> Plan:
    """Return the fastest plan with parameter servers if it is faster than ``best`` by more than the
    request's tolerance, else ``best``; plans not chosen become its alternatives.

    ``price`` plans a request that forces servers. ``ssp`` and ``asp``, which change the result of a
    step, are tried only if the request allows them by name.
    """
    if not may_offer(best, graph, request):
        return best
    plans = []
    for forced in offered_servers(best.cluster, request):
        try:
            plans.append(price(replace(request, forced=forced)))
        except (UsageError, InfeasibleError):  # a batch that does not divide, or too little memory
            continue
    if not plans:
        return best
    plans.sort(key=lambda plan: plan.prediction.step_seconds)
    fastest, *others = plans
    known = best.alternatives
    ours, theirs = best.prediction.step_seconds, fastest.prediction.step_seconds
    if theirs * (1 + request.tolerance) < ours:
        rest = [(best, "without servers"), *((each, "other servers") for each in others)]
        winner = fastest
    else:
        rest = [(each, "parameter servers") for each in plans]
        winner = best
    added = [_alternative(each, winner, why) for each, why in rest]
    ranked = sorted((*known, *added), key=lambda each: each.step_seconds)
    return replace(winner, alternatives=tuple(ranked))


def _alternative(plan: Plan, winner: Plan, why: str) -> Alternative:
    found, least = plan.prediction, winner.prediction.step_seconds
    more = 100 * (found.step_seconds / least - 1)
    return Alternative(
        plan_summary(plan), found.step_seconds, found.peak_memory_bytes, f"{why} {more:+.1f} %"
    )


def repriced(plan: Plan, priced: Evaluation) -> Plan:
    """Return a plan made for one worker with the figures predicted for all workers and servers."""
    alone = plan.prediction
    scale = alone.step_seconds / priced.step_seconds
    utilization = alone.model_flops_utilization * scale / plan.cluster.num_devices
    prediction = replace(
        alone,
        step_seconds=priced.step_seconds,
        bubble_fraction=priced.bubble_fraction,
        tokens_per_second=alone.tokens_per_second * scale,
        model_flops_utilization=utilization,
        peak_memory_bytes=priced.peak_memory_bytes,
    )
    solver = replace(plan.solver, bound_seconds=0.0, gap=1.0, layouts_gap=None)
    return replace(plan, prediction=prediction, solver=solver)


def may_offer(best: Plan, graph: Graph, request: Request) -> bool:
    """Return whether parameter servers can run the request and could be faster than ``best``."""
    cluster, asks = best.cluster, request
    is_free = asks.forced == Forced() and not (asks.pins or asks.stage_at or asks.placer)
    return (
        is_free
        and asks.goal.objective == "time"
        and asks.microbatch_size is None
        and asks.precision == "fp32"
        and asks.features.allows_change("servers")
        and asks.features.allows("dp")
        and all(host.device.kind == "cpu" for host in cluster.hosts)
        and cluster.num_devices > 1
        and bool(graph.batch_dims)
        and not (graph.accumulation.mixing or graph.updates or best.solver.stopped)
        and (is_unequal(cluster) or is_thin(best, graph))
    )


def is_unequal(cluster: Cluster) -> bool:
    """Return whether the cluster's devices differ in speed."""
    return len({host.device.speed for host in cluster.hosts}) > 1


def is_thin(best: Plan, graph: Graph) -> bool:
    """Return whether sending all gradients over the slowest link of rank 0 takes more than the
    fraction ``THIN`` of the step of ``best``."""
    cluster = best.cluster
    ranks = range(1, cluster.num_devices)
    rate = min(cluster.link(0, rank).bytes_per_second for rank in ranks)
    trained = [node.spec for node in graph.parameters if node.spec.requires_grad]
    num_bytes = 4 * sum(spec.numel for spec in trained)
    return num_bytes / rate > THIN * best.prediction.step_seconds


def offered_servers(cluster: Cluster, request: Request) -> Iterator[Forced]:
    """Yield the forced choices of parameter servers to price, under each allowed consistency:
    servers beside all workers, on half of the ranks, on one rank."""
    total = cluster.num_devices
    places: dict[tuple[Literal["own", "beside"], int], None] = {
        ("beside", total): None,
        ("own", total // 2): None,
        ("own", 1): None,
    }
    changes: tuple[Consistency, ...] = ("ssp", "asp")
    allowed = [name for name in changes if request.features.allows_change(name)]
    kinds: list[Consistency] = ["bsp", *allowed]
    for consistency in kinds:
        for place, count in places:
            workers = total if place == "beside" else total - count
            rows = [
                each
                for each in divisors(request.global_batch)
                if each >= workers and (consistency == "bsp" or each % workers == 0)
            ]
            if rows and workers > 1:
                yield Forced(
                    servers=count,
                    place=place,
                    num_microbatches=min(rows),
                    consistency=consistency,
                    staleness=STALENESS if consistency == "ssp" else None,
                )
