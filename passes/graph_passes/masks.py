"""Masks: constants that are equal for every sequence, and causal, windowed or empty masks.

A mask that is equal along the batch is reduced to one row if its users broadcast it. A mask of
scaled dot-product attention that lets a position see itself and all earlier positions becomes
``is_causal=True``, one that lets it see some earlier positions a ``window``, and a mask that hides
no position is dropped: the kernels are faster without a mask, a flag has no layout to choose, and
a mask of 1,048,576 positions would take a terabyte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec, map_refs
from ...planner.ops.attention_limits import SDPA
from ..ops.torch_ops import is_pointwise
from ..programs.constants import ancestors, evaluate_constants
from .hoist import drop_dead
from .mask_comparisons import ALL, Band, conjunction_band

WINDOWED = "autoparallel.scaled_dot_product_attention.default"
LIMIT_ELEMENTS = 2**28
CHECKED_ELEMENTS = 2**24
"""Most elements of a constant at the full batch size for which its rows are compared at that size,
too."""
_HIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class SimplifyMasks:
    """Graph pass that simplifies attention masks and constants with equal rows; ``buffers`` maps
    names of buffers to their values, if known."""

    name: str = "simplify-masks"
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(simplify_masks(graph, self.buffers))


def simplify_masks(graph: Graph, buffers: Mapping[str, Tensor]) -> Graph:
    """Reduce constants with equal rows to one row, and replace causal attention masks by
    ``is_causal`` and masks that hide nothing by no mask."""
    for name in [node.name for node in graph.nodes if node.kind == "constant"]:
        if _masks_attention(graph, name) and graph[name].spec.dtype == "bool":
            graph = _to_flags(graph, name, _band_of_terms(graph, name, buffers))
    candidates = [
        node
        for node in graph.nodes
        if node.kind == "constant"
        and can_evaluate(graph, node.name, buffers)
        and (_batch_sized(node, graph.batch_size) or _masks_attention(graph, node.name))
        and any(graph[user].kind == "op" for user in graph.users[node.name])
    ]
    for node in candidates:
        value = evaluate_constants(graph, [node.name], device="cpu", buffers=buffers)[node.name]
        if _masks_attention(graph, node.name):
            graph = _to_flags(graph, node.name, _band(value))
        graph = _to_row(graph, graph[node.name], value)
    return graph


def band_of_constant(graph: Graph, name: str, buffers: Mapping[str, Tensor]) -> Band | None:
    """Return the band of the boolean constant ``name``; None if it is no band, or not known."""
    rank = len(graph[name].spec.shape)
    found = _band_of_terms(graph, name, buffers) if rank > 1 else None
    if found is None and can_evaluate(graph, name, buffers):
        value = evaluate_constants(graph, [name], device="cpu", buffers=buffers)[name]
        return _band(value) if rank > 1 else ALL if bool(value.all()) else None
    return found


def _band_of_terms(graph: Graph, name: str, buffers: Mapping[str, Tensor]) -> Band | None:
    is_small = partial(can_evaluate, graph, buffers=buffers)
    return conjunction_band(graph, name, buffers, is_small)


def has_equal_rows(graph: Graph, name: str, dim: int, buffers: Mapping[str, Tensor]) -> bool:
    """Return whether all slices of the constant ``name`` along ``dim`` are equal; true also if the
    constant cannot be evaluated."""
    if not can_evaluate(graph, name, buffers, limit=CHECKED_ELEMENTS):
        return True
    value = evaluate_constants(graph, [name], device="cpu", buffers=buffers)[name]
    return _equal_rows(value, dim)


def can_evaluate(
    graph: Graph, name: str, buffers: Mapping[str, Tensor], *, limit: int = LIMIT_ELEMENTS
) -> bool:
    """Return whether the constant ``name`` can be evaluated: it and all that it depends on have at
    most ``limit`` elements, and the values of the buffers that it reads are known."""
    nodes = [graph[ancestor] for ancestor in ancestors(graph, [name])]
    return all(
        node.spec.numel <= limit and (node.kind != "buffer" or node.name in buffers)
        for node in nodes
    )


def _batch_sized(node: Node, batch_size: int) -> bool:
    return batch_size > 1 and batch_size in node.spec.shape


def _masks_attention(graph: Graph, name: str) -> bool:
    return any(mask_of(graph[user]) == Ref(name) for user in graph.users[name])


def mask_of(node: Node) -> Any:
    """Return the mask of a node that is torch's attention; None without one, and for others."""
    if node.op != SDPA:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _to_flags(graph: Graph, name: str, band: Band | None) -> Graph:
    """Replace the mask ``name`` of each attention by flags: none if all positions see each other,
    causality, or causality and a window, if that is at most half of the positions."""
    if band is None or band.after not in (None, 0):
        return graph
    length = graph[name].spec.shape[-1]
    window = 0 if band.before is None or band.before >= length - 1 else band.before + 1
    if window and (band.after is None or 2 * window > length):
        return graph
    users = [user for user in graph.users[name] if mask_of(graph[user]) == Ref(name)]
    changed = {
        user: without_mask(graph[user], causal=band.after == 0, window=window) for user in users
    }
    return replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))


