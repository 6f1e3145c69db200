"""Dispatch of tokens to experts: strategies of other training programs, for pricing them.

In: a layer of experts (``passes.ops.experts``) or a view of its tokens, an axis. Out: strategies in
which each rank has its own tokens, and a rank's call of the layer with its received tokens.

In ``SENT`` each rank also has its own experts. Tokens are sent to their experts and results back,
and so are their gradients. In ``SLICED`` each rank has a slice of each expert: the ranks of the
axis gather the tokens that any of them received, and sum the results. ``TOKENS`` is for views that
join rows and positions: a rank has some positions of each of its rows. Their order does not matter,
as experts compute each token independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from ...cost_model.collectives.dispatch import GroupLimit
from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer, is_join, is_view
from ..graph.graph import Graph, Node, TensorSpec
from ..graph.layout import REPLICATE, AxisStrategy, InnerCollective, NodeLayout, shard
from .case import argument
from .table import packet

SENT, SLICED, TOKENS = "sent", "sliced", "tokens"
"""Labels of the strategies of ``sent_strategies``."""


def sent_strategies(
    node: Node, inputs: Sequence[TensorSpec], axis_size: int, limit: GroupLimit = (1, 1)
) -> tuple[AxisStrategy, ...]:
    """Return the strategies, with tokens sent to experts, of an expert layer or of a view that
    joins or splits the first two dimensions; none for other nodes."""
    if axis_size == 1 or not inputs:
        return ()
    if is_expert_layer(node):
        return tuple(_of_experts(node, inputs, axis_size, limit))
    source, made = inputs[0].shape, node.spec.shape
    if is_view(node) and is_join(source, made) and source[1] % axis_size == 0:
        return (AxisStrategy(TOKENS, (shard(1),), (shard(0),)),)
    if is_view(node) and is_join(made, source) and made[1] % axis_size == 0:
        return (AxisStrategy(TOKENS, (shard(0),), (shard(1),)),)
    return ()


def group_limit(node: Node, graph: Graph) -> GroupLimit:
    """Return (number of groups, groups chosen per token) of a router that chooses groups of experts
    by their top scores first, as DeepSeek's do; (1, 1) for other nodes and routers."""
    if not is_expert_layer(node):
        return 1, 1
    num_experts, num_tokens = graph.spec(node.inputs[FIRST_WEIGHT]).shape[0], node.spec.shape[0]
    pending, seen = [node.inputs[1].name], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or graph[name].kind != "op":
            continue
        seen.add(name)
        own = graph[name]
        if packet(own.op) == "topk":
            scores, (rows, *chosen) = graph.spec(own.inputs[0]).shape, own.spec.shape
            is_of_groups = len(scores) == 2 and rows == num_tokens and num_experts > scores[1]
            if is_of_groups and chosen[0] < scores[1] and num_experts % scores[1] == 0:
                return scores[1], chosen[0]
        pending += [ref.name for ref in own.inputs]
    return 1, 1


def _of_experts(
    node: Node, inputs: Sequence[TensorSpec], axis_size: int, limit: GroupLimit
) -> Iterator[AxisStrategy]:
    tokens, ids, weights = inputs[0], inputs[1], inputs[FIRST_WEIGHT:]
    if tokens.shape[0] % axis_size:
        return
    directions = (False, True) if tokens.requires_grad else (False,)
    copies, own = ids.shape[1], (shard(0),) * FIRST_WEIGHT
    if all(each.shape[0] % axis_size == 0 for each in weights):
        sent = tuple(
            InnerCollective("dispatch", spec.num_bytes, backward, copies=copies, limit=limit)
            for backward in directions
            for spec in (tokens, node.spec)
        )
        yield AxisStrategy(SENT, (*own, *(shard(0) for _ in weights)), (shard(0),), sent)
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
        yield AxisStrategy(SLICED, (*own, *held), (shard(0),), tuple(moved))


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
    parts = 1
    for tokens, weight, size in zip(
        layout.inputs[0], layout.inputs[FIRST_WEIGHT], mesh_shape, strict=True
    ):
        parts *= size if tokens.is_shard and weight.is_shard else 1
    if parts == 1:
        return node
    count = Fraction(argument(node, 8, "num_experts"), parts)
    return replace(node, kwargs={**node.kwargs, "num_experts": count})
