"""Causal attention that is written out as separate ops, as attention with dropout is.

In: a graph. Out: the nodes of each such attention: transposed keys, scores (queries times keys), a
fill of later positions with minus infinity, softmax, dropout, and the product with the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..graph.graph import Graph, Node, Ref
from ..ops.case import argument

DROPOUT = "autoparallel.counter_dropout.default"


@dataclass(frozen=True, slots=True)
class WrittenAttention:
    """Names of the nodes of an attention that is written in separate ops: transposed keys, scores,
    masked scores, softmax, dropout, product with values. ``columns``: nodes with a dimension of key
    positions."""

    keys: str
    scores: str
    masked: str
    softmax: str
    dropped: str
    product: str

    @property
    def columns(self) -> tuple[str, ...]:
        return self.keys, self.scores, self.masked, self.softmax, self.dropped


def find_written(graph: Graph) -> tuple[WrittenAttention, ...]:
    """Return the causal attentions of a graph that are written out in separate ops."""
    return tuple(_written(graph))


def _written(graph: Graph) -> Iterator[WrittenAttention]:
    for node in graph:
        if node.op != "aten.masked_fill.Scalar" or argument(node, 2, "value", 0) != -math.inf:
            continue
        scores = graph[node.inputs[0].name]
        if scores.op != "aten.matmul.default" or not _is_causal(graph, node.inputs[1]):
            continue
        keys = graph[scores.inputs[1].name]
        softmax = _only_user(graph, node, "aten.softmax.int")
        dropped = softmax and _only_user(graph, softmax, DROPOUT)
        product = dropped and _only_user(graph, dropped, "aten.matmul.default")
        if softmax is None or dropped is None or product is None:
            continue
        is_last = argument(softmax, 1, "dim", 0) in (-1, len(softmax.spec.shape) - 1)
        is_read_alone = all(len(graph.users[each.name]) == 1 for each in (keys, scores))
        is_first = product.inputs[0].name == dropped.name
        if is_last and is_read_alone and is_first and _swaps_last(graph, keys):
            yield WrittenAttention(
                keys.name, scores.name, node.name, softmax.name, dropped.name, product.name
            )


def _only_user(graph: Graph, node: Node, op: str) -> Node | None:
    """Return the only node that reads ``node``, if its op is ``op``; else None."""
    users = graph.users[node.name]
    return graph[users[0]] if len(users) == 1 and graph[users[0]].op == op else None


def _swaps_last(graph: Graph, node: Node) -> bool:
    """Return whether a node swaps the last two dimensions of its input."""
    if node.op != "aten.transpose.int":
        return False
    count = len(node.spec.shape)
    dims = {argument(node, at, f"dim{at - 1}", 0) % count for at in (1, 2)}
    return dims == {count - 2, count - 1}


def _is_causal(graph: Graph, mask: Ref) -> bool:
    """Return whether a mask marks the entries above a square's diagonal (later positions)."""
    flipped = graph[mask.name]
    if flipped.op != "aten.logical_not.default":
        return False
    lower = graph[flipped.inputs[0].name]
    if lower.op != "aten.tril.default" or argument(lower, 1, "diagonal", 0) != 0:
        return False
    rows, *columns = lower.spec.shape
    return graph[lower.inputs[0].name].op == "aten.ones.default" and columns == [rows]
