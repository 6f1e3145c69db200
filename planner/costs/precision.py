"""Number formats in which the graph's ops compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...cost_model.cluster.cluster import Cluster
from ..errors import UsageError
from ..graph.graph import Graph, Node
from ..plan import Precision

EIGHT_BITS = "float8_e4m3fn"
"""Format of factors in fp8; the gradients' format (float8_e5m2) runs at the same rate."""


def with_precision(graph: Graph, precision: Precision) -> Graph:
    """Return the graph with float32 values replaced by values in the format of ``precision``.

    A model captured in that format stays unchanged, including its float32 values. In fp8 values are
    bfloat16, and linear layers cast the factors of their products to 8 bits.
    """
    if precision == "fp8":
        graph = with_precision(graph, "bf16")
        return replace(graph, nodes=_with_eight_bit_products(graph.nodes))
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}[precision]
    if dtype == "float32" or any(node.spec.dtype == dtype for node in graph.parameters):
        return graph
    nodes = tuple(
        node.with_outputs(
            tuple(
                replace(spec, dtype=dtype) if spec.dtype == "float32" else spec
                for spec in node.outputs
            )
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _with_eight_bit_products(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes with all linear layers but the last marked for 8-bit products, except those
    of quantized weights. The last is the head, which torchtitan and Megatron-LM also exclude."""
    linear = [node.name for node in nodes if node.op == "aten.linear.default"]
    held = {node.name for node in nodes if node.kind == "parameter" and node.spec.stored}
    cast = {
        node.name for node in nodes if held.isdisjoint(each.name for each in node.inputs)
    }.intersection(linear[:-1])
    return tuple(
        replace(node, product_dtype=EIGHT_BITS) if node.name in cast else node for node in nodes
    )


def check_precision(cluster: Cluster, precision: Precision) -> None:
    """Raise UsageError AP126 for fp8, or for bf16 on a GPU, if a device has no peak FLOPs for the
    format, as it lacks units for it (bfloat16: before compute capability 8.0; 8 bits: before
    8.9)."""
    if precision == "fp8":
        _check_eight_bits(cluster)
    if precision != "bf16":
        return
    for host in cluster.hosts:
        device = host.device
        if device.kind == "cuda" and "bfloat16" not in device.peak_flops:
            raise UsageError(
                "AP126",
                f"{device.name} does not compute in bf16",
                why="it has no peak_flops for bfloat16; GPUs before compute capability 8.0 "
                "(V100, T4) only emulate it in float32",
                where=f"cluster {cluster.name}",
                fix="--precision fp16 or fp32; in a cluster file, give peak_flops.bfloat16 of a "
                "device that has such units",
            )


def _check_eight_bits(cluster: Cluster) -> None:
    for host in cluster.hosts:
        if EIGHT_BITS not in host.device.peak_flops:
            raise UsageError(
                "AP126",
                f"{host.device.name} does not compute in fp8",
                why=f"it has no peak_flops for {EIGHT_BITS}; GPUs from compute capability 8.9 on "
                "(L40S, H100) have units for it",
                where=f"cluster {cluster.name}",
                fix="--precision bf16",
            )
