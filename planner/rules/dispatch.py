"""Experts whose tokens are sent to them: the strategy of other programs than this package's.

In: a layer of experts (``passes.ops.experts``), an axis. Out: the strategy in which every rank has
its own tokens and its own experts, with the messages inside: tokens to their experts and results
back, and the same of the gradients; and the call that a rank makes of the tokens that it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..graph import Node, TensorSpec
from ..layout import AxisStrategy, InnerCollective, NodeLayout, shard
from .case import argument
from .table import packet

EXPERTS = "experts"
SENT = "sent"
"""The label of the strategy."""
FIRST_WEIGHT = 3


def sent_strategies(
    node: Node, inputs: Sequence[TensorSpec], axis_size: int
) -> tuple[AxisStrategy, ...]:
    """The strategy of a layer of experts whose tokens are sent; nothing for other nodes."""
    if node.kind != "op" or packet(node.op) != EXPERTS or axis_size == 1:
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
    """The layer as a rank computes it: its experts take the tokens of all ranks, so that of as
    many tokens as its own each visits as many of them."""
    if packet(node.op) != EXPERTS:
        return node
    parts = 1
    for tokens, weight, size in zip(
        layout.inputs[0], layout.inputs[FIRST_WEIGHT], mesh_shape, strict=True
    ):
        parts *= size if tokens.is_shard and weight.is_shard else 1
    if parts == 1:
        return node
    count = int(argument(node, 8, "num_experts"))
    return replace(node, kwargs={**node.kwargs, "num_experts": count // parts})
