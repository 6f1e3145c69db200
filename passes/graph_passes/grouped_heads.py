"""Grouped heads: attention reads the heads of keys and values that exist.

With fewer heads of keys and values than of queries, a model repeats them for the attention, which
then reads copies as large as the queries. Attention without a mask reads each head for its group of
queries itself (``enable_gqa``); the copies and the sums of their gradients are not made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...planner.graph.graph import Graph, Node, Ref
from ...planner.ops.case import argument, packet
from ...planner.ops.catalog import spec_of
from .hoist import drop_dead
from .masks import SDPA

_HEADS = -3


@dataclass(frozen=True, slots=True)
class GroupHeads:
    """Graph pass that replaces keys and values with repeated heads by those heads."""

    name: str = "group-heads"

    def __call__(self, graph: Graph) -> Graph:
        nodes = graph.by_name
        changed = {node.name: _grouped(node, nodes) for node in graph.nodes if node.op == SDPA}
        if all(nodes[name] is node for name, node in changed.items()):
            return graph
        return drop_dead(
            replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))
        )


def _grouped(node: Node, nodes: Mapping[str, Node]) -> Node:
    """Return the attention that reads unrepeated heads; ``node`` itself if it has a mask, or other
    keys or values."""
    query, key, value, *rest = node.args
    if (rest and rest[0] is not None) or any(
        node.kwargs.get(name) for name in ("attn_mask", "enable_gqa")
    ):
        return node
    heads = [_unrepeated(each, nodes) for each in (key, value)]
    if None in heads:
        return node
    sizes = [nodes[each.name].outputs[each.index].shape for each in heads if each is not None]
    if sizes[0][_HEADS] != sizes[1][_HEADS]:
        return node
    return replace(node, args=(query, *heads, *rest), kwargs={**node.kwargs, "enable_gqa": True})


def _is_reshape(node: Node) -> bool:
    is_op = node.kind in ("op", "constant") and bool(node.args)
    return is_op and (packet(node.op) == "clone" or spec_of(node).form == "reshape")


def _unrepeated(ref: Ref, nodes: Mapping[str, Node]) -> Ref | None:
    """Return the value (batch, heads, length, size) whose heads ``ref`` repeats, each for a group
    of successive heads; None if it is computed in another way."""
    shape = nodes[ref.name].outputs[ref.index].shape
    if len(shape) != 4:
        return None
    batch, wanted, length, size = shape
    shapes: list[tuple[int, ...]] = [shape]
    while _is_reshape(nodes[ref.name]):
        ref = nodes[ref.name].args[0]
        shapes.append(nodes[ref.name].outputs[ref.index].shape)
    node = nodes[ref.name]
    if packet(node.op) == "repeat_interleave" and node.op.endswith("self_int"):
        dim = argument(node, 2, "dim")
        is_of_heads = dim in (1, _HEADS) and set(shapes) == {shape}
        return node.args[0] if is_of_heads and isinstance(node.args[1], int) else None
    if packet(node.op) != "expand" or len(shapes[-1]) != 5:
        return None
    heads, number = shapes[-1][1:3]
    repeated = (batch, heads, number, length, size)
    one = nodes[node.args[0].name]
    if set(shapes) != {shape, repeated} or heads * number != wanted:
        return None
    if packet(one.op) != "unsqueeze" or one.args[1] not in (2, _HEADS):
        return None
    source: Ref = one.args[0]
    is_source = nodes[source.name].outputs[source.index].shape == (batch, heads, length, size)
    return source if is_source else None
