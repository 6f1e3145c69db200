"""Layers of experts: strategies that send tokens, and memory traffic.

In: a layer of experts (``passes.ops.experts``), an axis. Out: strategies in which each rank has its
own tokens, and a rank's call of the layer with its received tokens.

In ``SENT`` each rank also has its own experts. Tokens are sent to their experts and results back,
and so are their gradients; in ``HALVED`` in two exchanges, each beside the compute of the other
half. In ``SLICED`` each rank has a slice of each expert: the ranks of the
axis gather the tokens that any of them received, and sum the results.

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
from math import prod
from typing import Any, Literal

from ...cost_model.collectives.dispatch import GroupLimit
from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph.graph import Graph, Node, TensorSpec
from ..graph.layout import (
    BALANCED,
    HALVED,
    REPLICATE,
    SENT,
    AxisStrategy,
    InnerCollective,
    NodeLayout,
    Placement,
    shard,
)
from .attention import BALANCED_ATTENTION
from .case import argument, packet
from .catalog import spec_named
from .products import expert_pairs

SLICED = "sliced"
"""Label of a layer of experts on an axis whose ranks have their own tokens and a slice of each
expert."""

ExpertKernels = Literal["separate", "activation", "one"]
"""Division into kernels. ``separate``: every elementwise op is a kernel, as in eager code and in
Megatron-LM if experts have biases. ``activation``: all ops between the products are one kernel.
``one``: they are part of the products' kernels, as in cuDNN's grouped products with an
activation."""


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
    return tuple(
        strategy
        for dim, size in enumerate(inputs[0].shape[:-1])
        if size % axis_size == 0
        for strategy in _of_experts(node, inputs, axis_size, limit, shard(dim))
        if in_halves or strategy.label != HALVED
    )


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


def _of_experts(
    node: Node,
    inputs: Sequence[TensorSpec],
    axis_size: int,
    limit: GroupLimit,
    own: Placement,
) -> Iterator[AxisStrategy]:
    """Yield the strategies in which a rank's own tokens are split off as ``own``."""
    tokens, ids, weights = inputs[0], inputs[1], inputs[FIRST_WEIGHT:]
    directions = (False, True) if tokens.requires_grad else (False,)
    copies, data = ids.shape[-1], (own,) * FIRST_WEIGHT
    if all(each.shape[0] % axis_size == 0 for each in weights):
        sent = tuple(
            InnerCollective("dispatch", spec.num_bytes, backward, copies=copies, limit=limit)
            for backward in directions
            for spec in (tokens, node.spec)
        )
        for label in (SENT, HALVED):
            yield AxisStrategy(label, (*data, *(shard(0) for _ in weights)), (own,), sent)
    parts = [_hidden(each, at, tokens.shape[-1]) for at, each in enumerate(weights)]
    if all(dim is None or weights[at].shape[dim] % axis_size == 0 for at, dim in enumerate(parts)):
        received, made = copies * tokens.num_bytes, copies * node.spec.num_bytes
        moved = [InnerCollective("all_gather", received), InnerCollective("reduce_scatter", made)]
        if tokens.requires_grad:
            moved += [
                InnerCollective("all_gather", made, backward=True),
                InnerCollective("reduce_scatter", received, backward=True),
            ]
        held = (REPLICATE if dim is None else shard(dim) for dim in parts)
        yield AxisStrategy(SLICED, (*data, *held), (own,), tuple(moved))


def _hidden(weight: TensorSpec, at: int, width: int) -> int | None:
    """Return the dimension of an expert weight that is the MLP's inner width; None for the second
    bias, which lacks it. ``at``: index of the weight among the expert weights."""
    if len(weight.shape) == 2:
        return 1 if at == 2 else None
    return 1 if weight.shape[2] == width else 2


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
    """Return the node as the busiest rank executes it: balanced attention as another op, an expert
    layer on the tokens that the rank receives; other nodes are unchanged.

    The fourth argument of the balanced op has, for each half of its queries, the end of the keys
    that they see. Attention of a later slice of positions has a mask, and is not balanced.
    """
    if is_expert_layer(node):
        return as_received(node, layout, mesh_shape)
    if BALANCED not in layout.labels or not argument(node, 5, "is_causal", False):
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
    named = {"scale": argument(node, 6, "scale"), "enable_gqa": argument(node, 7, "enable_gqa")}
    given = {name: value for name, value in named.items() if value is not None}
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
        text = argument(node, 7, "activation", "[]")
        within = _activation(json.loads(text), made, read)
        biases = (made + width) if has_biases else 0
        # A bias is gathered by row and added; its gradient is summed. The scores are multiplied in.
        forward += within[0] + 4 * biases + 2 * width
        backward += within[1] + 2 * biases + 4 * width
    pairs = expert_pairs(node, inputs) * tokens.itemsize
    return pairs * forward, pairs * backward


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
        name = target.rpartition(".")[2]
        is_view = name in ("getitem", "contiguous") or spec_named(name).family == "view"
        width = read if is_view else max((widths[at] for at in places), default=read)
        widths.append(width)
        if not is_view:
            forward += (len(places) + 1) * width
            backward += (2 * len(places) + 1) * width
    return forward, backward
