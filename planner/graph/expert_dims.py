"""Weights of experts, and dimensions of values that count experts.

In: a graph, the strategies of its ops on an axis. Out: for each value the dimensions that count
experts. An expert's weight has three dimensions, of which the first counts experts: a product keeps
it apart (``egcm, emh -> egch``), as does the layer of experts that captures fuse into one op
(``passes/ops/experts.py``, whose biases count experts too). From the weights the dimension is
followed through ops as positions are (``positions``): to views of weights, and to values until a
sum over experts.

An axis "ep" splits these dimensions, and everything else by rows, as data parallelism does; the
conversions between the two are the all-to-alls of GShard (Lepikhin et al. 2020, arXiv:2006.16668,
section 3.3). Its size must divide the number of experts; otherwise it has no expert strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .graph import Graph, Node, Ref
from .layout import AxisStrategy, Placement
from .positions import Dims, Strategies

PRODUCTS = ("aten.einsum.", "aten.bmm.", "aten.matmul.", "aten.baddbmm.", "aten._grouped_mm.")
LAYER = "autoparallel.experts"
FIRST_WEIGHT = 3
"""Position of an expert layer's first weight among its inputs; all later inputs are weights."""


def is_expert_layer(node: Node) -> bool:
    """Return whether a node is a whole mixture-of-experts layer, captured as a single op."""
    return node.op.startswith(LAYER)


@dataclass(frozen=True, slots=True)
class ExpertDims:
    """Tensor dimensions that index experts. ``weights``: number of experts by expert weight;
    ``views``: expert weights and values computed from one of them alone; ``dims``: by value, its
    dimensions that index experts."""

    weights: Mapping[str, int]
    views: frozenset[Ref]
    dims: Dims


def expert_dims(graph: Graph, strategies: Strategies) -> ExpertDims:
    """Find the weights of experts, and the dimensions of all values that index experts.
    ``strategies`` returns an op's sharding strategies."""
    views = _views(graph, strategies)
    weights: dict[str, int] = {}
    dims: dict[Ref, frozenset[int]] = {}
    for node in graph:
        if node.kind != "op" or Ref(node.name) in views:
            continue
        found = _read_by(node, strategies, views)
        weights |= {views[ref][0]: graph[views[ref][0]].spec.shape[0] for ref in found}
        known = {ref: dims[ref] for ref in node.inputs if ref in dims}
        known |= {ref: views[ref][1] for ref in found}
        if known:
            dims |= _descended(node, strategies(node), known)
    own = {ref: each for ref, (parameter, each) in views.items() if parameter in weights}
    dims |= own
    return ExpertDims(weights, frozenset(own), {ref: each for ref, each in dims.items() if each})


def experts_of_layers(graph: Graph) -> tuple[int, ...]:
    """Return the distinct numbers of experts of the expert layers in a graph."""
    layers = filter(is_expert_layer, graph)
    return tuple(sorted({graph.spec(node.inputs[FIRST_WEIGHT]).shape[0] for node in layers}))


def router_nodes(graph: Graph) -> frozenset[str]:
    """Return the names of the ops that choose experts and scores from the tokens of expert layers,
    and of the parameters that only these ops read."""
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    found = set[str]()
    for layer in filter(is_expert_layer, graph):
        chosen = {places[ref.name] for ref in layer.inputs[1:FIRST_WEIGHT]}
        tokens = {places[layer.inputs[0].name]}
        while chosen := chosen - tokens:
            node = graph.nodes[max(chosen | tokens)]
            of_tokens = places[node.name] in tokens
            (tokens if of_tokens else chosen).remove(places[node.name])
            if node.kind == "op":
                (tokens if of_tokens else chosen).update(places[ref.name] for ref in node.inputs)
                if not of_tokens:
                    found.add(node.name)
    own = (node.name for node in graph.parameters if found.issuperset(graph.users[node.name]))
    return frozenset(found.union(own))


def _views(graph: Graph, strategies: Strategies) -> dict[Ref, tuple[str, frozenset[int]]]:
    """Map each parameter that may be an expert weight, and each value computed from it alone, to
    (parameter, dimensions of the value that would index experts)."""
    found: dict[Ref, tuple[str, frozenset[int]]] = {
        Ref(node.name): (node.name, frozenset({0}))
        for node in graph
        if node.kind == "parameter" and len(node.spec.shape) in (2, 3)
    }
    for node in graph:
        if node.kind == "op" and len(node.inputs) == 1 and node.inputs[0] in found:
            parameter, own = found[node.inputs[0]]
            made = _descended(node, strategies(node), {node.inputs[0]: own})
            found |= {ref: (parameter, dims) for ref, dims in made.items()}
    return found


def _read_by(
    node: Node, strategies: Strategies, views: Mapping[Ref, tuple[str, frozenset[int]]]
) -> tuple[Ref, ...]:
    """Return the expert weights (or their views) that an op multiplies by, expert by expert."""
    if is_expert_layer(node):
        return tuple(ref for ref in node.inputs[FIRST_WEIGHT:] if ref in views)
    if not node.op.startswith(PRODUCTS):
        return ()
    return tuple(
        ref
        for position, ref in enumerate(node.inputs)
        if ref in views
        and len(node.inputs) > 1
        and any(_keeps_apart(each, position, views[ref][1]) for each in strategies(node))
    )


def _keeps_apart(strategy: AxisStrategy, position: int, dims: frozenset[int]) -> bool:
    """Return whether a strategy splits all tensors, input ``position`` along one of ``dims``."""
    own = strategy.inputs[position]
    every = all(each.is_shard for each in (*strategy.inputs, *strategy.outputs))
    return every and own.dim in dims


def _descended(
    node: Node, strategies: Sequence[AxisStrategy], known: Mapping[Ref, frozenset[int]]
) -> dict[Ref, frozenset[int]]:
    """Return, for each output, its dimensions that a strategy splits together with a dimension in
    ``known`` of an input."""
    fitting = [
        strategy
        for strategy in strategies
        if any(
            placement.is_shard and placement.dim in known.get(ref, ())
            for ref, placement in zip(node.inputs, strategy.inputs, strict=True)
        )
    ]
    return {
        Ref(node.name, index): frozenset(
            each.outputs[index].dim for each in fitting if each.outputs[index].is_shard
        )
        for index in range(len(node.outputs))
    }


def by_experts(
    node: Node,
    strategies: tuple[AxisStrategy, ...],
    by_rows: tuple[AxisStrategy, ...],
    found: ExpertDims,
) -> tuple[AxisStrategy, ...]:
    """Return the strategies of ``node`` on an expert-parallel mesh axis "ep".

    ``strategies`` are all its strategies, ``by_rows`` the strategies that split the batch. An op
    that reads expert weights is split along experts. An op on other values that have an expert
    dimension may be split along experts or rows, every other op along rows.
    """
    used = [found.dims.get(ref, frozenset[int]()) for ref in node.inputs]
    if not any(used) and Ref(node.name) not in found.dims:
        return by_rows
    views = [index for index, ref in enumerate(node.inputs) if ref in found.views]
    split = tuple(
        strategy
        for strategy in strategies
        if any(map(_splits, strategy.inputs, used))
        and all(_splits(strategy.inputs[index], used[index]) for index in views)
    )
    return split if views and split else tuple(dict.fromkeys((*by_rows, *split)))


def _splits(placement: Placement, dims: frozenset[int]) -> bool:
    return placement.is_shard and placement.dim in dims
