"""Matrix products and attention that every rank of an axis computes whole, as it divides none of
their dimensions: lines for reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..graph.graph import Graph, Node
from ..graph.layout import Mesh, NodeLayout
from .choices import input_specs
from .prices import Prices


def unsharded_ops(
    graph: Graph, nodes: Iterable[str], layouts: Mapping[str, NodeLayout], prices: Prices
) -> tuple[str, ...]:
    """Return a line for each matrix product or attention op and mesh axis for which every rank
    computes the whole op, as the axis size does not divide its dimensions. ``nodes``: names of
    ops."""
    found = []
    for name in nodes:
        node = graph[name]
        for axis, size in enumerate(prices.mesh.shape):
            if (
                size > 1
                and _is_whole_on(layouts[name], axis)
                and _is_kept_whole_by(node, graph, size, prices)
            ):
                found.append(_describe_undivided(node, graph, prices.mesh, axis))
    return tuple(found)


def _is_whole_on(layout: NodeLayout, axis: int) -> bool:
    return not any(each[axis].is_shard for each in (*layout.inputs, *layout.outputs))


def _is_kept_whole_by(node: Node, graph: Graph, size: int, prices: Prices) -> bool:
    """Return whether an op could be split on ``size`` ranks if that divided its dimensions."""
    work = prices.rules.work(node, input_specs(node, graph), node.outputs)
    if not work.flops_forward or work.family not in ("matmul", "attention", "conv"):
        return False
    anyhow, divided = (
        {each.label for each in prices.rules.axis_strategies(node, graph, of)} for of in (1, size)
    )
    return bool(anyhow - divided)


def _describe_undivided(node: Node, graph: Graph, mesh: Mesh, axis: int) -> str:
    shapes = ", ".join("×".join(map(str, graph.spec(ref).shape)) for ref in node.inputs)
    op = f"{node.op.split('.')[1]} of {node.module or node.name} is whole"
    return f"{op} on {mesh.axes[axis]}={mesh.shape[axis]}, which does not divide {shapes}"
