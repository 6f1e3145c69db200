"""Hoisting: values that depend on no input and no parameter become constants.

Each process computes constants for itself, so they never cross a stage boundary, take any layout
for free, and belong to no block. Equal constants are merged. Random ops are never constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...planner.graph.graph import Graph, Node, Ref, map_refs
from ..ops.torch_ops import is_random


@dataclass(frozen=True, slots=True)
class Hoist:
    """Graph pass that finds constants, joins equal constants, and drops nodes that neither the loss
    nor a buffer's new value depends on."""

    name: str = "hoist"

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(join_constants(hoist_constants(graph)))


def hoist_constants(graph: Graph) -> Graph:
    """Turn every op that depends on no input, parameter or random number into a ``constant`` node.
    A constant has one output, so each further output of the op becomes a constant of its own."""
    free = {
        node.name
        for node in graph.nodes
        if node.kind in ("buffer", "constant") and node.name not in graph.updates
    }
    nodes: list[Node] = []
    parts: dict[Ref, Ref] = {}
    dims = dict(graph.batch_dims)

    for node in graph.nodes:
        node = _redirected(node, parts)
        is_constant = _is_constant(node, free)
        nodes.append(replace(node, kind="constant") if is_constant else node)
        if not is_constant:
            continue
        free.add(node.name)
        for index, spec in enumerate(node.outputs[1:], start=1):
            name, ref = f"{node.name}_part{index}", Ref(node.name, index)
            own = Node(name, "constant", "aten.alias.default", (ref,), {}, (spec,))
            nodes.append(replace(own, module=node.module, source=node.source))
            parts[ref] = Ref(name)
            free.add(name)
            if node.name in dims:
                dims[name] = dims[node.name][index : index + 1]
    updates = {name: parts.get(ref, ref) for name, ref in graph.updates.items()}
    loss = parts.get(graph.loss, graph.loss)
    return replace(graph, nodes=tuple(nodes), loss=loss, updates=updates, batch_dims=dims)


def join_constants(graph: Graph) -> Graph:
    """Replace each constant by the first constant with equal op, arguments and batch dimensions:
    layers often make the same table, or the same empty tensor."""
    first: dict[str, Ref] = {}
    joined: dict[Ref, Ref] = {}
    nodes: list[Node] = []

    for node in graph.nodes:
        node = _redirected(node, joined)
        if node.kind == "constant" and node.op:
            how = node.op, node.args, node.kwargs, node.outputs, graph.batch_dims.get(node.name)
            joined[Ref(node.name)] = kept = first.setdefault(repr(how), Ref(node.name))
            if kept.name != node.name:
                continue
        nodes.append(node)
    dims = {n.name: graph.batch_dims[n.name] for n in nodes if n.name in graph.batch_dims}
    updates = {name: joined.get(ref, ref) for name, ref in graph.updates.items()}
    loss = joined.get(graph.loss, graph.loss)
    return replace(graph, nodes=tuple(nodes), loss=loss, updates=updates, batch_dims=dims)


def _redirected(node: Node, moved: Mapping[Ref, Ref]) -> Node:
    """Return a node that reads new values in place of old: ``moved`` maps old to new."""
    if moved.keys().isdisjoint(node.inputs):
        return node

    def now(ref: Ref) -> Ref:
        return moved.get(ref, ref)

    return replace(node, args=map_refs(node.args, now), kwargs=map_refs(node.kwargs, now))


def _is_constant(node: Node, free: set[str]) -> bool:
    if node.kind != "op" or is_random(node.op):
        return False
    return all(ref.name in free for ref in node.inputs)


def drop_dead(graph: Graph) -> Graph:
    """Remove the nodes that neither the loss nor a new value of a buffer depends on.

    >>> from autoparallel.planner.graph.graph import Ref, TensorSpec
    >>> scalar = (TensorSpec((), "float32"),)
    >>> nodes = (Node("x", "input", outputs=scalar), Node("y", "input", outputs=scalar))
    >>> [node.name for node in drop_dead(Graph(nodes, Ref("x"), 1)).nodes]
    ['x']
    """
    live = {graph.loss.name, *(ref.name for ref in graph.updates.values())}
    for node in reversed(graph.nodes):
        if node.name in live:
            live.update(ref.name for ref in node.inputs)
    nodes = tuple(node for node in graph.nodes if node.name in live)
    if len(nodes) == len(graph.nodes):
        return graph
    tied = {name: first for name, first in graph.tied.items() if first in live}
    return replace(graph, nodes=nodes, tied=tied)
