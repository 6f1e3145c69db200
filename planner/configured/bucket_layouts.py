"""Layouts of a bucket: batches of shorter sequences, over the parameters of a planned step.

In: a micro-batch of the bucket, cut from the planned one, with the plan's layouts. Out: the same
with the faster of two sets of layouts. In the plan's an axis ``cp`` splits positions; in the other
it splits rows, as an axis ``dp`` does, so that attention needs nothing of other ranks. In both
every parameter and buffer is held in the plan's layout, and stages, ZeRO and recomputation are the
plan's, so that programs of both run over the same states. Prices are ``evaluate``'s.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from ..costs.basis import DEFAULT, Basis
from ..costs.choices import Restriction, divides_all, input_specs
from ..costs.precision import with_precision
from ..costs.price_cache import PriceCache
from ..evaluate.evaluate import Evaluator, stage_prices
from ..graph.graph import Blocks, Graph
from ..graph.layout import REPLICATE, NodeLayout
from ..inter_op.submesh import restriction
from ..intra_op.intra_op import IntraOp, Limits
from ..plan import Plan, StagePlan
from ..requests.goal import Budget
from ..requests.pins import Pin
from ..requests.request import Forced
from ..search.report_plan import stage_layouts
from ..stage.stage_model import StageModel
from ..stage.structure import Structure
from ..variants.sequence_slices import SequenceSlice


def with_fastest_layouts(
    given: SequenceSlice, blocks: Blocks, basis: Basis = DEFAULT
) -> SequenceSlice:
    """Return the micro-batch ``given`` of a bucket with the plan's layouts, or with an axis ``cp``
    that splits rows if this is faster and needs no more memory than the plan's layouts or the
    devices have. ``blocks``: of the planned micro-batch."""
    if not given.graph.batch_dims:
        return given
    pairs = zip(given.blocks.blocks, blocks.blocks, strict=True)
    alike = Blocks(tuple(replace(own, kind=planned.kind) for own, planned in pairs))
    graph = with_precision(_with_batch_dims(given.graph), given.plan.model.precision)
    plan = _by_rows(Structure(graph, alike), given, basis)
    if plan is None:
        return given
    if all(layouts_divide(graph, given.blocks, stage) for stage in given.plan.stages):
        as_planned, found = (
            Evaluator(graph, own, basis=basis).evaluation(each, plan.cluster)
            for own, each in ((given.blocks, given.plan), (alike, plan))
        )
        most = max(as_planned.peak_memory_bytes, plan.cluster.usable_memory_bytes)
        if found.step_seconds >= as_planned.step_seconds or found.peak_memory_bytes > most:
            return given
    return replace(given, blocks=alike, plan=plan)


def layouts_divide(graph: Graph, blocks: Blocks, stage: StagePlan) -> bool:
    """Return whether the stage's layouts split all tensors of ``graph`` evenly."""
    values = (node for node in graph if node.kind in ("op", "input"))
    pairs = ((node, stage.layout_of(node.name, blocks)) for node in values)
    return all(
        layout is None
        or divides_all(layout, input_specs(node, graph), node.outputs, stage.mesh.shape)
        for node, layout in pairs
    )


def _with_batch_dims(graph: Graph) -> Graph:
    """Return a graph with the batch dimensions of the nodes that a slice has added. Of these each
    has one input, whose dimensions it keeps but for one, which it may cut, or open into three."""
    dims = dict(graph.batch_dims)
    for node in graph:
        if node.name not in dims:
            ref, shape = node.inputs[0], node.spec.shape
            (before, row) = graph.spec(ref).shape, dims[ref.name][ref.index]
            pairs = enumerate(zip(before, shape, strict=False))
            same = next((at for at, (old, new) in pairs if old != new), len(before))
            if row is not None and row > same:
                row += len(shape) - len(before)
            dims[node.name] = (row if shape else None,)
    return replace(graph, batch_dims=dims)


def _by_rows(structure: Structure, given: SequenceSlice, basis: Basis) -> Plan | None:
    """Return the bucket's plan whose axes ``cp`` split rows; None without such an axis, where rows
    are too few, or where parameters would need other layouts."""
    plan, stages = given.plan, []
    bounds = pairwise(accumulate((len(stage.blocks) for stage in plan.stages), initial=0))
    has_others = any(stage.shares or stage.placements for stage in plan.stages)
    if has_others or not any("cp" in stage.mesh.axes for stage in plan.stages):
        return None
    for index, run in enumerate(bounds):
        stage = plan.stages[index]
        axes = restriction(stage.mesh, Forced())
        rows = (*axes.split_batch, *axes.split_positions)
        if plan.microbatch_size % stage.mesh.num_ranks([*rows, *axes.split_experts]):
            return None
        axes = replace(axes, split_batch=rows, split_positions=())
        layouts = _solved(structure, given, index, run, axes, basis)
        if layouts is None:
            return None
        own = zip(stage.blocks, structure.blocks.blocks[slice(*run)], strict=True)
        kinds = tuple(replace(block, kind=of.kind) for block, of in own)
        stages.append(replace(stage, layouts=layouts, blocks=kinds))
    return replace(plan, stages=tuple(stages))


def _solved(
    structure: Structure,
    given: SequenceSlice,
    index: int,
    run: tuple[int, int],
    axes: Restriction,
    basis: Basis,
) -> dict[str, NodeLayout] | None:
    """Return the fastest layouts of stage ``index`` (blocks ``run``) on meshes used as ``axes``
    says, with parameters and buffers as planned; None if that is not possible."""
    plan, graph = given.plan, structure.graph
    stage = plan.stages[index]
    leaves = (node for node in graph if node.kind in ("parameter", "buffer"))
    planned = {node.name: stage.layout_of(node.name, given.blocks) for node in leaves}
    held = {name: each for name, each in planned.items() if each is not None}
    pins = {
        structure.parameter_key(name): tuple(
            Pin(name, placement if placement.is_shard else REPLICATE, axis)
            for placement, axis in zip(each.outputs[0], stage.mesh.axes, strict=True)
        )
        for name, each in held.items()
        if graph[name].kind == "parameter"
    }
    prices = stage_prices(plan, stage, (), PriceCache(), basis=basis)
    link = plan.cluster.send_link(plan.stages[index - 1].devices, stage.devices)
    model = StageModel(structure, prices, replace(axes, pins=pins), link)
    solver = IntraOp(model, Limits(float("inf"), (stage.zero,), "none"), Budget.of(float("inf")))
    answer = solver.best(structure.run(*run), plan.num_microbatches, 1)
    assert answer is not None, "no limit of memory or time can be exceeded"
    layouts = stage_layouts(structure, model, answer, run)
    layouts |= {name: each for name, each in held.items() if graph[name].kind == "buffer"}
    solved = {name: structure.blocks.entry(layouts, name) for name in held}
    is_same = all(each is None or each.outputs == held[n].outputs for n, each in solved.items())
    return layouts if is_same else None
