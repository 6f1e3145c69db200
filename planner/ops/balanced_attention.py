"""Balanced causal attention: positions are split, and every rank has an equal share of the work.

In: causal attention, an axis of n ranks that splits its queries' positions. Out: the strategy in
which ranks swap halves of their queries, and the call that the busiest rank then executes.

Rank r has the r-th part of the queries, and query i sees the keys up to i: the last rank computes
(2n - 1)/n times the mean. With 2n chunks, chunk i takes about i + 1/2. Rank r keeps its chunk 2r
and takes chunk 2n - 1 - 2r, the second chunk of rank n - 1 - r, which takes chunk 2r + 1 instead:
2n for every rank. Half of the queries are sent there and half of the results back, as are their
gradients; keys and values are whole on every rank. If several axes split the positions, the partner
is the rank at the opposite end of each balancing axis.

Source of the pairs of chunks: Dubey et al. 2024, Llama 3 (arXiv:2407.21783), section 3.3.2, where
the sequence itself is distributed in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Node
from ..graph.layout import BALANCED, AxisStrategy, InnerCollective, NodeLayout, shard
from .case import Case, argument
from .dispatch import as_received
from .table import packet

BALANCED_ATTENTION = "autoparallel.balanced_attention.default"
"""Op of causal attention on two runs of query positions (``passes.ops.lower_right``)."""


def balanced_strategies(
    case: Case, derived: Sequence[AxisStrategy], axis_size: int
) -> tuple[AxisStrategy, ...]:
    """Return a balanced variant of each strategy of causal attention that splits queries: ranks r
    and n − 1 − r swap halves of their queries, so that all compute equally many scores.

    There is no such variant unless a sequence attends to itself, with two or more positions per
    rank.
    """
    is_attention = packet(case.node.op) == "scaled_dot_product_attention"
    if not is_attention or axis_size == 1 or len(case.inputs) != 3:
        return ()
    if not case.argument(5, "is_causal", False):
        return ()
    (query, key, _), out, dim = case.inputs, case.outputs[0], case.rank - 2
    num_rows = query.shape[dim] // axis_size // 2
    if not num_rows or query.shape[dim] != key.shape[-2]:
        return ()
    sent = [spec.num_bytes // query.shape[dim] * num_rows for spec in (query, out)]
    inner = [InnerCollective("swap", num_bytes) for num_bytes in sent]
    inner += [
        InnerCollective("swap", num_bytes, backward=True)
        for num_bytes, spec in zip(sent, (query, out), strict=True)
        if spec.requires_grad
    ]
    return tuple(
        replace(each, label=BALANCED, collectives=(*each.collectives, *inner))
        for each in derived
        if each.inputs[0] == shard(dim)
    )


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
