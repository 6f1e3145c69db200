"""Layers of experts: strategies that send tokens, and memory traffic.

In: a layer of experts (``passes.ops.experts``), an axis. Out: strategies in which each rank has its
own tokens, and a rank's call of the layer with its received tokens.

In ``SENT`` each rank also has its own experts. Tokens are sent to their experts and results back,
and so are their gradients; in ``HALVED`` in two exchanges, each beside the compute of the other
half. In ``SLICED`` each rank has a slice of each expert's inner width: the ranks of the axis gather
the tokens that any of them received, and sum the results; on an axis whose ranks have the same
tokens, the results are partial sums. The columns that the activation reads together must be in one
slice (``column_order``): if one half of the columns follows the other, the ranks first exchange
columns of the first product.

Memory traffic, beside that of the products, of a layer at local shapes and its division into
kernels: for each (token, expert) pair, a row as wide as the token is copied to the expert and the
result is copied back (Gale et al. 2022, MegaBlocks, section 5.2). The activation, perhaps after a
bias, is between the two products; the score, perhaps after a bias, follows the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, Literal

from ...cost_model.collectives.dispatch import GroupLimit
from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph.graph import Graph, Node, TensorSpec
from ..graph.layout import (
    BALANCED,
    HALVED,
    PARTIAL,
    REPLICATE,
    RINGS,
    SENT,
    SLICED,
    AxisStrategy,
    Collective,
    InnerCollective,
    NodeLayout,
    Placement,
    shard,
)
from .attention import (
    BALANCED_ATTENTION,
    BALANCED_RING,
    HALO_ATTENTION,
    RING_ATTENTION,
    halo_parts,
    ring_axes,
)
from .attention_limits import DOCUMENT_LENGTH, window_of
from .case import argument, packet
from .catalog import is_pointwise, spec_named
from .products import expert_pairs

ExpertKernels = Literal["separate", "activation", "one"]
"""Division into kernels. ``separate``: every elementwise op is a kernel, as in eager code and in
Megatron-LM if experts have biases. ``activation``: all ops between the products are one kernel.
``one``: they are part of the products' kernels, as in cuDNN's grouped products with an
activation."""

KERNELS = ((23, 16), (46, 23), (35, 20))
"""Kernels (forward, backward) of a layer without biases, beside its activation: of this package's
op on the rank's own tokens, on tokens that are sent, and on each half of them."""


def sent_strategies(
    node: Node,
    inputs: Sequence[TensorSpec],
    axis_size: int,
    limit: GroupLimit = (1, 1),
    *,
    in_halves: bool = False,
) -> tuple[AxisStrategy, ...]:
    """Return the strategies of an expert layer with tokens sent to experts; none for other nodes.
    ``in_halves``: tokens may be sent in two exchanges."""
    if axis_size == 1 or not is_expert_layer(node):
        return ()
    own = [shard(dim) for dim, size in enumerate(inputs[0].shape[:-1]) if size % axis_size == 0]
    sent = [each for at in own for each in _sent(node, inputs, axis_size, limit, at)]
    sent = [each for each in sent if in_halves or each.label != HALVED]
    return (*sent, *_sliced(node, inputs, axis_size, own))


def group_limit(node: Node, graph: Graph) -> GroupLimit:
    """Return (number of groups, groups chosen per token) of a router that chooses groups of experts
    by their top scores first, as DeepSeek's do; (1, 1) for other nodes and routers."""
    if not is_expert_layer(node):
        return 1, 1
    num_experts, tokens = graph.spec(node.inputs[FIRST_WEIGHT]).shape[0], node.spec.shape[:-1]
    pending, seen = [node.inputs[1].name], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or graph[name].kind != "op":
            continue
        seen.add(name)
        own = graph[name]
        if packet(own.op) == "topk":
            (*rows, groups), chosen = graph.spec(own.inputs[0]).shape, own.spec.shape[-1]
            is_of_groups = tuple(rows) == tokens and groups < num_experts
            if is_of_groups and chosen < groups and num_experts % groups == 0:
                return groups, chosen
        pending += [ref.name for ref in own.inputs]
    return 1, 1


def _sent(
    node: Node,
    inputs: Sequence[TensorSpec],
    axis_size: int,
    limit: GroupLimit,
    own: Placement,
) -> Iterator[AxisStrategy]:
    """Yield ``SENT`` and ``HALVED``, with a rank's own tokens split off as ``own``."""
    tokens, ids, weights = inputs[0], inputs[1], inputs[FIRST_WEIGHT:]
    if all(each.shape[0] % axis_size == 0 for each in weights):
        sent = tuple(
            InnerCollective("dispatch", spec.num_bytes, backward, copies=ids.shape[-1], limit=limit)
            for backward in _directions(tokens)
            for spec in (tokens, node.spec)
        )
        held = tuple(shard(0) for _ in weights)
        for label in (SENT, HALVED):
            yield AxisStrategy(label, (*(own,) * FIRST_WEIGHT, *held), (own,), sent)


