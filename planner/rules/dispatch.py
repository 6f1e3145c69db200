"""Experts whose tokens are sent to them: the strategy of other programs than this package's.

In: a layer of experts (``passes.ops.experts``), an axis. Out: the strategy in which every rank has
its own tokens and its own experts, with the messages inside: tokens to their experts and results
back, and the same of the gradients; and the call that a rank makes of the tokens that it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph import Node, TensorSpec
from ..layout import AxisStrategy, InnerCollective, NodeLayout, shard
from .case import argument

SENT = "sent"
"""The label of the strategy."""


def sent_strategies(
    node: Node, inputs: Sequence[TensorSpec], axis_size: int
) -> tuple[AxisStrategy, ...]:
    """Return the strategy that sends tokens to their experts: one for a layer of experts that the
    axis divides, none for other nodes."""
    if not is_expert_layer(node) or axis_size == 1:
        return ()
    tokens, ids, weights = inputs[0], inputs[1], inputs[FIRST_WEIGHT:]
    if tokens.shape[0] % axis_size or any(each.shape[0] % axis_size for each in weights):
        return ()
    directions = (False, True) if tokens.requires_grad else (False,)
    sent = tuple(
        InnerCollective("dispatch", spec.num_bytes, backward, copies=ids.shape[1])
        for backward in directions
        for spec in (tokens, node.spec)
    )
    return (AxisStrategy(SENT, (shard(0),) * len(inputs), (shard(0),), sent),)


def as_received(node: Node, layout: NodeLayout, mesh_shape: Sequence[int]) -> Node:
    """Return a layer of experts as a rank computes it on the tokens that it received.

    If routing is even, a rank receives as many pairs of a token and an expert as it sends. So with
    its own tokens' number, its experts count as all that there are.
    """
    parts = 1
    for tokens, weight, size in zip(
        layout.inputs[0], layout.inputs[FIRST_WEIGHT], mesh_shape, strict=True
    ):
        parts *= size if tokens.is_shard and weight.is_shard else 1
    if parts == 1:
        return node
    count = int(argument(node, 8, "num_experts"))
    return replace(node, kwargs={**node.kwargs, "num_experts": count // parts})
