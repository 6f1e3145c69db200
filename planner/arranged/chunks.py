"""Several stages (chunks) per pipeline rank: a plan for schedules that run such.

In: what ``search.plan`` takes. Out: the fastest plan of those of one stage per rank and of several,
or of the schedule that is forced.

A plan of ``C`` stages per rank has ``R * C`` stages on ``R`` sets of devices. The layouts, ZeRO
stages and recomputation are those that the search finds for ``R`` stages; the blocks are then cut
into ``R * C`` runs whose largest has the fewest FLOPs, and the step is priced by ``evaluate`` under
the schedule. The pipelines next to the best are tried so (``chunk_search``).

Across unlike hosts, or where stages or layouts are asked for, or where none of these can be cut,
only the best of one stage per rank is, and that if its schedule is forced. Stages of one rank have
one mesh, so where the search gives ranks different meshes it is asked again (``forced_chunks``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ...cost_model.cluster import Cluster
from .. import rules as default_rules
from ..errors import InfeasibleError, UsageError
from ..evaluate import Evaluator, at_microbatch, priced_stages
from ..graph import Blocks, Graph
from ..layout import Layout
from ..plan import Alternative, BlockPlan, Plan, Simplest, StagePlan, StagePrediction
from ..price_sources import with_sources
from ..pricing.basis import DEFAULT, Basis
from ..pricing.prices import Rules, boundary_layout
from ..pricing.slice_costs import best_lengths
from ..pricing.stage_cost import StageCost
from ..pricing.step import known_schedule
from ..requests.request import Request
from ..schedules.schedules import find_schedule
from ..search import search
from ..search.report_plan import LESS_SIMPLE, leaf_layout
from ..search.simplest import simplest_of, tolerance_of
from ..strategy import NodeLayout
from ..summary import plan_summary, schedule_text
from .balanced import balanced, block_flops
from .chunk_memory import fitting
from .chunk_search import Cut, Others, cut_again
from .forced_chunks import (
    check_begins,
    check_memory,
    fitting_microbatches,
    none_found,
    num_chunks,
    num_ranks,
    of_one_mesh,
)
from .priced import Wanted, priced
from .search import Arranging, arranged


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
    """The fastest plan found that fits, of several chunks per rank where that is forced.

    Raises as ``search.plan`` does; UsageError AP546 where chunks cannot be as they are forced.
    """

    every: list[search.Searched] = []
    try:
        return _plan(
            graph, blocks, cluster, request, every, observe=observe, rules=rules, basis=basis
        )
    finally:
        for each in every:
            each.job.end()


def _plan(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    every: list[search.Searched],
    *,
    observe: Callable[[str, float, float], None] | None,
    rules: Rules,
    basis: Basis,
) -> Plan:
    """``plan``; ``every`` takes the searches, whose processes are then ended."""
    deadline = time.perf_counter() + request.time_limit_seconds

    def searched(asked: Request) -> search.Searched:
        every.append(
            search.searched(
                graph, blocks, cluster, asked, observe=observe, rules=rules, basis=basis
            )
        )
        return every[-1]

    def found(asked: Request) -> Plan:
        own = searched(asked)
        return own.judged(own.winner())

    evaluator = Evaluator(graph, blocks, rules, basis)

    def cut(
        base: Plan, schedule: str, count: int, wanted: Wanted | None = None,
        starts: tuple[int, ...] | None = None,
    ) -> Plan:  # fmt: skip
        looped = chunked(base, graph, blocks, schedule, count, rules=rules, starts=starts)
        return priced(looped, evaluator, wanted)

    def price_stages(part: Graph, cut: Blocks, own: Plan) -> list[StageCost]:
        return priced_stages(part, cut, own, rules=rules, basis=basis)

    arranging = Arranging(
        lambda base: priced(base, evaluator),
        lambda base: best_lengths(at_microbatch(graph, base), blocks, base, price_stages),
    )

    def searched_best() -> Plan:
        found = searched(request)
        return _best(found, cut, arranging, deadline, tolerance_of(found, basis))

    count = num_chunks(request.forced)
    best = searched_best() if count == 1 else _forced(blocks, cluster, request, searched_best)
    if best is None:
        ranks = num_ranks(request.forced, count, len(blocks.blocks))
        base = _base(request, found, ranks, count)
        assert request.forced.schedule is not None
        own = partial(cut, schedule=request.forced.schedule, count=count)
        looped = fitting(own, base, every[0].job.limits.memory_bytes, request.recomputations)
        best = every[0].judged(looped)
        check_memory(best, request, "the chunks of a rank")
        check_begins(best, graph, blocks, request)
    return with_sources(best, graph, blocks, basis=basis, rules=rules)


def _forced(
    blocks: Blocks, cluster: Cluster, request: Request, searched_best: Callable[[], Plan]
) -> Plan | None:
    """The best of a schedule of several stages per rank that is forced; None where the search
    cuts no pipeline and a number of ranks is given."""
    may_be_cut = _may_be_cut_again(cluster, request)
    if request.forced.pp is not None or not may_be_cut:  # before anything is searched
        num_ranks(request.forced, request.forced.least_chunks, len(blocks.blocks))
    if not may_be_cut:
        return None
    try:
        return searched_best()
    except (UsageError, InfeasibleError):
        if request.forced.pp is None:
            raise
        return None


def _base(request: Request, found: Callable[[Request], Plan], ranks: int, count: int) -> Plan:
    """A plan of one stage per rank, to be cut into so many under the schedule that is forced."""
    plain = replace(request, forced=replace(request.forced, schedule=None, chunks=None))
    base = of_one_mesh(found(plain), found, plain)
    num_microbatches = fitting_microbatches(request, base.num_microbatches, ranks, count)
    if num_microbatches != base.num_microbatches:
        forced = replace(plain.forced, num_microbatches=num_microbatches)
        plain = replace(plain, forced=forced)
        base = of_one_mesh(found(plain), found, plain)
    return base


def _best(
    found: search.Searched, cut: Cut, arranging: Arranging, deadline: float, tolerance: float
) -> Plan:
    """The simplest within the tolerance of the fastest, of what was found and of the same under
    other schedules: cut again into several stages per rank, or arranged as it is.

    Pipelines across unlike hosts, and with stages or layouts that are asked for, are left alone.
    """
    request, winner = found.request, found.ranking[0]
    others = Others(None, None, [])
    is_done = found.job.stopped and request.allows_one_stage
    if _may_be_cut_again(found.cluster, request) and not is_done:
        others = _under_others(found, cut, arranging, deadline, tolerance)
    if others.best is None and len(winner.stages) > 1 and not request.allows_one_stage:
        raise none_found(request, others.lost, int(found.job.limits.memory_bytes))
    simplest = simplest_of(found, tolerance, others.fastest)
    if others.best is not None and simplest is None:
        return _of_others(found, others.best, others, tolerance)
    found, why = simplest or (found, None)
    plain = found.winner()
    alternatives = list(plain.alternatives) if request.allows_one_stage else []
    alternatives += others.lost
    if others.fastest is not None and others.fastest not in alternatives:
        alternatives.append(others.fastest)
    by_speed = sorted(alternatives, key=lambda each: each.step_seconds)
    plain = replace(plain, alternatives=tuple(by_speed))
    plain = found.judged(plain)
    return replace(plain, solver=replace(plain.solver, simplest=why))


def _of_others(found: search.Searched, best: Plan, others: Others, tolerance: float) -> Plan:
    """A plan of another schedule, with those that lost to it."""
    request, winner, step = found.request, found.ranking[0], best.prediction.step_seconds
    plainly = found.plan(winner).alternatives if request.allows_one_stage else ()
    lost = sorted((*plainly, *others.lost), key=lambda each: each.step_seconds)
    if request.allows_one_stage:
        seconds, peak = winner.step_seconds, int(winner.peak_bytes)
        schedule = "one stage per rank" if best.num_chunks > 1 else schedule_text(winner.schedule)
        reason = f"{schedule}: +{100 * (seconds - step) / step:.1f} %"
        lost.insert(0, Alternative(winner.summary, seconds, peak, reason))
    faster = [each for each in lost if each.step_seconds < step and each.reason == LESS_SIMPLE]
    slower = [each for each in lost if each.step_seconds >= step]
    best = replace(found.judged(best), alternatives=(*faster, *slower))
    first = others.fastest
    if first is None or first.step_seconds >= step:
        return best
    why = Simplest(tolerance, 1 + len(faster), first.summary, first.step_seconds)
    return replace(best, solver=replace(best.solver, simplest=why))


def _under_others(
    found: search.Searched, cut: Cut, arranging: Arranging, deadline: float, tolerance: float
) -> Others:
    """The plans of pipelines cut again or arranged."""
    request, winner = found.request, found.ranking[0]
    looped = Others(None, None, [])
    if request.chunked_schedules:
        looped = cut_again(found, cut, deadline, tolerance)
    bar = winner.step_seconds
    if not request.allows_one_stage and len(winner.stages) > 1:
        bar = float("inf")
    if looped.best is not None:
        bar = looped.best.prediction.step_seconds / (1 + tolerance)
    if not request.arranged_schedules or found.job.stopped:
        return looped
    best, slower = arranged(found, arranging, bar=bar, deadline=deadline)
    if best is None:
        return replace(looped, lost=[*looped.lost, *slower])
    if looped.best is not None:
        slower.append(_alternative(looped.best, best.prediction.step_seconds))
    return Others(best, _alternative(best), [*looped.lost, *slower])


def _alternative(plan: Plan, step_seconds: float = 0.0) -> Alternative:
    """A plan of another schedule, in words; ``step_seconds`` are those of one that is faster."""
    own = plan.prediction
    slower = 100 * (own.step_seconds / step_seconds - 1) if step_seconds else 0.0
    reason = f"+{slower:.1f} %" if step_seconds else LESS_SIMPLE
    return Alternative(plan_summary(plan), own.step_seconds, own.peak_memory_bytes, reason)


def _may_be_cut_again(cluster: Cluster, request: Request) -> bool:
    return _is_uniform(cluster) and not request.pins and not request.stage_at


def _is_uniform(cluster: Cluster) -> bool:
    return all(host == cluster.hosts[0] for host in cluster.hosts)


def chunked(
    base: Plan,
    graph: Graph,
    blocks: Blocks,
    schedule: str,
    count: int,
    *,
    rules: Rules = default_rules,
    starts: tuple[int, ...] | None = None,
) -> Plan:
    """``base`` cut into ``count`` times as many stages, placed as ``schedule`` does it.

    They begin with the blocks ``starts``, or so that the heaviest is as light as can be.

    All ranks have the layouts of the first stage that has a kind of block: with one stage per
    rank it has the most micro-batches in flight, here all ranks hold about as much as it.
    """
    schedule, number = find_schedule(schedule).name, len(base.stages) * count
    ranks = known_schedule(schedule, number, base.num_microbatches, count).stage_rank
    starts = starts or balanced(block_flops(graph, blocks, rules), number)
    recompute = {block.name: block.recompute for stage in base.stages for block in stage.blocks}
    layouts: dict[str, NodeLayout] = {}
    for stage in reversed(base.stages):
        layouts.update(stage.layouts)
    stages = []
    for (start, stop), rank in zip(pairwise((*starts, len(blocks.blocks))), ranks, strict=True):
        own = base.stages[rank]
        run = blocks.blocks[start:stop]
        stages.append(
            StagePlan(
                blocks=tuple(BlockPlan(b.name, b.kind, recompute[b.name]) for b in run),
                devices=own.devices,
                mesh=own.mesh,
                zero=own.zero,
                layouts=_needed(layouts, own, graph, blocks, range(start, stop)),
                prediction=StagePrediction({}, {}),
            )
        )
    return replace(base, schedule=schedule, stages=tuple(stages))


def _needed(
    layouts: dict[str, NodeLayout], own: StagePlan, graph: Graph, blocks: Blocks, run: range
) -> dict[str, NodeLayout]:
    """The layouts that a stage of these blocks needs, its batch inputs held as these want them."""
    found: dict[str, NodeLayout] = {}
    wants: dict[str, dict[Layout, None]] = {}
    for position in run:
        for name in blocks.blocks[position].nodes:
            key = name if name in layouts else blocks.template.get(name, name)
            found[key] = layouts[key]
            for ref, layout in zip(graph[name].inputs, layouts[key].inputs, strict=True):
                kind = graph[ref.name].kind
                if kind == "parameter":
                    held = ref.name if ref.name in layouts else blocks.template[ref.name]
                    found[held] = layouts[held]
                elif kind != "op":
                    wants.setdefault(ref.name, {})[boundary_layout(layout)] = None
    tensor_axes = [axis for axis, name in enumerate(own.mesh.axes) if name == "tp"]
    for name, wanted in wants.items():
        kind = graph[name].kind
        whole = tensor_axes if kind == "input" else []
        held_so = leaf_layout(tuple(wanted), kind == "buffer", whole)
        found[name] = NodeLayout((), (held_so,) * len(graph[name].outputs))
    return dict(sorted(found.items()))
