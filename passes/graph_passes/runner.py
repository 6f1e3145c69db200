"""Runs passes in order and checks the graph after each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ...planner.graph.graph import Graph


class Pass(Protocol):
    """Graph pass: a frozen dataclass with a name, which maps a graph to the changed graph when
    called."""

    @property
    def name(self) -> str: ...

    def __call__(self, graph: Graph) -> Graph: ...


class BrokenGraphError(AssertionError):
    """Error of a graph pass whose result violates an invariant of ``Graph``: a bug of this
    package."""


def run_passes(graph: Graph, passes: Iterable[Pass]) -> Graph:
    """Apply the passes to the graph in order; check the result of each pass that changes the
    graph."""
    for one in passes:
        before = graph
        graph = one(graph)
        if graph is not before:
            check(graph, one.name)
    return graph


def check(graph: Graph, after: str) -> None:
    """Raise ``BrokenGraphError``, which names the pass ``after``, if the graph violates an
    invariant of ``Graph``."""
    outputs: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for node in graph.nodes:
        problem = _problem(node.name, node.kind, node.op, outputs)
        for ref in node.inputs:
            if ref.index >= outputs.get(ref.name, 0):
                problem = f"uses {ref}, which no earlier node makes"
            elif node.kind == "constant" and kinds[ref.name] not in ("constant", "buffer"):
                problem = f"is a constant that depends on the {kinds[ref.name]} {ref.name!r}"
        if problem:
            raise BrokenGraphError(f"after pass {after!r}: node {node.name!r} {problem}")
        outputs[node.name] = len(node.outputs)
        kinds[node.name] = node.kind
    if graph.loss.index >= outputs.get(graph.loss.name, 0):
        raise BrokenGraphError(f"after pass {after!r}: no node makes the loss {graph.loss}")
    if graph.spec(graph.loss).numel != 1:
        raise BrokenGraphError(f"after pass {after!r}: the loss is not a scalar")
    for name, first in graph.tied.items():
        if first not in outputs or name in outputs:
            raise BrokenGraphError(f"after pass {after!r}: {name!r} is not tied to one node")


def _problem(name: str, kind: str, op: str, earlier: dict[str, int]) -> str:
    if name in earlier:
        return "appears twice"
    if kind in ("op", "constant") and not op:
        return "has no op"
    return ""
