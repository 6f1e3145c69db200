"""What a recomputed block keeps on a rank; what it runs again is in ``planner.replay``."""

from __future__ import annotations

from ..graph import Block, Graph, Node
from ..replay import AGAIN as AGAIN
from ..replay import Replay as Replay
from ..replay import find_replay
from ..strategy import NodeLayout
from .choices import input_specs
from .prices import Prices
from .same import known
from .saved import Part, storages


def replay(block: Block, graph: Graph, prices: Prices) -> Replay:
    """What the backward of a block runs again, found once per graph."""
    given = (block, graph)
    return known(
        prices.cache, ("replay",), given,
        lambda: find_replay(block, graph, prices.rules, storages(graph, prices)),
    )  # fmt: skip


def kept_parts(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices, *, of: Replay
) -> tuple[Part, ...]:
    """What selective recomputation keeps of an op on a rank: each storage and its local bytes."""
    batch = read_parts(node, layout, graph, prices)
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
