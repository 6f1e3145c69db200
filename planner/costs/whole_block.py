"""Factors between the time of a block measured as a whole and the sum of its ops' times.

In: a graph, its blocks, a profile with whole blocks among its ops. Out: by node a factor of its
seconds, forward and backward, with which the ops of a block add up to the block's time. It captures
effects that no single op shows: values that have left the caches, views, sums of gradients of
values used more than once, and the interpreter between the ops. Ops that were not measured alone
are scaled like the others, so that a block measured only as a whole still gives its time; ops of
blocks that were not measured get the mean factor of the measured blocks.

A whole block is stored as an op case: ``BLOCK_OP`` on the block's inputs with the rows of one rank,
its argument a hash of its computation. If a kind has several cases, the nearest in bytes is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.profile.case import OpCase, TensorCase, canonical
from ...cost_model.profile.lookup import Factor, Profile
from ...cost_model.profile.records import Measurement
from .. import ops as default_rules
from ..graph.graph import Block, Blocks, Graph, Ref
from ..graph.layout import INVARIANT, Mesh, NodeLayout
from ..plan import Precision
from .basis import Basis
from .choices import input_specs
from .precision import with_precision
from .prices import Prices

BLOCK_OP = "autoparallel.block"
FAMILY = "block"

ONE_DEVICE = Mesh(("dp",), (1,))


@dataclass(frozen=True, slots=True)
class _Compared:
    """Seconds (forward, backward) of a block: measured as a whole, and summed over its ops."""

    whole: tuple[float, float]
    summed: tuple[float, float]
    num_bytes: tuple[int, ...]
    """Bytes that each of the block's ops reads and writes."""

    @property
    def factors(self) -> Iterator[Factor]:
        """Yield the factor (measured / summed seconds) for each op of the block."""
        ratios = [_ratio(*each) for each in zip(self.whole, self.summed, strict=True)]
        return (Factor(ratios[0], ratios[1], each) for each in self.num_bytes)


def _ratio(whole: float, summed: float) -> float:
    return whole / summed if summed > 0 else 1.0


def block_inputs(graph: Graph, block: Block) -> tuple[Ref, ...]:
    """Return the values, parameters and buffers that a block reads from outside, by first use."""
    own = set(block.nodes)
    found = (ref for name in block.nodes for ref in graph[name].inputs if ref.name not in own)
    return tuple(dict.fromkeys(found))


def block_case(graph: Graph, block: Block, tf32: Collection[str] = ()) -> OpCase:
    """Return the op case by which a profile stores a whole block, at the graph's batch size on one
    device. ``tf32``: families of products that the device computes in TF32."""
    return OpCase(
        op=BLOCK_OP,
        tensors=tuple(
            TensorCase(spec.shape, spec.dtype, spec.requires_grad)
            for spec in map(graph.spec, block_inputs(graph, block))
        ),
        arguments=canonical([_digest(graph, block)], {}),
        family=FAMILY,
        num_bytes=_bytes(graph, block),
        tf32=_tf32_of(graph, block, tf32) if tf32 else (),
    )


def _tf32_of(graph: Graph, block: Block, families: Collection[str]) -> tuple[str, ...]:
    """Return the op families of ``families`` to which a float32 op of the block belongs."""
    nodes = [graph[name] for name in block.nodes if graph[name].spec.dtype == "float32"]
    works = (default_rules.work(each, input_specs(each, graph), each.outputs) for each in nodes)
    return tuple(sorted({work.family for work in works} & set(families)))


def whole_blocks(
    graph: Graph, blocks: Blocks, cluster: Cluster, basis: Basis, *, precision: Precision
) -> Basis:
    """Return ``basis`` whose profile has, for each node of ``graph``, the factor of its block:
    seconds measured for the whole block / sum over its ops."""
    profile = basis.used
    if profile is None:
        return basis
    measured: dict[str, list[tuple[OpCase, Measurement]]] = {}
    for case, found in profile.ops.items():
        if case.op == BLOCK_OP:
            measured.setdefault(case.arguments, []).append((case, found))
    if not measured:
        return basis
    graph = with_precision(graph, precision)
    by_kind = {
        kind: _compared(graph, block, cluster, profile, measured)
        for kind, block in blocks.kinds.items()
    }
    factors: dict[str, Factor] = {}
    for block in blocks.blocks:
        own = by_kind[block.kind]
        if own is not None:
            factors.update(zip(block.nodes, own.factors, strict=True))
    every = [each for each in by_kind.values() if each is not None]
    rest = (
        _ratio(sum(each.whole[0] for each in every), sum(each.summed[0] for each in every)),
        _ratio(sum(each.whole[1] for each in every), sum(each.summed[1] for each in every)),
    )
    return replace(basis, profile=replace(profile, factors=factors, rest=rest))


