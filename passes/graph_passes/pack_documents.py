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
        ids = {mask.ids: _with_dims(graph, mask.ids) for mask in masks.values()}
        nodes: list[Node] = []
        for node in graph.nodes if ids else ():
            if (mask := masks.get(node.name)) is not None:
                bare = without_mask(node, causal=True, window=mask.window)
                kwargs = {**bare.kwargs, "documents": Ref(ids[mask.ids].name)}
                node = replace(bare, op=WINDOWED, kwargs=kwargs)
            nodes += [node, *(each for ref, each in ids.items() if ref.name == node.name)]
        return drop_dead(replace(graph, nodes=tuple(nodes))) if ids else graph


class PackedMask(NamedTuple):
    """Mask of packed documents: its window (0: none), and the operand with ids along columns."""

    window: int
    ids: Ref


class Vector(NamedTuple):
    """Vector of integers along the last dimension of ``source``, plus ``offset``, as the operand
    ``ref`` of a comparison; ``side``: its last two dimensions."""

    ref: Ref
    side: tuple[int, ...]
    source: Ref
    offset: int


def _with_dims(graph: Graph, ids: Ref) -> Node:
    """Return a node that has ids as (rows, 1, 1, positions)."""
    spec, given = graph.spec(ids), graph[ids.name]
    shape = (spec.numel // spec.shape[-1], 1, 1, spec.shape[-1])
    name, made = f"{ids.name}_documents", (replace(spec, shape=shape),)
    args, module, source = (ids, shape), given.module, given.source
    op = "aten.reshape.default"
    return Node(name, "op", op, args, {}, made, module=module, source=source)


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
    bands: list[Band | None] = []
    ids, positions = [], []
    for term in terms(graph, mask.name):
        if term.kind == "constant":
            bands.append(band_of_constant(graph, term.name, buffers))
            continue
        vectors = _vectors(graph, term)
        if len({each.source for each in vectors}) != 1:
            return None
        if term.op == "aten.eq.Tensor" and vectors[0].offset == vectors[1].offset:
            ids += [each for each in vectors if each.side[0] == 1]
        else:
            positions.append(vectors[0].source)
            places = (torch.arange(length).view(each.side) + each.offset for each in vectors)
            bands.append(comparison_band(COMPARISONS[term.op], *places))
    if len({each.source for each in ids}) != 1 or not bands or None in bands:
        return None
    is_of_rows = graph.spec(ids[0].ref).numel in (length, shape[0] * length)
    before, after = (least(each) for each in zip(*(b for b in bands if b), strict=True))
    if after != 0 or not is_of_rows:
        return None
    if any(not _counts(graph, each, ids[0].source, length) for each in positions):
        return None
    return PackedMask(0 if before is None or before >= length - 1 else before + 1, ids[0].ref)


def _vectors(graph: Graph, term: Node) -> tuple[Vector, ...]:
    """Return the operands of a comparison of integers at rows and at columns of a mask; nothing for
    another op."""
    specs = [graph.spec(ref) for ref in term.inputs]
    sides = [spec.shape[-2:] for spec in specs]
    length = term.spec.shape[-1] if term.spec.shape else 0
    if term.op not in COMPARISONS or sorted(sides) != [(1, length), (length, 1)]:
        return ()
    if any(not spec.dtype.startswith(("int", "uint")) for spec in specs):
        return ()
    pairs = zip(term.inputs, sides, strict=True)
    return tuple(Vector(ref, side, *_traced(graph, ref)) for ref, side in pairs)


def _traced(graph: Graph, ref: Ref) -> tuple[Ref, int]:
    """Follow an operand back through ops that keep its entries in order, perhaps several times, or
    add a number to all; return its source and the sum of these numbers."""
    offset = 0
    while (node := graph[ref.name]).kind == "op":
        name, added = packet(node.op), argument(node, 1, "other")
        is_sum = isinstance(added, int) and argument(node, 2, "alpha", 1) == 1
        if is_sum and (name == "add" or name == "sub"):
            offset += added if name == "add" else -added
        elif not _keeps_order(graph, node):
            break
        ref = node.inputs[0]
    return ref, offset


def _keeps_order(graph: Graph, node: Node) -> bool:
    """Return whether a node has the entries of its input in order, perhaps several times."""
    form = spec_of(node).form
    if form == "reshape":
        return graph.spec(node.inputs[0]).dtype == node.spec.dtype
    after, before = node.spec.shape, graph.spec(node.inputs[0]).shape
    before = (1,) * (len(after) - len(before)) + before
    kept = next((dim for dim, size in enumerate(before) if size > 1), len(before))
    return form == "expand" and after[kept:] == before[kept:]


def _counts(graph: Graph, positions: Ref, ids: Ref, length: int) -> bool:
    """Return whether ``ids`` is the running sum of ``diff(positions) != 1`` along sequences of
    ``length`` positions."""
    if any(graph.spec(ref).shape[-1:] != (length,) for ref in (positions, ids)):
        return False
    total = graph[ids.name]
    restarts = _read(graph, total, "aten.cumsum.default")
    steps = restarts and _read(graph, restarts, "aten.ne.Scalar")
    if not (restarts and steps and _read(graph, steps, "aten.diff.default")):
        return False
    last = len(total.spec.shape) - 1
    dims = argument(total, 1, "dim"), argument(steps, 2, "dim", -1)
    if any(dim not in (-1, last) for dim in dims):
        return False
    is_first = argument(steps, 1, "n", 1) == 1 and argument(steps, 4, "append") is None
    is_restart = argument(restarts, 1, "other") == 1
    return is_first and is_restart and _traced(graph, steps.inputs[0]) == (positions, 0)


def _read(graph: Graph, node: Node, op: str) -> Node | None:
    """Return the node that ``node`` reads first, of its shape, if its own op is ``op``."""
    if node.op != op or graph.spec(node.inputs[0]).shape != node.spec.shape:
        return None
    return graph[node.inputs[0].name]
