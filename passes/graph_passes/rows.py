"""Rows looked up by their own number: ``x[arange(batch), i]`` becomes a look-up in each row.

Indexing does not show which row goes where, so a batch could not be split through it. If the first
index is the constant ``0, 1, ..., batch - 1`` along the batch, the op is, with ``x`` of shape
(batch, length, *rest):

- ``reshape(x)`` if ``i`` is the constant ``0 ... length - 1``: an attention mask laid out;
- ``index(x, [None, i])`` if ``i`` is the same for all rows;
- ``gather(x, 1, i)`` otherwise: the last token of each row, for a classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec
from ..programs.constants import evaluate_constants
from .hoist import drop_dead
from .masks import can_evaluate

INDEX = "aten.index.Tensor"


@dataclass(frozen=True, slots=True)
class AlignRows:
    """Graph pass that turns ``x[arange(batch), i]`` into look-ups within each row; ``buffers`` maps
    names of buffers to their values, if known."""

    name: str = "align-rows"
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(align_rows(graph, self.buffers))


def align_rows(graph: Graph, buffers: Mapping[str, Tensor]) -> Graph:
    """Replace ``x[arange(batch), i]`` by look-ups of ``i`` within each row of ``x``, so that the op
    can be sharded over rows."""
    if not any(_may_align(node, graph) for node in graph.nodes):
        return graph
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _aligned(node, graph, buffers) if _may_align(node, graph) else (node,)
    return replace(graph, nodes=tuple(nodes))


def _may_align(node: Node, graph: Graph) -> bool:
    if node.kind != "op" or node.op != INDEX or len(node.args[1]) != 2:
        return False
    rows, other = node.args[1]
    if not (isinstance(rows, Ref) and isinstance(other, Ref)):
        return False
    is_batch = graph.spec(node.args[0]).shape[0] == graph.batch_size == node.spec.shape[0]
    return is_batch and graph.spec(other).dtype in ("int64", "int32")


def _aligned(node: Node, graph: Graph, buffers: Mapping[str, Tensor]) -> tuple[Node, ...]:
    rows, other = node.args[1]
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        graph.spec(rows).shape, graph.spec(other).shape
    )
    wanted = torch.arange(graph.batch_size).reshape(-1, *(1 for _ in shape[1:]))
    found = _value(graph, rows, buffers)
    if found is None or not torch.equal(found.expand(shape), wanted.expand(shape)):
        return (node,)
    value = _value(graph, other, buffers)
    if value is None and graph.batch_size == 1:
        return (node,)
    if value is None:
        return _gathered(node, graph, other, tuple(shape))
    value = value.expand(shape)
    if not torch.equal(value, value[:1].expand(shape)):
        return (node,)
    if torch.equal(value[0].flatten(), torch.arange(graph.spec(node.args[0]).shape[1])):
        return (replace(node, op="aten.reshape.default", args=(node.args[0], node.spec.shape)),)
    return (node,) if graph.batch_size == 1 else _indexed(node, graph, other, len(shape))


def _value(graph: Graph, ref: Ref, buffers: Mapping[str, Tensor]) -> Tensor | None:
    if graph[ref.name].kind != "constant" or not can_evaluate(graph, ref.name, buffers):
        return None
    return evaluate_constants(graph, [ref.name], device="cpu", buffers=buffers)[ref.name]


def _indexed(node: Node, graph: Graph, other: Ref, rank: int) -> tuple[Node, ...]:
    """Return nodes that compute ``index(x, [None, i])`` in place of ``node``, where ``i`` is the
    index ``other``, equal for all rows, without its batch dimension. ``rank``: number of dimensions
    of the broadcast index."""
    made: list[Node] = []
    spec = graph.spec(other)
    if len(spec.shape) == rank:
        row = _step(
            node, "row", "aten.select.int", (other, 0, 0), replace(spec, shape=spec.shape[1:])
        )
        made.append(replace(row, kind="constant"))
        other = Ref(row.name)
    return (*made, replace(node, args=(node.args[0], [None, other])))


def _gathered(node: Node, graph: Graph, other: Ref, shape: tuple[int, ...]) -> tuple[Node, ...]:
    """Return nodes that compute ``gather(x, 1, i)`` in place of ``node``, where ``i`` is the index
    ``other``, of ``shape``, expanded to the dimensions 2 and up of ``x``."""
    source = graph.spec(node.args[0])
    if graph.spec(other).shape != shape:
        return (node,)
    rest = source.shape[2:]
    count = 1
    for size in shape[1:]:
        count *= size
    index = replace(graph.spec(other), shape=(shape[0], count, *(1 for _ in rest)))
    flat = _step(node, "index", "aten.reshape.default", (other, index.shape), index)
    wide = replace(index, shape=(shape[0], count, *rest))
    spread = _step(node, "spread", "aten.expand.default", (Ref(flat.name), wide.shape), wide)
    picked = _step(
        node,
        "picked",
        "aten.gather.default",
        (node.args[0], 1, Ref(spread.name)),
        replace(source, shape=wide.shape),
    )
    laid_out = replace(node, op="aten.reshape.default", args=(Ref(picked.name), node.spec.shape))
    return flat, spread, picked, laid_out


def _step(node: Node, suffix: str, op: str, args: tuple[object, ...], spec: TensorSpec) -> Node:
    return Node(
        f"{node.name}_{suffix}", "op", op, args, {}, (spec,), module=node.module, source=node.source
    )
