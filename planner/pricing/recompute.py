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
    if node.name not in of.kept:
        return ()
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
    extra = prices.rules.saved_extra_bytes(node, inputs, outputs)
    if extra:
        found.append((f"{node.name}:extra", int(extra)))
    return tuple(found)
