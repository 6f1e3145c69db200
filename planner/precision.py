"""The graph in the number format that is computed in."""

from __future__ import annotations

from dataclasses import replace

from ..cost_model.cluster import Cluster
from .errors import UsageError
from .graph import Graph
from .plan import Precision


def with_precision(graph: Graph, precision: Precision) -> Graph:
    """The graph as it runs: float32 becomes the format that is computed in.

    A model captured in that format stays as it is, with what it keeps in float32.
    """
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


def check_precision(cluster: Cluster, precision: Precision) -> None:
    """Raises UsageError AP126 for bf16 on a GPU without units for it (before compute capability
    8.0: V100, T4), which is one with no figure of its own for bfloat16."""
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
