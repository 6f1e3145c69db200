"""What a mesh axis could not divide: products and attention that run whole on each of its ranks.

In: a stage's layouts. Out: a line for each op that does real work, is whole on an axis, and
could be split there if its sizes were multiples of the axis' size (3 heads over 2 ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..graph import Graph, Node
from ..layout import Mesh, NodeLayout
from .choices import input_specs
from .prices import Prices


def undivided(
    graph: Graph, nodes: Iterable[str], layouts: Mapping[str, NodeLayout], prices: Prices
) -> tuple[str, ...]:
    """One line per op of ``nodes`` and axis; ``nodes`` are templates' names."""
    found = []
    for name in nodes:
        node = graph[name]
        for axis, size in enumerate(prices.mesh.shape):
            if size > 1 and _is_whole(layouts[name], axis) and _could(node, graph, size, prices):
                found.append(_line(node, graph, prices.mesh, axis))
    return tuple(found)


def _is_whole(layout: NodeLayout, axis: int) -> bool:
    return not any(each[axis].is_shard for each in (*layout.inputs, *layout.outputs))


def _could(node: Node, graph: Graph, size: int, prices: Prices) -> bool:
    """Whether the axis' size, and nothing else, keeps an op that does work from some split."""
    work = prices.rules.work(node, input_specs(node, graph), node.outputs)
    if not work.flops_forward or work.family not in ("matmul", "attention", "conv"):
        return False
    anyhow, divided = (
        {each.label for each in prices.rules.axis_strategies(node, graph, of)} for of in (1, size)
    )
    return bool(anyhow - divided)


def _line(node: Node, graph: Graph, mesh: Mesh, axis: int) -> str:
    shapes = ", ".join("×".join(map(str, graph.spec(ref).shape)) for ref in node.inputs)
    op = node.op.split(".")[1]
    where = f"{mesh.axes[axis]}={mesh.shape[axis]}"
    return f"{op} of {node.module or node.name} is whole on {where}, which does not divide {shapes}"
