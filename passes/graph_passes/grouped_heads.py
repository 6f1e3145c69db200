"""Grouped heads: attention reads the heads of keys and values that exist.

With fewer heads of keys and values than of queries, a model repeats them for the attention, which
then reads copies as large as the queries. Attention without a mask reads each head for its group of
queries itself (``enable_gqa``); the copies and the sums of their gradients are not made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec
from ...planner.ops.attention import is_attention, is_grouped
from ...planner.ops.case import argument, packet
from ...planner.ops.catalog import spec_of
from .hoist import drop_dead

_HEADS = -3


@dataclass(frozen=True, slots=True)
class GroupHeads:
    """Graph pass that replaces keys and values with repeated heads by those heads."""

    name: str = "group-heads"

    def __call__(self, graph: Graph) -> Graph:
        nodes = graph.by_name
        changed = {node.name: _grouped(node, nodes) for node in graph.nodes if is_attention(node)}
        if all(nodes[name] is node for name, node in changed.items()):
            return graph
        return drop_dead(
            replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))
        )


def _grouped(node: Node, nodes: Mapping[str, Node]) -> Node:
    """Return the attention ``node`` with unrepeated heads of keys and values as its inputs, or
    ``node`` itself if it has a mask or no repeated heads."""
    if argument(node, 3, "attn_mask") is not None or is_grouped(node):
        return node
    query, key, value = node.inputs[:3]
    unrepeated = [_unrepeated(each, nodes) for each in (key, value)]
    heads = [ref for ref in unrepeated if ref is not None]
    shapes = [_spec(ref, nodes).shape for ref in (query, key, *heads)]
    if len(heads) < 2 or shapes[0][:2] != shapes[1][:2] or shapes[2][_HEADS] != shapes[3][_HEADS]:
        return node
    args = (query, *heads, *node.args[3:])
    return replace(node, args=args, kwargs={**node.kwargs, "enable_gqa": True})


def _spec(ref: Ref, nodes: Mapping[str, Node]) -> TensorSpec:
    return nodes[ref.name].outputs[ref.index]


def _is_reshape(node: Node) -> bool:
    is_op = node.kind in ("op", "constant") and bool(node.args)
    return is_op and (packet(node.op) == "clone" or spec_of(node).form == "reshape")


def _unrepeated(ref: Ref, nodes: Mapping[str, Node]) -> Ref | None:
    """Return the value of shape (batch, heads, length, size) of which ``ref`` has each head several
    times in a row; None if ``ref`` is computed in another way."""
    whole = _spec(ref, nodes)
    shape = whole.shape
    if len(shape) != 4:
        return None
    batch, wanted, length, size = shape
    shapes: list[tuple[int, ...]] = [shape]
    while _is_reshape(nodes[ref.name]):
        ref = nodes[ref.name].args[0]
        shapes.append(_spec(ref, nodes).shape)
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
    is_source = _spec(source, nodes) == replace(whole, shape=(batch, heads, length, size))
    return source if is_source else None
