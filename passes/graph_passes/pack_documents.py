"""Masks of packed documents, which depend on a batch, become an argument of attention.

A sequence of several documents has a mask that is a conjunction: a band that is causal, perhaps
with a window, and ``ids[b, i] == ids[b, j]``, where ``ids`` numbers the documents. Attention then
takes ``ids``, one number for each position, instead of a mask of all pairs of positions
(``ops.documents``). Every position sees itself.

Hugging Face models compute ``ids`` from the positions within documents, as the running sum of
``diff(positions) != 1``, and compare these positions, too. Two positions with the same id have no
restart between them, so their difference is that of their places in the sequence: a comparison of
positions is the band that it is for positions that count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref
from ...planner.ops.case import argument, packet
from ...planner.ops.catalog import spec_of
from .hoist import drop_dead
from .mask_comparisons import COMPARISONS, Band, comparison_band, least, terms
from .masks import WINDOWED, band_of_constant, mask_of, without_mask


@dataclass(frozen=True, slots=True)
class PackDocuments:
    """Graph pass that replaces masks of packed documents by the ids of documents; ``buffers`` maps
    names of buffers to their values, if known."""

    name: str = "pack-documents"
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, graph: Graph) -> Graph:
        found = {node.name: _packed(graph, node, self.buffers) for node in graph.nodes}
        masks = {name: mask for name, mask in found.items() if mask is not None}
        if not masks:
            return graph
        ids = {mask.ids: _with_dims(graph, mask.ids) for mask in masks.values()}
        nodes: list[Node] = []
        for node in graph.nodes:
            mask = masks.get(node.name)
            nodes.append(node if mask is None else _within(node, mask, ids[mask.ids]))
            own = (each for ref, each in ids.items() if ref.name == node.name)
            nodes.extend(each for each in own if each is not node)
        return drop_dead(replace(graph, nodes=tuple(nodes)))


class PackedMask(NamedTuple):
    """Mask of packed documents: its window (0: none), and the operand with ids along columns."""

    window: int
    ids: Ref


def _with_dims(graph: Graph, ids: Ref) -> Node:
    """Return the node of ids (rows, 1, 1, positions), which a new node has if they have another
    shape."""
    spec = graph.spec(ids)
    shape = (spec.numel // spec.shape[-1], 1, 1, spec.shape[-1])
    if spec.shape == shape and not ids.index:
        return graph[ids.name]
    outputs = (replace(spec, shape=shape),)
    given = graph[ids.name]
    return Node(
        f"{ids.name}_documents",
        "op",
        "aten.reshape.default",
        (ids, shape),
        {},
        outputs,
        module=given.module,
        source=given.source,
    )


def _within(node: Node, mask: PackedMask, ids: Node) -> Node:
    """Return the attention ``node`` within documents instead of under a mask."""
    bare = without_mask(node, causal=True, window=mask.window)
    return replace(bare, op=WINDOWED, kwargs={**bare.kwargs, "documents": Ref(ids.name)})


def _packed(graph: Graph, node: Node, buffers: Mapping[str, Tensor]) -> PackedMask | None:
    """Return the documents and the window of the mask of an attention, if its shape is (rows or 1,
    1, positions, positions); None for any other mask and node."""
    mask = mask_of(node)
    if not isinstance(mask, Ref) or argument(node, 4, "dropout_p", 0.0):
        return None
    shape = graph.spec(mask).shape
    length = shape[-1]
    if len(shape) != 4 or shape[1] != 1 or shape[2] != length or length == 1:
        return None
    bands, ids, positions = [], [], []
    for term in terms(graph, mask.name):
        vectors = _vectors(graph, term)
        if term.kind == "constant":
            bands.append(band_of_constant(graph, term.name, buffers))
        elif vectors is None or vectors.rows.source != vectors.columns.source:
            return None
        elif term.op == "aten.eq.Tensor" and vectors.rows.offset == vectors.columns.offset:
            ids.append(vectors.columns)
        else:
            positions.append((vectors, term))
    if len({each.source for each in ids}) != 1:
        return None
    if graph.spec(ids[0].ref).numel not in (length, shape[0] * length):
        return None
    for vectors, term in positions:
        if not _counts(graph, vectors.rows.source, ids[0].source, length):
            return None
        bands.append(_position_band(vectors, term, length))
    if None in bands:
        return None
    before, after = (least(each) for each in zip(*bands, strict=True)) if bands else (None, None)
    if after != 0:
        return None
    return PackedMask(0 if before is None or before >= length - 1 else before + 1, ids[0].ref)


class Vector(NamedTuple):
    """Vector of integers along the last dimension of ``source``, plus ``offset``, as the operand
    ``ref`` of a comparison."""

    ref: Ref
    source: Ref
    offset: int


class Vectors(NamedTuple):
    """Operands of a comparison along rows and columns; ``is_swapped``: columns come first."""

    rows: Vector
    columns: Vector
    is_swapped: bool


def _vectors(graph: Graph, term: Node) -> Vectors | None:
    """Return the operands of a comparison of integers at rows and at columns of a mask; None for
    another op."""
    refs = term.inputs
    if term.op not in COMPARISONS or len(refs) != 2:
        return None
    specs = [graph.spec(ref) for ref in refs]
    if any(not spec.dtype.startswith(("int", "uint")) for spec in specs):
        return None
    length, sides = term.spec.shape[-1], [spec.shape[-2:] for spec in specs]
    if sides not in ([(length, 1), (1, length)], [(1, length), (length, 1)]):
        return None
    found = [_traced(graph, ref) for ref in refs]
    is_swapped = sides[0] == (1, length)
    rows, columns = found[::-1] if is_swapped else found
    return Vectors(rows, columns, is_swapped)


def _traced(graph: Graph, ref: Ref) -> Vector:
    """Follow an operand back through ops that keep its entries in order, perhaps several times, or
    add a number to all."""
    source, offset = ref, 0
    while True:
        node = graph[source.name]
        op, added = packet(node.op), argument(node, 1, "other", None)
        is_sum = op in ("add", "sub") and len(node.inputs) == 1 and isinstance(added, int)
        if not (_keeps_order(graph, node) or (is_sum and argument(node, 2, "alpha", 1) == 1)):
            return Vector(ref, source, offset)
        if is_sum:
            offset += added if op == "add" else -added
        source = node.inputs[0]


def _keeps_order(graph: Graph, node: Node) -> bool:
    """Return whether a node has the entries of its input in order, perhaps several times."""
    form = spec_of(node).form if node.kind == "op" else "other"
    if form not in ("expand", "reshape") or graph.spec(node.inputs[0]).dtype != node.spec.dtype:
        return False
    if form == "reshape":
        return True
    after, before = node.spec.shape, graph.spec(node.inputs[0]).shape
    before = (1,) * (len(after) - len(before)) + before
    kept = next((dim for dim, size in enumerate(before) if size > 1), len(before))
    return after[kept:] == before[kept:]


def _counts(graph: Graph, positions: Ref, ids: Ref, length: int) -> bool:
    """Return whether ``ids`` is the running sum of ``diff(positions) != 1`` along sequences of
    ``length`` positions."""
    total = graph[ids.name]
    if any(graph.spec(ref).shape[-1:] != (length,) for ref in (positions, ids)):
        return False
    if total.op != "aten.cumsum.default" or not _is_last(graph, total, 1):
        return False
    restarts = graph[total.inputs[0].name]
    if restarts.op != "aten.ne.Scalar" or argument(restarts, 1, "other") != 1:
        return False
    steps = graph[restarts.inputs[0].name]
    if steps.op != "aten.diff.default" or not _is_last(graph, steps, 2):
        return False
    is_first = argument(steps, 1, "n", 1) == 1 and argument(steps, 4, "append") is None
    of_same_shape = graph.spec(steps.inputs[0]).shape == steps.spec.shape
    return is_first and of_same_shape and _traced(graph, steps.inputs[0])[1:] == (positions, 0)


def _is_last(graph: Graph, node: Node, position: int) -> bool:
    rank = len(graph.spec(node.inputs[0]).shape)
    return int(argument(node, position, "dim", -1)) % rank == rank - 1


def _position_band(vectors: Vectors, term: Node, length: int) -> Band | None:
    """Return the band of a comparison of positions that count from 0."""
    places = torch.arange(length)
    rows = (places + vectors.rows.offset)[:, None]
    columns = (places + vectors.columns.offset)[None]
    given = (columns, rows) if vectors.is_swapped else (rows, columns)
    return comparison_band(COMPARISONS[term.op], *given)
