"""Bytes on a rank that ops keep for the backward and use while they run; deferred weight gradients.

In: a node in a layout. Out: the (storage, bytes) that autograd keeps, so that tensors that share
storage (a view and its base, a value that two ops keep) count once in a block; the bytes of its
inputs and outputs; the storages kept in a recomputed block (``planner.kernels.recompute`` finds its
rerun ops); the seconds of its weight gradients and the bytes kept for them. Sizes of states and
activations: see ``prices``.

Schedules that split the backward (ZB-H1, ZB-H2, ZB-V, DualPipeV) defer the weight gradients of
matrix products, convolutions and embeddings whose weights are made of parameters alone, as
``passes.backward.weight_gradients`` does. The first half has everything else: the backward of other
ops, recomputation, every collective. The product for the weights has as many FLOPs and bytes as the
product for the data, so it takes half of the op's backward, or all of it if the data has no
gradient; likewise on the host. Until then a micro-batch keeps the op's data and the gradient of its
result.

In each half a block waits until the device has computed and the host has issued it: with C and H
their seconds for the whole backward, and c and h for the deferred part, the halves take max(C - c,
H - h) and max(c, h). So a faster device or host never lengthens a half.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph.graph import Block, Graph, Node, Ref, TensorSpec
from ..graph.layout import Layout, NodeLayout
from ..kernels.recompute import RECOMPUTE_MODES as RECOMPUTE_MODES
from ..kernels.recompute import Replay as Replay
from ..kernels.recompute import find_replay
from ..kernels.tiles import last_region
from ..ops.attention import ring_axes, ring_buffers
from ..ops.case import packet
from ..ops.catalog import spec_of
from ..ops.experts import as_run
from ..ops.products import expert_pairs
from ..ops.storage import copy_of
from .choices import input_specs
from .price_cache import find
from .prices import Prices
from .recomputed_parts import of_parts

Part = tuple[str, int]


def saved_parts(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> tuple[Part, ...]:
    """Return (storage, bytes per rank) of the tensors that autograd keeps for an op's backward. A
    storage is the memory of a tensor and its views."""
    if not any(spec.requires_grad for spec in node.outputs):
        return ()
    found: dict[Part, None] = {}
    run, local = as_run(node, layout, prices.mesh.shape), _local_specs(node, layout, graph, prices)
    for ref in prices.rules.saved(run, graph):
        root, spec = memory_of(ref, node, graph, prices)
        if not _is_kept(ref, root, node, layout, graph):
            continue
        num_bytes = prices.local_bytes(spec, layout_of(ref, node, layout))
        if prices.assumptions.regathers:
            num_bytes //= _gathered_over(ref, node, layout, prices)
        if node.product_dtype and prices.assumptions.keeps_casts:
            cast_bytes = int(num_bytes * prices.cast_element_bytes / spec.itemsize)
            found[f"{node.name}:{root.name}", cast_bytes] = None
            continue
        found[f"{root.name}:{root.index}", num_bytes] = None
    extra = prices.rules.saved_extra_bytes(run, *local)
    if is_expert_layer(node) and prices.assumptions.expert_kernels != "separate":
        extra = int(_fused_experts_bytes(run, local[0], prices))
    if is_expert_layer(node):
        spread = prices.spread(node, input_specs(node, graph), layout)
        extra = int(spread.busiest * extra) + spread.copied_bytes
    if extra:
        found[f"{node.name}:extra", int(extra)] = None
    return tuple(found)


def _fused_experts_bytes(node: Node, inputs: Sequence[TensorSpec], prices: Prices) -> float:
    """Return the bytes that experts in fused kernels keep for the backward: for each (token,
    expert) pair the token, and the activation function's input and result."""
    tokens, up, down = inputs[0], inputs[FIRST_WEIGHT], inputs[FIRST_WEIGHT + 1]
    per_expert = [weight.numel // weight.shape[0] for weight in (up, down)]
    read, made = (numel // tokens.shape[-1] for numel in per_expert)
    factor = prices.cast_element_bytes if prices.casts_experts else tokens.itemsize
    made = 0 if "moe_act" in prices.assumptions.recomputed else made
    row = factor * (tokens.shape[-1] + made) + tokens.itemsize * read
    return expert_pairs(node, inputs) * row


def _gathered_over(ref: Ref, node: Node, layout: NodeLayout, prices: Prices) -> int:
    """Return the number of ranks over which a linear layer's input is gathered, if they split its
    weight by rows; else 1."""
    if packet(node.op) != "linear" or ref != node.inputs[0]:
        return 1
    data, weight = layout.inputs[:2]
    axes = zip(data, weight, prices.mesh.shape, strict=True)
    return prod(size for own, rows, size in axes if not own.is_shard and rows.is_shard)


def _is_kept(ref: Ref, root: Ref, node: Node, layout: NodeLayout, graph: Graph) -> bool:
    """Return whether keeping ``ref`` for the backward takes memory beside its base ``root``.

    A parameter and its views are in memory anyway; but a part of a parameter that is used split
    (one of several fused projections) is a copy, as the parameter is split elsewhere.
    """
    kind = graph[root.name].kind
    if kind == "parameter" and ref != root:
        is_part = graph.spec(ref).numel < graph.spec(root).numel
        return is_part and any(each.is_shard for each in layout_of(ref, node, layout))
    return kind in ("op", "input")


def layout_of(ref: Ref, node: Node, layout: NodeLayout) -> Layout:
    """Return the layout in which a node reads or makes ``ref``."""
    if ref.name == node.name:
        return layout.outputs[ref.index]
    return layout.inputs[node.inputs.index(ref)]


def memory_of(ref: Ref, node: Node, graph: Graph, prices: Prices) -> tuple[Ref, TensorSpec]:
    """Return the value that owns the memory of an op's input or output, and its spec: a copy that
    the op makes itself, or the base of a view."""
    if ref.name != node.name:
        copied = copy_of(node.name, node.inputs.index(ref))
        if copied in storages(graph, prices):
            return Ref(*copied), graph.spec(ref)
    root = storage(ref, graph, prices)
    return root, graph.spec(root)


def storage(ref: Ref, graph: Graph, prices: Prices) -> Ref:
    """Return the value that owns the memory of ``ref``: itself, or the base of a view."""
    return Ref(*storages(graph, prices)[ref.name, ref.index])


def storages(graph: Graph, prices: Prices) -> Mapping[tuple[str, int], tuple[str, int]]:
    """Map each value to the value that owns its memory. Cached for one sample, whose values may be
    views where others are copies, and for all larger micro-batches."""
    key = min(graph.batch_size, 2)
    return find(prices.cache.storages, key, lambda: prices.rules.storage_of(graph))


def working_bytes(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> int:
    """Return the bytes per rank of an op's distinct inputs and its outputs, and of the buffers of
    ring attention.

    Values that a fused kernel keeps in registers do not count.
    """
    reads: Sequence[int] = range(len(node.inputs))
    writes: Sequence[int] = range(len(node.outputs))
    if node.fused is not None:
        reads, writes = node.fused.reads, node.fused.writes
    inputs = {node.inputs[at]: layout.inputs[at] for at in reads}
    buffers = 0
    if ring_axes(layout):
        run = as_run(node, layout, prices.mesh.shape)
        buffers = ring_buffers(run, *_local_specs(node, layout, graph, prices))
    return (
        buffers
        + sum(prices.local_bytes(graph.spec(ref), each) for ref, each in inputs.items())
        + sum(prices.local_bytes(node.outputs[at], layout.outputs[at]) for at in writes)
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


def replay(block: Block, graph: Graph, prices: Prices) -> Replay:
    """Return the ops that the backward of a recomputed block reruns, by mode. Cached."""
    given, parts = (block, graph), prices.assumptions.recomputed

    def make() -> Replay:
        found = find_replay(block, graph, prices.rules, storages(graph, prices))
        return of_parts(found, block, graph, prices, parts) if parts else found

    return prices.cache.replays.find(parts, given, make)


def kept_parts(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices, *, of: Collection[str]
) -> tuple[Part, ...]:
    """Return (storage, bytes per rank) of an op's tensors that recomputation keeps. ``of``: the ops
    of the block whose results are kept (``Replay.kept``).

    If ``recomputed`` parts of a layer are given, it keeps the tensors that autograd keeps of
    others.
    """
    batch = read_parts(node, layout, graph, prices)
    if prices.assumptions.recomputed:
        own = saved_parts(node, layout, graph, prices)
        return (*batch, *(part for part in own if part[0].rpartition(":")[0] in of))
    if node.name not in of:
        return batch
    found = [
        (f"{node.name}:{index}", prices.local_bytes(spec, placed))
        for index, (spec, placed) in enumerate(zip(node.outputs, layout.outputs, strict=True))
    ]
    extra = prices.rules.kept_extra_bytes(node, *_local_specs(node, layout, graph, prices))
    if extra:
        found.append((f"{node.name}:extra", int(extra)))
    return (*batch, *found)


def read_parts(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> tuple[Part, ...]:
    """Return (input, bytes per rank) of batch inputs that an op reads, kept by recomputation."""
    pairs = zip(node.inputs, layout.inputs, strict=True)
    found = {
        (f"{ref.name}:{ref.index}", prices.local_bytes(graph.spec(ref), each)): None
        for ref, each in pairs
        if graph[ref.name].kind == "input"
    }
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LastOps:
    """Last ops of a block that full recomputation runs in ``count`` tiles; ``weights``: values
    that all tiles read, whose gradients are added up."""

    names: frozenset[str] = frozenset()
    count: int = 1
    weights: frozenset[Ref] = frozenset()

    def part(self, name: str, num_bytes: int) -> int:
        """Return the bytes, at a time, of ``num_bytes`` of the op ``name``."""
        return num_bytes // self.count if name in self.names else num_bytes


WHOLE = LastOps()
"""No op runs tile by tile."""


def last_ops(block: Block, graph: Graph, prices: Prices) -> LastOps:
    """Return the ops of a block that full recomputation runs tile by tile on the mesh, if not all
    ranks have their own share of the rows. Cached. The runtime still runs them whole in layouts in
    which no tile can be placed (``passes.local.tiles``)."""
    mesh, most = prices.mesh, prices.assumptions.tiles
    if most == 1 or prices.own:
        return WHOLE
    key = block.nodes[0], min(graph.batch_size // mesh.row_parts, 2)
    region = find(
        prices.cache.last_regions,
        key,
        lambda: last_region(block.nodes, graph, prices.rules, mesh),
    )
    count = 1 if region is None else region.num_tiles(mesh, graph.batch_size, most)
    if region is None or count == 1:
        return WHOLE
    weights = (ref for ref, placement in region.entries.items() if not placement.is_shard)
    return LastOps(frozenset(region.strategies), count, frozenset(weights))


def again_parts(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices, last: LastOps
) -> tuple[Part, ...]:
    """Return (storage, bytes per rank) of the tensors of an op that a fully recomputed block holds
    at a time in its backward: those that autograd keeps, of one tile where ``last`` ops run tile
    by tile, and the sums of gradients of these ops' weights."""
    saved = saved_parts(node, layout, graph, prices)
    if node.name not in last.names:
        return saved
    found = [(name, last.part(name.rpartition(":")[0], size)) for name, size in saved]
    for ref, held in zip(node.inputs, layout.inputs, strict=True):
        spec = graph.spec(ref)
        if ref in last.weights and spec.requires_grad:
            exact = max(4, spec.itemsize) * prices.local(spec, held).numel
            found.append((f"{ref.name}:{ref.index}:sum", exact))
    return tuple(found)


def weight_grad_seconds(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices
) -> tuple[float, float]:
    """Return (device, host) seconds of an op's weight gradients that a split backward defers."""
    share = weight_grad_share(node, graph, prices)
    if not share:
        return 0.0, 0.0
    own = prices.op(node, input_specs(node, graph), layout)
    return share * own.backward_compute, share * own.backward_issue


def weight_grad_parts(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices
) -> tuple[Part, ...]:
    """Return (storage, bytes per rank) of tensors kept for an op's deferred weight gradients."""
    if not weight_grad_share(node, graph, prices):
        return ()
    late = spec_of(node).weight_gradient
    assert late is not None  # it has a share
    data = node.args[late.data]
    root, spec = memory_of(data, node, graph, prices)
    made = prices.local_bytes(node.spec, layout.outputs[0])
    found = [(f"{node.name}:gradient", made)]
    if graph[root.name].kind in ("op", "input"):
        size = prices.local_bytes(spec, layout_of(data, node, layout))
        found.append((f"{root.name}:{root.index}", size))
    return tuple(found)


def weight_grad_share(node: Node, graph: Graph, prices: Prices) -> float:
    """Return the fraction of an op's backward that computes weight gradients: 0, 0.5 or 1."""
    late = spec_of(node).weight_gradient if node.kind == "op" else None
    if late is None or node.kwargs:
        return 0.0
    data, weights = _argument(node, late.data), [_argument(node, at) for at in late.weights]
    given = [each for each in weights if each is not None]
    if data is None or weights[0] is None or _is_of_parameters(data, graph, prices):
        return 0.0
    if not all(_is_of_parameters(each, graph, prices) for each in given):
        return 0.0
    if not any(graph.spec(each).requires_grad for each in given):
        return 0.0
    return 0.5 if graph.spec(data).requires_grad else 1.0


def _argument(node: Node, position: int) -> Ref | None:
    found = node.args[position] if position < len(node.args) else None
    return found if isinstance(found, Ref) else None


def _is_of_parameters(ref: Ref, graph: Graph, prices: Prices) -> bool:
    """Return whether a value is a parameter or computed from parameters alone."""
    known = prices.cache.from_parameters
    if ref.name not in known:
        for node in graph:
            known[node.name] = node.kind == "parameter" or (
                node.kind == "op"
                and bool(node.inputs)
                and all(known[each.name] for each in node.inputs)
            )
    return known[ref.name]