def _sliced(
    node: Node, inputs: Sequence[TensorSpec], axis_size: int, own: Sequence[Placement]
) -> Iterator[AxisStrategy]:
    """Yield the strategies ``SLICED``: with a rank's own tokens split off as each of ``own``, and
    with the same tokens on all ranks."""
    tokens, copies, weights = inputs[0], inputs[1].shape[-1], inputs[FIRST_WEIGHT:]
    dims, order = _inner_dims(node), column_order(argument(node, 7, "activation"))
    widths = [each.shape[dim] for each, dim in zip(weights, dims, strict=True) if dim is not None]
    factor = 1 if order == "same" else 2
    if order is None or widths[0] != factor * widths[1] or widths[1] % axis_size:
        return
    directions = _directions(tokens)
    made = copies * tokens.num_bytes // tokens.shape[-1] * widths[0] // axis_size
    inner = [InnerCollective("all_to_all", made, back) for back in directions]
    inner = inner if order == "halves" else []
    held = tuple(REPLICATE if dim is None else shard(dim) for dim in dims)
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    rows = copies * tokens.num_bytes
    moved = [InnerCollective(kind, rows, back) for back in directions for kind in kinds]
    for data in own:
        yield AxisStrategy(SLICED, (*(data,) * FIRST_WEIGHT, *held), (data,), (*moved, *inner))
    same = (REPLICATE,) * FIRST_WEIGHT
    yield AxisStrategy(SLICED, (*same, *held), (PARTIAL,), tuple(inner))


def _directions(tokens: TensorSpec) -> tuple[bool, ...]:
    """Return for each direction (forward, backward) in which rows are sent whether it is the
    backward."""
    return (False, True) if tokens.requires_grad else (False,)


def _inner_dims(node: Node) -> list[int | None]:
    """Return for each weight of an expert layer the dimension that is the inner width of experts;
    None for the second bias, which lacks it."""
    is_transposed = argument(node, 9, "transposed", False)
    dims: list[int | None] = [2, 1] if is_transposed else [1, 2]
    biases = ((5, "up_bias", 1), (6, "down_bias", None))
    return dims + [dim for at, name, dim in biases if argument(node, at, name) is not None]


ColumnOrder = Literal["same", "pairs", "halves"]


@lru_cache(maxsize=256)
def column_order(activation: str) -> ColumnOrder | None:
    """Return the columns of the first product that an activation (``passes/ops/activation.py``)
    reads for column i of its result: i (``same``), 2i and 2i + 1 (``pairs``), or i of the first and
    of the second half (``halves``); None if it may be others.

    >>> column_order('[["functional.silu", [{"at": 0}], {}]]')
    'same'
    >>> column_order('[["torch.cumsum", [{"at": 0}, -1], {}]]')
    """
    found: ColumnOrder = "same"
    parts = ["whole"]  # of a row's columns in each value: all, both halves, or one of two
    for target, given, named in json.loads(activation):
        read = {parts[each["at"]] for each in (*given, *named.values()) if _is_value(each)}
        others = [each for each in (*given, *named.values()) if not _is_value(each)]
        name = target.rpartition(".")[2]
        if len(read) != 1:
            return None
        (part,) = read
        order: ColumnOrder = found
        if name == "chunk" and part == "whole" and sorted(map(str, others)) == ["-1", "2"]:
            part, order = "halves", "halves"
        elif name == "getitem" and part == "halves" and others in ([0], [1]):
            part = "one"
        elif name == "getitem" and part == "whole" and others in _EVERY_SECOND:
            part, order = "one", "pairs"
        elif part == "halves" or not is_pointwise(name):
            return None
        if found not in ("same", order):
            return None
        found = order
        parts.append(part)
    return found if parts[-1] == ("whole" if found == "same" else "one") else None


_EVERY_SECOND = [
    [{"tuple": [{"ellipsis": True}, {"slice": [first, None, 2]}]}] for first in (None, 0, 1)
]


def _is_value(given: Any) -> bool:
    return isinstance(given, dict) and "at" in given


def as_received(node: Node, layout: NodeLayout, mesh_shape: Sequence[int]) -> Node:
    """Return a layer of experts as a rank executes it on its received tokens.

    With even routing, a rank receives as many (token, expert) pairs as it sends, plus the pairs of
    each rank that shares its experts. The returned node has the rank's own number of tokens; its
    argument for the number of all experts is reduced so that the number of pairs is right.
    """
    parts = num_senders(node, layout, mesh_shape)
    if parts == 1:
        return node
    count = Fraction(argument(node, 8, "num_experts"), parts)
    return replace(node, kwargs={**node.kwargs, "num_experts": count})


def as_half(node: Node) -> Node:
    """Return a layer of experts with half as many (token, expert) pairs."""
    count = 2 * argument(node, 8, "num_experts")
    return replace(node, kwargs={**node.kwargs, "num_experts": count})


def num_senders(node: Node, layout: NodeLayout, mesh_shape: Sequence[int]) -> int:
    """Return the number of ranks that send tokens to each other's experts; 1 for other nodes."""
    if not is_expert_layer(node):
        return 1
    pairs = zip(layout.inputs[0], layout.inputs[FIRST_WEIGHT], mesh_shape, strict=True)
    return prod(size for tokens, weight, size in pairs if tokens.is_shard and weight.is_shard)


