"""The graph in the number format that is computed in."""

from __future__ import annotations

from dataclasses import replace

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
