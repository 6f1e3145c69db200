"""Cuts of the graph at stage boundaries: the values that cross, and their layouts.

A value goes from the stage that makes it to each stage that uses it. At a boundary it is only split
(S) or whole (I) on every axis: its producer turns R and P into I, and a user receives it in the
layout of its first op, with R and P read as I.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planner.errors import PlanError
from ...planner.graph.graph import Blocks, Graph, Ref, TensorSpec
from ...planner.graph.layout import Layout, NodeLayout, boundary_layout
from ...planner.plan import Plan, StagePlan
from .localize import parse_key, value_key


@dataclass(frozen=True, slots=True)
class Boundary:
    """Value that one pipeline stage sends to another; its gradient, if ``spec.requires_grad``, is
    sent back. The layouts are on the meshes of the source and of the target stage."""

    key: str
    source_stage: int
    target_stage: int
    spec: TensorSpec
    source_layout: Layout
    target_layout: Layout


def stage_ranges(plan: Plan) -> tuple[range, ...]:
    """Return for each stage of the plan the positions of its blocks among all blocks (layers)."""
    ranges, start = [], 0
    for stage in plan.stages:
        ranges.append(range(start, start + len(stage.blocks)))
        start += len(stage.blocks)
    return tuple(ranges)


def stage_of_node(blocks: Blocks, plan: Plan) -> dict[str, int]:
    """Return for each op node the index of its stage. Raises ``PlanError`` if the plan is for other
    blocks."""
    ranges = stage_ranges(plan)
    if ranges and ranges[-1].stop != len(blocks.blocks):
        raise PlanError(
            "AP524",
            "the plan was made for another division of the model into blocks",
            why=f"the plan has {ranges[-1].stop} blocks, the model {len(blocks.blocks)}",
            fix="plan again",
        )
    return {
        name: index
        for index, positions in enumerate(ranges)
        for position in positions
        for name in blocks.blocks[position].nodes
    }


def op_layout(stage: StagePlan, blocks: Blocks, name: str) -> NodeLayout:
    """Return the layout that the plan has for an op node. Raises ``PlanError`` if it has none."""
    found = stage.layout_of(name, blocks)
    if found is None:
        raise PlanError("AP525", f"the plan has no layout for {name}", fix="plan again")
    return found


def wanted_layouts(
    graph: Graph, blocks: Blocks, plan: Plan, stage_index: int
) -> dict[Ref, list[Layout]]:
    """Return for each value that a stage uses the layouts in which the stage's ops read it, in the
    order of the ops."""
    stage, wanted = plan.stages[stage_index], dict[Ref, list[Layout]]()
    for position in stage_ranges(plan)[stage_index]:
        for name in blocks.blocks[position].nodes:
            refs = graph[name].inputs
            inputs = op_layout(stage, blocks, name).inputs
            if len(refs) != len(inputs):
                raise PlanError("AP522", f"the plan's layout of {name} belongs to another op")
            for ref, layout in zip(refs, inputs, strict=True):
                wanted.setdefault(ref, []).append(layout)
    return wanted


def boundaries(graph: Graph, blocks: Blocks, plan: Plan) -> tuple[Boundary, ...]:
    """Return every value that is sent between stages, in the order of its node, then of the
    receiving stage."""
    stage_of = stage_of_node(blocks, plan)
    found: list[Boundary] = []
    for target in range(len(plan.stages)):
        for ref, layouts in wanted_layouts(graph, blocks, plan, target).items():
            source = stage_of.get(ref.name, target)
            if source == target:
                continue
            made = op_layout(plan.stages[source], blocks, ref.name).outputs[ref.index]
            found.append(
                Boundary(
                    value_key(ref),
                    source,
                    target,
                    graph.spec(ref),
                    boundary_layout(made),
                    boundary_layout(layouts[0]),
                )
            )
    order = {node.name: position for position, node in enumerate(graph)}
    found.sort(key=lambda b: (order[parse_key(b.key).name], b.key, b.target_stage))
    return tuple(found)


def with_replicas(found: tuple[Boundary, ...], num_stages: int) -> tuple[Boundary, ...]:
    """Return the values sent between stages of a pipeline, followed by the values of its replica (a
    second pipeline with the same weights), whose stages are numbered from ``num_stages`` on."""
    again = (
        replace(
            each,
            source_stage=each.source_stage + num_stages,
            target_stage=each.target_stage + num_stages,
        )
        for each in found
    )
    return (*found, *again)


def uses_by_block(graph: Graph, blocks: Blocks, positions: range) -> dict[Ref, tuple[int, ...]]:
    """Return for each value that ops of the blocks at ``positions`` use the positions of the blocks
    that use it."""
    uses: dict[Ref, dict[int, None]] = {}
    for position in positions:
        for name in blocks.blocks[position].nodes:
            for ref in graph[name].inputs:
                uses.setdefault(ref, {})[position] = None
    return {ref: tuple(found) for ref, found in uses.items()}
