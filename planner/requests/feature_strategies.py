"""Strategies of an op under allowed features: without split rows, positions or experts.

In: an op's strategies on one axis, the dimensions that count rows and positions, features. Out: the
strategies without denied features. At least one remains: an op can run whole.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph import Graph, Node, Ref
from ..layout import AxisStrategy, shard
from ..positions import Dims
from .features import Features

ATTENTION = "aten.scaled_dot_product_attention"


def allowed(
    node: Node,
    graph: Graph,
    strategies: tuple[AxisStrategy, ...],
    dims: Callable[[], Dims],
    features: Features,
) -> tuple[AxisStrategy, ...]:
    """Return the strategies without denied features, or all if none remains."""
    own = "cp" if node.op.startswith(ATTENTION) else "sp"
    found = strategies
    if not features.allows("dp") and graph.batch_dims:
        found = tuple(each for each in found if not _splits_rows(node, graph, each))
    if not features.allows(own):
        known = dims()
        found = tuple(each for each in found if not _splits_positions(node, graph, each, known))
    if not features.allows("ep"):
        found = tuple(each for each in found if not _splits_experts(node, graph, each))
    return found or strategies


def _splits_rows(node: Node, graph: Graph, strategy: AxisStrategy) -> bool:
    """Return whether a value is split along the batch."""
    rows = [graph.batch_dims[ref.name][ref.index] for ref in node.inputs]
    rows += graph.batch_dims[node.name]
    placements = (*strategy.inputs, *strategy.outputs)
    return any(
        row is not None and placement == shard(row)
        for row, placement in zip(rows, placements, strict=True)
    )


def _splits_positions(node: Node, graph: Graph, strategy: AxisStrategy, dims: Dims) -> bool:
    """Return whether a value of the batch is split along a dimension of positions, not of rows."""
    refs = (*node.inputs, *(Ref(node.name, index) for index in range(len(node.outputs))))
    placements = (*strategy.inputs, *strategy.outputs)
    for ref, placement in zip(refs, placements, strict=True):
        rows = graph.batch_dims[ref.name][ref.index] if graph.batch_dims else None
        if placement.is_shard and placement.dim in dims.get(ref, frozenset()) - {rows}:
            return True
    return False


def _splits_experts(node: Node, graph: Graph, strategy: AxisStrategy) -> bool:
    """Return whether weights of three dimensions, experts first, are split there."""
    if "conv" in node.op:
        return False
    return any(
        graph[ref.name].kind == "parameter"
        and len(graph.spec(ref).shape) == 3
        and placement == shard(0)
        for ref, placement in zip(node.inputs, strategy.inputs, strict=True)
    )
