"""A plan of one stage per rank cut into several, by the plan alone: what interleaved candidates
are compared with.

In: a plan, a schedule, the stages per rank, where they begin. Out: the plan of these stages, with
the layouts and ZeRO stages of the first; ``Evaluator`` prices it node by node, without the tables
of the search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise

from autoparallel.planner import ops as rules
from autoparallel.planner.evaluate.step import known_schedule
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.graph.layout import Layout, NodeLayout, boundary_layout
from autoparallel.planner.plan import BlockPlan, Plan, Recompute, StagePlan, StagePrediction
from autoparallel.planner.proposers.balanced import balanced, block_flops
from autoparallel.planner.schedules.schedules import find_schedule
from autoparallel.planner.search.report_plan import leaf_layout


def recut(
    base: Plan,
    graph: Graph,
    blocks: Blocks,
    schedule: str,
    chunks: int,
    *,
    starts: tuple[int, ...] | None = None,
) -> Plan:
    """``base`` cut into ``chunks`` times as many stages, placed as ``schedule`` places them.

    They begin with the blocks ``starts``, or so that the heaviest is as light as can be. All
    ranks have the layouts of the first stage that has a kind of block.
    """
    schedule, number = find_schedule(schedule).name, len(base.stages) * chunks
    ranks = known_schedule(schedule, number, base.num_microbatches, chunks).stage_rank
    starts = starts or balanced(block_flops(graph, blocks, rules), number)
    recompute = {block.name: block.recompute for stage in base.stages for block in stage.blocks}
    layouts: dict[str, NodeLayout] = {}
    for stage in reversed(base.stages):
        layouts.update(stage.layouts)
    stages = []
    for (start, stop), rank in zip(pairwise((*starts, len(blocks.blocks))), ranks, strict=True):
        base_stage = base.stages[rank]
        stages.append(
            StagePlan(
                blocks=tuple(
                    BlockPlan(block.name, block.kind, recompute[block.name])
                    for block in blocks.blocks[start:stop]
                ),
                devices=base_stage.devices,
                mesh=base_stage.mesh,
                zero=base_stage.zero,
                layouts=_needed(layouts, base_stage, graph, blocks, range(start, stop)),
                prediction=StagePrediction({}, {}),
            )
        )
    return replace(base, schedule=schedule, stages=tuple(stages))


def _needed(
    layouts: Mapping[str, NodeLayout], base: StagePlan, graph: Graph, blocks: Blocks, run: range
) -> dict[str, NodeLayout]:
    """The layouts that a stage of these blocks needs, its batch inputs held as these read them."""
    needed: dict[str, NodeLayout] = {}
    read_as: dict[str, dict[Layout, None]] = {}
    for position in run:
        for name in blocks.blocks[position].nodes:
            key = name if name in layouts else blocks.template.get(name, name)
            needed[key] = layouts[key]
            for ref, layout in zip(graph[name].inputs, layouts[key].inputs, strict=True):
                kind = graph[ref.name].kind
                if kind == "parameter":
                    held = ref.name if ref.name in layouts else blocks.template[ref.name]
                    needed[held] = layouts[held]
                elif kind != "op":
                    read_as.setdefault(ref.name, {})[boundary_layout(layout)] = None
    tensor_axes = [axis for axis, name in enumerate(base.mesh.axes) if name == "tp"]
    for name, read in read_as.items():
        kind = graph[name].kind
        whole = tensor_axes if kind == "input" else []
        layout = leaf_layout(tuple(read), kind == "buffer", whole)
        needed[name] = NodeLayout((), (layout,) * len(graph[name].outputs))
    return dict(sorted(needed.items()))


def recomputed(base: Plan, names: Collection[str], mode: Recompute) -> Plan:
    """The blocks of these names recomputed by ``mode``."""
    stages = []
    for stage in base.stages:
        blocks = tuple(
            replace(block, recompute=mode) if block.name in names else block
            for block in stage.blocks
        )
        stages.append(replace(stage, blocks=blocks))
    return replace(base, stages=tuple(stages))
