"""Seconds of the ops that run beside the exchange of a layer of experts.

In: a layer of experts in a block, prices. Out: a lower bound, forward and backward, of the seconds
that these ops compute on a rank, so that a price never hides more of the exchange than runs beside
compute. The bound is the seconds of whole ops divided by the number of ranks; of the backward it
leaves out weight gradients, which may be computed later.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.beside import ops_beside
from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Graph, Node
from ..graph.layout import INVARIANT, NodeLayout
from .choices import input_specs
from .kept_bytes import weight_grad_share
from .price_cache import find
from .prices import Prices


def seconds_beside(
    node: Node, nodes: Sequence[str], graph: Graph, prices: Prices
) -> tuple[float, float]:
    """Return the least seconds, forward and backward, of the ops beside a layer of experts in a
    block of ops ``nodes``; 0 for other nodes. Unlike ranks share their work in other parts, so that
    nothing is known of theirs."""
    if not is_expert_layer(node) or not prices.assumptions.hides_exchanges or prices.own:
        return 0.0, 0.0
    names = find(prices.cache.beside, tuple(nodes), lambda: ops_beside(nodes, graph)).get(
        node.name, ()
    )
    found = [_least(graph[name], graph, prices.unrecorded) for name in names]
    return sum(each[0] for each in found), sum(each[1] for each in found)


def _least(node: Node, graph: Graph, prices: Prices) -> tuple[float, float]:
    whole = (INVARIANT,) * len(prices.mesh.shape)
    layout = NodeLayout((whole,) * len(node.inputs), (whole,) * len(node.outputs))
    forward, backward = prices.compute(node, input_specs(node, graph), layout)
    late = weight_grad_share(node, graph, prices) * backward
    return forward / prices.mesh.size, (backward - late) / prices.mesh.size
