"""Restriction of strategies to splits of the batch, of positions, of parameters, or of none.

In: a node with its strategies on an axis. Out: the strategies that split every batch dimension, or
none; that split positions; or that split parameters. If no strategy does, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..graph.graph import Graph, Node
from ..graph.layout import AxisStrategy, Placement, shard
from ..graph.positions import Dims, features_only, splits


def positions_split(
    node: Node, strategies: tuple[AxisStrategy, ...], dims: Dims
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split outputs along positions; else those that split any value so;
    else those that split no value along rows or positions."""
    fitting = tuple(strategy for strategy in strategies if splits(node, strategy, dims))
    making = tuple(
        strategy for strategy in fitting if any(each.is_shard for each in strategy.outputs)
    )
    return making or fitting or features_only(node, strategies, dims)


def batch_split(
    node: Node,
    dims: Mapping[str, tuple[int | None, ...]],
    strategies: tuple[AxisStrategy, ...],
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split every tensor that has a batch dimension along it; all if
    none does. ``dims``: batch dimensions of each node's outputs."""
    if node.name not in dims:
        return strategies
    inputs = [dims[ref.name][ref.index] for ref in node.inputs]
    outputs = list(dims[node.name])
    fitting = tuple(
        strategy
        for strategy in strategies
        if all(map(_fits_batch, inputs, strategy.inputs))
        and all(map(_fits_batch, outputs, strategy.outputs))
    )
    return fitting or strategies


def batch_whole(
    node: Node, graph: Graph, strategies: tuple[AxisStrategy, ...]
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split no tensor along its batch dimension; all if none is left."""
    if not graph.batch_dims:
        return strategies
    dims = [graph.batch_dims[ref.name][ref.index] for ref in node.inputs]
    dims += graph.batch_dims[node.name]
    fitting = tuple(
        strategy
        for strategy in strategies
        if not any(
            dim is not None and placement == shard(dim)
            for dim, placement in zip(dims, (*strategy.inputs, *strategy.outputs), strict=True)
        )
    )
    return fitting or strategies


def parameters_split(
    node: Node, graph: Graph, strategies: tuple[AxisStrategy, ...]
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that use all parameters of two or more dims split; all if none does."""
    wide = [
        position
        for position, ref in enumerate(node.inputs)
        if _is_weight(graph[ref.name], graph) and len(graph.spec(ref).shape) >= 2
    ]
    fitting = tuple(
        strategy
        for strategy in strategies
        if all(strategy.inputs[position].is_shard for position in wide)
    )
    return fitting or strategies


def _is_weight(node: Node, graph: Graph) -> bool:
    """Return whether a node is a parameter or a part cut from a fused parameter."""
    is_cut = node.kind == "op" and node.op.startswith("aten.split_with_sizes.")
    return node.kind == "parameter" or (is_cut and _is_weight(graph[node.inputs[0].name], graph))


def _fits_batch(dim: int | None, placement: Placement) -> bool:
    return not placement.is_shard if dim is None else placement == shard(dim)