def as_run(node: Node, layout: NodeLayout, mesh_shape: Sequence[int]) -> Node:
    """Return the node as the busiest rank executes it: balanced and ring attention as other ops, an
    expert layer on the tokens that the rank receives; other nodes are unchanged.

    The fourth argument of the balanced op has, for each half of its queries, the end of the keys
    that they see. Attention of a later slice of positions has a mask, and is not balanced.
    """
    if is_expert_layer(node):
        return as_received(node, layout, mesh_shape)
    if not {BALANCED, *RINGS}.intersection(layout.labels):
        return node
    is_causal = bool(argument(node, 5, "is_causal", False))
    named = {"scale": argument(node, 6, "scale"), "enable_gqa": argument(node, 7, "enable_gqa")}
    given = {name: value for name, value in named.items() if value is not None}
    for axis in ring_axes(layout):
        if window := window_of(node):
            size = mesh_shape[axis]
            halo = sum(halo_parts(window, node.spec.shape[-2] // size, size))
            named = {**given, "window": window}
            return replace(node, op=HALO_ATTENTION, args=(*node.args[:3], halo), kwargs=named)
        op = BALANCED_RING if is_causal else RING_ATTENTION
        return replace(node, op=op, args=(*node.args[:3], mesh_shape[axis]), kwargs=given)
    if not is_causal or DOCUMENT_LENGTH in node.kwargs:
        return node
    dim = len(node.spec.shape) - 2
    place, parts = 0, 1
    for placement, size, label in zip(layout.outputs[0], mesh_shape, layout.labels, strict=True):
        if placement == shard(dim):
            place = place * size + (0 if label == BALANCED else size - 1)
            parts *= size
    whole = node.spec.shape[dim]
    length = whole // parts
    ends = [place * length + length - length // 2, whole]
    return replace(node, op=BALANCED_ATTENTION, args=(*node.args[:3], ends), kwargs=given)


def expert_traffic(
    node: Node, inputs: Sequence[TensorSpec], kernels: ExpertKernels, moves: int
) -> tuple[int, int]:
    """Return the bytes of memory traffic around the experts' products (forward, backward).

    A row is copied ``moves`` times, on the way to its expert and back; so is its gradient.
    """
    tokens, first, second = inputs[0], inputs[FIRST_WEIGHT], inputs[FIRST_WEIGHT + 1]
    width = tokens.shape[-1]
    made, read = (weight.numel // weight.shape[0] // width for weight in (first, second))
    forward = backward = 2 * moves * width
    if kernels == "activation":
        forward, backward = forward + made + read, backward + 2 * made + read
    elif kernels == "separate":
        has_biases = len(node.inputs) > FIRST_WEIGHT + 2
        within = _activation(_calls(node), made, read)
        biases = (made + width) if has_biases else 0
        # A bias is gathered by row and added; its gradient is summed. The scores are multiplied in.
        forward += within[0] + 4 * biases + 2 * width
        backward += within[1] + 2 * biases + 4 * width
    pairs = expert_pairs(node, inputs) * tokens.itemsize
    return pairs * forward, pairs * backward


def num_kernels(node: Node, kernels: ExpertKernels, num_parts: int) -> tuple[int, int] | None:
    """Return the numbers of kernels (forward, backward) that the host issues for a layer of experts
    of this package's own form; None if another program fuses them. ``num_parts``: exchanges in
    which its tokens are sent, of each of which the kernels are meant; 0 for the rank's own
    tokens."""
    if kernels != "separate":
        return None
    forward, backward = KERNELS[num_parts]
    inside = sum(not _is_view(target) for target, *_ in _calls(node))
    biases = len(node.inputs) - FIRST_WEIGHT - 2
    return forward + inside + 2 * biases, backward + 2 * inside + 2 * biases


def _calls(node: Node) -> Sequence[Any]:
    """Return the calls of a layer's activation: targets, arguments and options."""
    found: Sequence[Any] = json.loads(argument(node, 7, "activation", "[]"))
    return found


def _is_view(target: str) -> bool:
    name = target.rpartition(".")[2]
    return name in ("getitem", "contiguous") or spec_named(name).family == "view"


def _activation(calls: Sequence[Any], made: int, read: int) -> tuple[int, int]:
    """Return the elements per row that the ops of the activation read and write (forward,
    backward).

    In the forward each op reads its operands and writes its result; in the backward it reads the
    result's gradient and its operands, and writes their gradients. ``made`` is the width of the
    first product's result, ``read`` the width of the second product's operand and of views.
    """
    widths, forward, backward = [made], 0, 0
    for target, arguments, options in calls:
        given = (*arguments, *options.values())
        places = [each["at"] for each in given if isinstance(each, dict) and "at" in each]
        is_view = _is_view(target)
        width = read if is_view else max((widths[at] for at in places), default=read)
        widths.append(width)
        if not is_view:
            forward += (len(places) + 1) * width
            backward += (2 * len(places) + 1) * width
    return forward, backward
