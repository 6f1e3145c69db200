"""The collectives of one micro-batch under a plan, one by one, from its layouts alone.

In: a graph, its blocks, a plan of it. Out: for every conversion of a value, and every
collective inside an op, its kind, bytes, axis and direction. As in the runtime, a value is
converted once per block and target. What ZeRO and gradient sums send is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autoparallel.planner import ops as rules
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Ref
from autoparallel.planner.graph.layout import (
    BALANCED,
    INVARIANT,
    Layout,
    NodeLayout,
    balanced_axes,
    conversion_steps,
)
from autoparallel.planner.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Collective:
    """``num_bytes`` of the tensor that is whole on the axis, local on the others."""

    kind: str
    num_bytes: int
    axis: str
    direction: str
    value: str
    block: str


def collectives(graph: Graph, blocks: Blocks, plan: Plan) -> list[Collective]:
    """Of the forward and the backward of one micro-batch, over all stages."""
    if graph.batch_size != plan.microbatch_size:
        graph = graph.with_batch_size(plan.microbatch_size)
    found: list[Collective] = []
    at = 0
    for stage in plan.stages:
        walk = _Walk(graph, blocks, stage)
        for block in blocks.blocks[at : at + len(stage.blocks)]:
            found += walk.block(block)
        at += len(stage.blocks)
    return found


class _Walk:
    def __init__(self, graph: Graph, blocks: Blocks, stage: StagePlan) -> None:
        self.graph, self.blocks, self.stage = graph, blocks, stage
        self.received: dict[Ref, Layout] = {}
        self.seen: set[str] = set()

    def layout(self, name: str) -> NodeLayout:
        layouts = self.stage.layouts
        return layouts[name] if name in layouts else layouts[self.blocks.template[name]]

    def block(self, block: Block) -> Iterator[Collective]:
        wanted: dict[tuple[Ref, Layout], None] = {}
        self.seen.update(block.nodes)
        for name in block.nodes:
            yield from self._inside(name, block)
            layout = self.layout(name)
            for ref, target in zip(self.graph[name].inputs, layout.inputs, strict=True):
                wanted[ref, target] = None
        for ref, target in wanted:
            yield from self._conversion(ref, target, block)

    def _inside(self, name: str, block: Block) -> Iterator[Collective]:
        """What an op sends for itself: a split loss, a split softmax."""
        node, layout = self.graph[name], self.layout(name)
        mesh = self.stage.mesh
        for axis, size in enumerate(mesh.shape):
            if size == 1:
                continue
            ends = (tuple(x[axis] for x in layout.inputs), tuple(x[axis] for x in layout.outputs))
            ways = [
                way
                for way in rules.axis_strategies(node, self.graph, size)
                if (way.inputs, way.outputs) == ends
                and (way.label == BALANCED) == (axis in balanced_axes(layout))
            ]
            for item in min(ways, key=lambda way: len(way.collectives)).collectives if ways else ():
                direction = "backward" if item.backward else "forward"
                yield Collective(
                    item.kind, item.num_bytes, mesh.axes[axis], direction, name, block.name
                )

    def _source(self, ref: Ref, target: Layout) -> Layout | None:
        kind = self.graph[ref.name].kind
        if kind in ("input", "constant", "buffer"):
            return None
        if kind == "op" and ref.name not in self.seen:
            at_boundary = tuple(each if each.is_shard else INVARIANT for each in target)
            return self.received.setdefault(ref, at_boundary)
        return self.layout(ref.name).outputs[ref.index]

    def _conversion(self, ref: Ref, target: Layout, block: Block) -> Iterator[Collective]:
        source = self._source(ref, target)
        if source is None:
            return
        spec, mesh = self.graph.spec(ref), self.stage.mesh
        current = list(source)
        for step in conversion_steps(source, target):
            whole = spec.num_bytes // prod(
                size
                for axis, size in enumerate(mesh.shape)
                if axis != step.axis and current[axis].is_shard
            )
            for direction, kind in zip(("forward", "backward"), step.collectives, strict=True):
                is_sent = kind is not None and mesh.shape[step.axis] > 1
                if is_sent and (direction == "forward" or spec.requires_grad):
                    axis = mesh.axes[step.axis]
                    yield Collective(kind, whole, axis, direction, ref.name, block.name)
            current[step.axis] = step.target
