"""A captured model made deeper: one of its layers repeated.

In: a graph with its blocks, captured with a few equal layers, and how many layers are wanted. Out:
the graph and the blocks of the model with so many layers. A copy of a layer reads of the layer
before it what the layer itself reads of the one before, so a copy costs what a captured layer does
(tested against a model that was captured at its depth).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoparallel.planner.configured.configuration import find_equal
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref, map_refs

FEWEST_LAYERS = 3
"""A first layer, one that is repeated, and a last one."""


def deeper(graph: Graph, blocks: Blocks, num_layers: int) -> tuple[Graph, Blocks]:
    """The model with ``num_layers`` equal layers: the second of these is repeated.

    Raises ``ValueError`` for a model of fewer than ``FEWEST_LAYERS``, or of more than is asked for.
    """
    layers = find_equal(blocks)
    more = num_layers - len(layers)
    if more == 0:
        return graph, blocks
    if more < 0 or len(layers) < FEWEST_LAYERS:
        raise ValueError(f"{len(layers)} layers cannot stand for {num_layers}")
    before, repeated = (blocks.blocks[at] for at in layers[:2])
    to_repeated = dict(zip(before.nodes, repeated.nodes, strict=True))
    nodes: list[Node] = []
    copies: list[Block] = []
    dims = dict(graph.batch_dims)
    previous: Mapping[str, str] = {}
    own = {*repeated.nodes, *repeated.parameters}
    originals = [node for node in graph.nodes if node.name in own]
    for copy in range(more):
        names = {name: f"{name}+{copy + 1}" for name in own}
        sources = {name: previous.get(other, other) for name, other in to_repeated.items()} | names
        nodes += [_renamed(node, names[node.name], sources) for node in originals]
        dims |= {names[name]: graph.batch_dims[name] for name in own if name in graph.batch_dims}
        copies.append(_copied(repeated, names, copy + 1))
        previous = names
    after = layers[1] + 1
    position = 1 + max(at for at, node in enumerate(graph.nodes) if node.name in own)
    rest = [_renamed(node, node.name, previous) for node in graph.nodes[position:]]
    found = replace(graph, nodes=(*graph.nodes[:position], *nodes, *rest), batch_dims=dims)
    return found, Blocks((*blocks.blocks[:after], *copies, *blocks.blocks[after:]))


def _renamed(node: Node, name: str, sources: Mapping[str, str]) -> Node:
    """The node under another name, which reads the values' sources in their place."""

    def source(ref: Ref) -> Ref:
        return Ref(sources.get(ref.name, ref.name), ref.index)

    return replace(
        node,
        name=name,
        args=map_refs(node.args, source),
        kwargs=map_refs(dict(node.kwargs), source),
    )


def _copied(block: Block, names: Mapping[str, str], number: int) -> Block:
    return Block(
        f"{block.name}+{number}",
        block.kind,
        tuple(names[name] for name in block.nodes),
        tuple(names.get(name, name) for name in block.parameters),
    )
