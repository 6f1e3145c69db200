"""Hoist: what depends on no input and no parameter becomes a constant.

Each process computes constants for itself, so they never cross a stage boundary, take any
layout for nothing, and belong to no block. Constants that are made alike are one, which is held
once. Random ops are never constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planner.graph import Graph, Node, Ref, map_refs
from ..ops.torch_ops import is_random


@dataclass(frozen=True, slots=True)
class Hoist:
    """Marks constants, joins equal ones, and drops what the loss does not depend on."""

    name: str = "hoist"

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(join_constants(hoist_constants(graph)))


def hoist_constants(graph: Graph) -> Graph:
    """Make a ``constant`` of every op that depends on no input and no parameter.

    Constants are held by name, so each further output of an op becomes a constant of its own.
    """
    free = {
        node.name
        for node in graph.nodes
        if node.kind in ("buffer", "constant") and node.name not in graph.updates
    }
    nodes: list[Node] = []
    parts: dict[Ref, Ref] = {}
    dims = dict(graph.batch_dims)

    def part(ref: Ref) -> Ref:
        return parts.get(ref, ref)

    for node in graph.nodes:
        if not parts.keys().isdisjoint(node.inputs):
            node = replace(node, args=map_refs(node.args, part), kwargs=map_refs(node.kwargs, part))
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
    updates = {name: part(ref) for name, ref in graph.updates.items()}
    return replace(
        graph, nodes=tuple(nodes), loss=part(graph.loss), updates=updates, batch_dims=dims
    )


def join_constants(graph: Graph) -> Graph:
    """Let the first of the constants of one op, arguments and dimensions of the batch stand for
    all: each layer may make the same table, or the same empty tensor to write to."""
    first: dict[str, Ref] = {}
    joined: dict[Ref, Ref] = {}
    nodes: list[Node] = []

    def left(ref: Ref) -> Ref:
        return joined.get(ref, ref)

    for node in graph.nodes:
        if not joined.keys().isdisjoint(node.inputs):
            node = replace(node, args=map_refs(node.args, left), kwargs=map_refs(node.kwargs, left))
        if node.kind == "constant" and node.op:
            how = node.op, node.args, node.kwargs, node.outputs, graph.batch_dims.get(node.name)
            here = Ref(node.name)
            joined[here] = first.setdefault(repr(how), here)
            if joined[here] != here:
                continue
        nodes.append(node)
    names = {node.name for node in nodes}
    return replace(
        graph, nodes=tuple(nodes), loss=left(graph.loss),
        updates={name: left(ref) for name, ref in graph.updates.items()},
        batch_dims={name: dims for name, dims in graph.batch_dims.items() if name in names},
    )  # fmt: skip


def _is_constant(node: Node, free: set[str]) -> bool:
    if node.kind != "op" or is_random(node.op):
        return False
    return all(ref.name in free for ref in node.inputs)


def drop_dead(graph: Graph) -> Graph:
    """The graph without the nodes that the loss does not depend on.

    >>> from autoparallel.planner.graph import Ref, TensorSpec
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
