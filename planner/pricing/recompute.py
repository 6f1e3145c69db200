"""What a recomputed block keeps on a rank; what it runs again is in ``planner.replay``."""

from __future__ import annotations

from ..graph import Block, Graph, Node, Ref
from ..replay import AGAIN as AGAIN
from ..replay import Replay as Replay
from ..replay import find_replay
from ..rules.table import packet
from ..strategy import NodeLayout
from .choices import dims_on, input_specs
from .prices import Prices
from .saved import Part, saved_parts, storages

SMALLEST_AXIS = 2
"""Ranks of the axis that dimensions of positions are found with."""


def replay(block: Block, graph: Graph, prices: Prices) -> Replay:
    """What the backward of a block runs again, found once per graph."""
    given, core = (block, graph), prices.assumptions.attention_core

    def make() -> Replay:
        found = find_replay(block, graph, prices.rules, storages(graph, prices))
        return _of_core(found, block, graph, prices) if core else found

    return prices.cache.replays.find((core,), given, make)


def _of_core(found: Replay, block: Block, graph: Graph, prices: Prices) -> Replay:
    """The same, where selective recomputation runs the core of attention again and nothing else:
    attention as one op, or the ops on values with two dimensions of positions (scores)."""
    dims = dims_on(graph, SMALLEST_AXIS, prices)

    def is_square(ref: Ref) -> bool:
        batch = graph.batch_dims[ref.name][ref.index] if graph.batch_dims else None
        return len(dims.get(ref, frozenset()) - {batch}) >= 2

    def is_core(node: Node) -> bool:
        made = (Ref(node.name, index) for index in range(len(node.outputs)))
        return packet(node.op) == "scaled_dot_product_attention" or any(
            map(is_square, (*node.inputs, *made))
        )

    kept = frozenset(name for name in block.nodes if not is_core(graph[name]))
    uses = ((name, at) for name in block.nodes for at in range(len(graph[name].inputs)))
    return Replay(
        kept, {**found.spared, "selective": kept}, {**found.unread, "selective": frozenset(uses)}
    )


def kept_parts(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices, *, of: Replay
) -> tuple[Part, ...]:
    """What selective recomputation keeps of an op on a rank: each storage and its local bytes."""
    batch = read_parts(node, layout, graph, prices)
    if prices.assumptions.attention_core:
        own = saved_parts(node, layout, graph, prices)
        return (*batch, *(part for part in own if part[0].rpartition(":")[0] in of.kept))
    if node.name not in of.kept:
        return batch
    found = [
        (f"{node.name}:{index}", prices.local_bytes(spec, placed))
        for index, (spec, placed) in enumerate(zip(node.outputs, layout.outputs, strict=True))
    ]
    inputs = tuple(
        prices.local(spec, each)
        for spec, each in zip(input_specs(node, graph), layout.inputs, strict=True)
    )
    outputs = tuple(
        prices.local(spec, each) for spec, each in zip(node.outputs, layout.outputs, strict=True)
    )
    extra = prices.rules.kept_extra_bytes(node, inputs, outputs)
    if extra:
        found.append((f"{node.name}:extra", int(extra)))
    return (*batch, *found)


def read_parts(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> tuple[Part, ...]:
    """What any recomputation keeps of the batch for an op on a rank: the inputs that it reads."""
    pairs = zip(node.inputs, layout.inputs, strict=True)
    found = {
        (f"{ref.name}:{ref.index}", prices.local_bytes(graph.spec(ref), each)): None
        for ref, each in pairs
        if graph[ref.name].kind == "input"
    }
    return tuple(found)
