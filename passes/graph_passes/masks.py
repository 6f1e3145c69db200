"""Masks: constants that are equal for every sequence, and causal or empty masks.

A mask that is equal along the batch is reduced to one row if its users broadcast it. A mask of
scaled dot-product attention that lets a position see itself and all earlier positions becomes
``is_causal=True``, and a mask that hides no position is dropped: the fused kernels are faster
without a mask, and a causal flag has no layout to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec, map_refs
from ..ops.torch_ops import is_pointwise
from ..programs.constants import ancestors, evaluate_constants
from .hoist import drop_dead
from .mask_comparisons import Meaning, conjunction_meaning

SDPA = "aten.scaled_dot_product_attention.default"
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
    is_small = partial(can_evaluate, graph, buffers=buffers)
    for name in [node.name for node in graph.nodes if node.kind == "constant"]:
        if _masks_attention(graph, name) and graph[name].spec.dtype == "bool":
            meaning = conjunction_meaning(graph, name, buffers, is_small)
            graph = _to_flags(graph, name, meaning)
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
            graph = _to_flags(graph, node.name, _meaning(value))
        graph = _to_row(graph, graph[node.name], value)
    return graph


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
    return any(_mask_of(graph[user]) == Ref(name) for user in graph.users[name])


def _mask_of(node: Node) -> Any:
    if node.op != SDPA:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _to_flags(graph: Graph, name: str, meaning: Meaning | None) -> Graph:
    """Make each attention under the mask ``name`` causal ("causal") or drop its mask ("all")."""
    if meaning is None:
        return graph
    users = [user for user in graph.users[name] if _mask_of(graph[user]) == Ref(name)]
    changed = {user: _without_mask(graph[user], causal=meaning == "causal") for user in users}
    return replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))


def _meaning(mask: Tensor) -> Meaning | None:
    """Return "causal" or "all" (hides nothing) for an attention mask with these values; None for
    any other mask.

    >>> _meaning(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())
    'causal'
    >>> _meaning(torch.zeros(2, 2))
    'all'
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
        return "all"
    rows, columns = mask.shape[-2:]
    if rows == columns and torch.equal(mask, mask.new_ones(mask.shape).tril_()):
        return "causal"
    return None


def _without_mask(node: Node, *, causal: bool) -> Node:
    args = (*node.args[:3],)
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    was_causal = bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False))
    rest = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p")}
    return replace(
        node,
        args=(*args, None, dropout, causal or was_causal),
        kwargs={key: value for key, value in rest.items() if key != "is_causal"},
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
        return _mask_of(user) == Ref(name) and user.inputs.count(Ref(name)) == 1
    if not is_pointwise(user.op):
        return False
    shapes = [row.shape if r.name == name else graph.spec(r).shape for r in user.inputs]
    broadcast = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return tuple(broadcast) == user.spec.shape