def _band(mask: Tensor) -> Band | None:
    """Return the band of an attention mask with these values; None for any other mask.

    >>> _band(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())
    Band(before=None, after=0)
    >>> _band(torch.zeros(2, 2))
    Band(before=None, after=None)
    >>> _band(torch.ones(4, 4, dtype=torch.bool).tril().triu(-1))
    Band(before=1, after=0)
    """
    if mask.dtype != torch.bool:
        hidden = mask <= max(_HIDDEN, torch.finfo(mask.dtype).min)
        if not bool((hidden | (mask == 0)).all()):
            return None
        mask = ~hidden
    for dim in range(mask.dim() - 2):
        if mask.shape[dim] > 1 and _equal_rows(mask, dim):
            mask = mask.narrow(dim, 0, 1)
    if bool(mask.all()):
        return ALL
    rows, columns = mask.shape[-2:]
    if rows != columns or mask.numel() != rows * columns:
        return None
    mask = mask.view(rows, columns)
    corner, last = mask[-1].byte(), rows - 1  # the last row sees back, the first ahead
    before, after = last - int(corner.argmax()), last - int(mask[0].byte().flip(0).argmax())
    if not torch.equal(mask, torch.ones_like(mask).tril_(after).triu_(-before)):
        return None
    return Band(None if before == last else before, None if after == last else after)


def without_mask(node: Node, *, causal: bool, window: int) -> Node:
    """Return an attention with flags in place of its mask; ``window``: 0 for none."""
    args = (*node.args[:3],)
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    was_causal = bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False))
    rest = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p")}
    kwargs = {key: value for key, value in rest.items() if key != "is_causal"}
    return replace(
        node,
        op=WINDOWED if window else SDPA,
        args=(*args, None, dropout, causal or was_causal),
        kwargs={**kwargs, "window": window} if window else kwargs,
    )


def _to_row(graph: Graph, node: Node, value: Tensor) -> Graph:
    """Give users that broadcast the constant ``node`` only its first row, if all its rows (of
    ``value``) are equal."""
    for dim, size in enumerate(node.spec.shape):
        if size != graph.batch_size or size == 1 or not _equal_rows(value, dim):
            continue
        row = Node(
            f"{node.name}_row{dim}",
            "constant",
            "aten.slice.Tensor",
            (Ref(node.name), dim, 0, 1),
            {},
            (_row_spec(node.spec, dim),),
            module=node.module,
            source=node.source,
        )
        users = {
            user: _using(graph[user], node.name, row.name)
            for user in graph.users[node.name]
            if graph[user].kind == "op" and _broadcasts(graph, graph[user], node.name, row.spec)
        }
        if users:
            nodes: list[Node] = []
            for existing in graph.nodes:
                nodes.append(users.get(existing.name, existing))
                if existing.name == node.name:
                    nodes.append(row)
            graph = replace(graph, nodes=tuple(nodes))
            node, value = row, value.narrow(dim, 0, 1)
    return graph


def _equal_rows(value: Tensor, dim: int) -> bool:
    return torch.equal(value, value.narrow(dim, 0, 1).expand_as(value))


def _row_spec(spec: TensorSpec, dim: int) -> TensorSpec:
    shape = tuple(1 if d == dim else size for d, size in enumerate(spec.shape))
    return replace(spec, shape=shape)


def _using(node: Node, old: str, new: str) -> Node:
    def swapped(ref: Ref) -> Ref:
        return Ref(new) if ref.name == old else ref

    return replace(
        node, args=map_refs(node.args, swapped), kwargs=map_refs(dict(node.kwargs), swapped)
    )


def _broadcasts(graph: Graph, user: Node, name: str, row: TensorSpec) -> bool:
    """Return whether ``user`` has the same result if its input ``name`` is reduced to shape
    ``row``."""
    if user.op == SDPA:
        return mask_of(user) == Ref(name) and user.inputs.count(Ref(name)) == 1
    if not is_pointwise(user.op):
        return False
    shapes = [row.shape if r.name == name else graph.spec(r).shape for r in user.inputs]
    broadcast = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return tuple(broadcast) == user.spec.shape