def _node_bytes(graph: Graph, name: str) -> int:
    """Return the bytes that an op reads and writes."""
    node = graph[name]
    return sum(spec.num_bytes for spec in (*input_specs(node, graph), *node.outputs))


def _compared(
    graph: Graph,
    block: Block,
    cluster: Cluster,
    profile: Profile,
    measured: Mapping[str, list[tuple[OpCase, Measurement]]],
) -> _Compared | None:
    """Return the seconds of the measured block that is nearest in bytes to ``block``, with the sum
    over its ops; None if none was measured. ``measured``: by hash of computation."""
    tf32 = cluster.device(0).tf32 or ()
    own = block_case(graph, block, tf32)
    same = [each for each in measured.get(own.arguments, ()) if _rows(graph, block, each[0], tf32)]
    if not same:
        return None
    case, found = min(same, key=lambda each: abs(sum(each[0].num_bytes) - sum(own.num_bytes)))
    rows = _rows(graph, block, case, tf32)
    assert rows is not None
    graph = graph.with_batch_size(rows)
    summed = seconds_by_ops(graph, block, cluster, profile)
    sizes = tuple(_node_bytes(graph, name) for name in block.nodes)
    return _Compared((found.forward_seconds, found.backward_seconds), summed, sizes)


def seconds_by_ops(
    graph: Graph, block: Block, cluster: Cluster, profile: Profile
) -> tuple[float, float]:
    """Return the seconds of a block on one device, forward and backward, summed over its ops."""
    bare = replace(profile, factors={}, rest=(1.0, 1.0))
    prices = Prices(ONE_DEVICE, cluster, (0,), "fp32", "adamw", default_rules, profile=bare)
    forward = backward = 0.0
    whole = (INVARIANT,)
    for name in block.nodes:
        node = graph[name]
        layout = NodeLayout((whole,) * len(node.inputs), (whole,) * len(node.outputs))
        own = prices.compute(node, input_specs(node, graph), layout)
        forward, backward = forward + own[0], backward + own[1]
    return forward, backward


def _rows(graph: Graph, block: Block, case: OpCase, tf32: Collection[str]) -> int | None:
    """Return the batch size at which the block is the measured ``case``; None if at no size."""
    refs = block_inputs(graph, block)
    if len(refs) != len(case.tensors):
        return None
    rows = graph.batch_size
    for ref, tensor in zip(refs, case.tensors, strict=True):
        dim = graph.batch_dims[ref.name][ref.index] if graph.batch_dims else None
        shape = graph.spec(ref).shape
        if dim is not None and shape[dim] and len(shape) == len(tensor.shape):
            rows = tensor.shape[dim] * graph.batch_size // shape[dim]
            break
    if rows < 1 or (rows != graph.batch_size and not graph.batch_dims):
        return None
    return rows if block_case(graph.with_batch_size(rows), block, tf32) == case else None


def _digest(graph: Graph, block: Block) -> str:
    """Return a hash of a block's computation that ignores names and the batch size."""
    numbers = {name: index for index, name in enumerate(block.nodes)}
    lines = [
        [
            node.op,
            [numbers.get(ref.name, -1) for ref in node.inputs],
            *([node.product_dtype] if node.product_dtype else []),
            *(spec.stored for spec in input_specs(node, graph) if spec.stored),
        ]
        for node in map(graph.__getitem__, block.nodes)
    ]
    shapes = [
        graph.spec(ref).shape
        for ref in block_inputs(graph, block)
        if graph[ref.name].kind == "parameter"
    ]
    return hashlib.sha256(json.dumps([lines, shapes]).encode()).hexdigest()[:16]


def _bytes(graph: Graph, block: Block) -> tuple[float, float]:
    read = sum(graph.spec(ref).num_bytes for ref in block_inputs(graph, block))
    return float(read), float(read)
