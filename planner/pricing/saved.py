"""Bytes on a rank that ops keep for the backward, and use while they run.

In: a node in a layout. Out: what autograd keeps of it as (storage, bytes), so that tensors
that share storage (a view and its base, a value that two ops keep) count once in a block;
and the bytes of its inputs and outputs. Sizes of states and activations: see ``prices``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..graph import Graph, Node, Ref, TensorSpec
from ..layout import Layout
from ..rules.balanced_attention import as_run
from ..rules.storage import copy_of
from ..strategy import NodeLayout
from .choices import input_specs
from .price_cache import find
from .prices import Prices

Part = tuple[str, int]


def saved_parts(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> tuple[Part, ...]:
    """What autograd keeps of an op on a rank: each storage's name and local bytes."""
    if not any(spec.requires_grad for spec in node.outputs):
        return ()
    found: dict[Part, None] = {}
    for ref in prices.rules.saved(node, graph):
        root, spec = memory_of(ref, node, graph, prices)
        if not _is_kept(ref, root, node, layout, graph):
            continue
        num_bytes = prices.local_bytes(spec, layout_of(ref, node, layout))
        found[f"{root.name}:{root.index}", num_bytes] = None
    run = as_run(node, layout, prices.mesh.shape)
    extra = prices.rules.saved_extra_bytes(run, *_local_specs(node, layout, graph, prices))
    if extra:
        found[f"{node.name}:extra", int(extra)] = None
    return tuple(found)


def _is_kept(ref: Ref, root: Ref, node: Node, layout: NodeLayout, graph: Graph) -> bool:
    """Whether what an op keeps takes memory of its own.

    A parameter and a view of one are there anyway; but a part of one that is wanted split
    (a projection of fused ones) is made anew, as the parameter's own split cuts elsewhere.
    """
    kind = graph[root.name].kind
    if kind == "parameter" and ref != root:
        is_part = graph.spec(ref).numel < graph.spec(root).numel
        return is_part and any(each.is_shard for each in layout_of(ref, node, layout))
    return kind in ("op", "input")


def layout_of(ref: Ref, node: Node, layout: NodeLayout) -> Layout:
    """The layout in which a node sees one of its inputs or outputs."""
    if ref.name == node.name:
        return layout.outputs[ref.index]
    return layout.inputs[node.inputs.index(ref)]


def memory_of(ref: Ref, node: Node, graph: Graph, prices: Prices) -> tuple[Ref, TensorSpec]:
    """The value whose memory holds what an op keeps of an input or output: its own copy of it,
    or what the value is a view of."""
    if ref.name != node.name:
        copied = copy_of(node.name, node.inputs.index(ref))
        if copied in storages(graph, prices):
            return Ref(*copied), graph.spec(ref)
    root = storage(ref, graph, prices)
    return root, graph.spec(root)


def storage(ref: Ref, graph: Graph, prices: Prices) -> Ref:
    """The value whose memory a value lives in: itself, or what it is a view of."""
    return Ref(*storages(graph, prices)[ref.name, ref.index])


def storages(graph: Graph, prices: Prices) -> Mapping[tuple[str, int], tuple[str, int]]:
    """The same of all values, found once."""
    return find(prices.cache.storages, None, lambda: prices.rules.storage_of(graph))


def working_bytes(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> int:
    """What an op's distinct inputs and its outputs take on a rank."""
    inputs = dict(zip(node.inputs, layout.inputs, strict=True))
    return sum(prices.local_bytes(graph.spec(ref), each) for ref, each in inputs.items()) + sum(
        prices.local_bytes(spec, each)
        for spec, each in zip(node.outputs, layout.outputs, strict=True)
    )


def _local_specs(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    inputs = tuple(
        prices.local(spec, each)
        for spec, each in zip(input_specs(node, graph), layout.inputs, strict=True)
    )
    outputs = tuple(
        prices.local(spec, each) for spec, each in zip(node.outputs, layout.outputs, strict=True)
    )
    return inputs, outputs
