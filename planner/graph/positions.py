"""Dimensions of tensors that count rows and positions, in contrast to features.

In: a graph, the strategies of its ops. Out: for each value the dimensions that descend from a
dimension of a batch input. An output dimension descends from an input dimension if some strategy of
the op splits both: ``linear: "*b i, o i -> *b o"`` carries the dims of ``*b`` and makes a new one,
``o``. The other dimensions are the features: heads, hidden units, vocabulary.

Tensor parallelism of Megatron-LM splits features only; its sequence parallelism splits values
between two tensor-parallel regions along positions (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .graph import Graph, Node, Ref
from .layout import RINGS, AxisStrategy

Dims = Mapping[Ref, frozenset[int]]
_Offered = tuple[AxisStrategy, ...]
Strategies = Callable[[Node], _Offered]

NONE: frozenset[int] = frozenset()


def position_dims(graph: Graph, strategies: Strategies) -> Dims:
    """Map each value that depends on the batch to its dimensions of rows (samples) or sequence
    positions. ``strategies`` returns an op's sharding strategies."""
    found: dict[Ref, frozenset[int]] = {
        Ref(node.name): frozenset(range(len(node.spec.shape))) for node in graph.inputs
    }
    known: dict[object, tuple[_Offered, tuple[frozenset[int], ...]]] = {}
    for node in graph:
        if node.kind != "op":
            continue
        read = tuple(found.get(ref, NONE) for ref in node.inputs)
        if not any(read):
            continue
        offered = strategies(node)
        key = (id(offered), read)
        if key not in known:  # many equal nodes are offered the same strategies object
            known[key] = offered, _carried(node, offered, read)
        for index, dims in enumerate(known[key][1]):
            found[Ref(node.name, index)] = dims
    return found


def _carried(
    node: Node, offered: _Offered, read: Sequence[frozenset[int]]
) -> tuple[frozenset[int], ...]:
    """Return, for each output, its dimensions that a strategy of ``offered`` splits together with
    one of an input's dimensions ``read``. Keys have the positions of queries only by chance."""
    follow = [
        strategy
        for strategy in offered
        if strategy.label not in RINGS
        and any(
            placement.is_shard and placement.dim in dims
            for dims, placement in zip(read, strategy.inputs, strict=True)
        )
    ]
    return tuple(
        frozenset(each.outputs[index].dim for each in follow if each.outputs[index].is_shard)
        for index in range(len(node.outputs))
    )


def features_only(
    node: Node, strategies: tuple[AxisStrategy, ...], dims: Dims
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split no tensor along rows or positions, or else all."""
    fitting = tuple(strategy for strategy in strategies if not splits(node, strategy, dims))
    return fitting or strategies


def positions_where_whole(
    node: Node, strategies: tuple[AxisStrategy, ...], dims: Dims
) -> tuple[AxisStrategy, ...]:
    """Remove strategies on whole tensors if any strategy splits rows or positions (``dims``)."""
    if not any(splits(node, strategy, dims) for strategy in strategies):
        return strategies
    return tuple(strategy for strategy in strategies if strategy.label not in ("I", "R"))


def splits(node: Node, strategy: AxisStrategy, dims: Dims) -> bool:
    """Return whether a strategy splits an input or output along rows or positions (``dims``)."""
    made = tuple(Ref(node.name, index) for index in range(len(node.outputs)))
    return any(
        placement.is_shard and placement.dim in dims.get(ref, ())
        for ref, placement in zip(
            (*node.inputs, *made), (*strategy.inputs, *strategy.outputs), strict=True
        )
    )


def by_entries(
    node: Node, strategies: tuple[AxisStrategy, ...], dims: Dims
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split an embedding's table by entries; all for other ops, or if
    the indices do not depend on the batch."""
    if not node.op.startswith("aten.embedding.") or not dims.get(node.inputs[1]):
        return strategies
    fitting = tuple(
        strategy
        for strategy in strategies
        if strategy.inputs[0].is_shard and strategy.inputs[0].dim == 0
    )
    return fitting or strategies
