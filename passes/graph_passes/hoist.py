"""Hoist: what depends on no input and no parameter becomes a constant.

Each process computes constants for itself, so they never cross a stage boundary, take any
layout for nothing, and belong to no block. Random ops are never constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planner.graph import Graph, Node
from ..ops.torch_ops import is_random


@dataclass(frozen=True, slots=True)
class Hoist:
    """Marks constants, and drops what the loss does not depend on."""

    name: str = "hoist"

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(hoist_constants(graph))


def hoist_constants(graph: Graph) -> Graph:
    """The graph with every input-independent, parameter-free op node made a ``constant``."""
    free = {
        node.name
        for node in graph.nodes
        if node.kind in ("buffer", "constant") and node.name not in graph.updates
    }
    nodes = []
    for node in graph.nodes:
        if _is_constant(node, free):
            node = replace(node, kind="constant")
            free.add(node.name)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


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
