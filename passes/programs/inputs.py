"""Random batches for a graph, with values that every op of the graph accepts.

Float inputs are standard normal. Integer inputs are uniform below the smallest bound of the ops
they reach (rows of an embedding, classes of a loss), through views, slices and other ops that keep
integers. Inputs without a bound count as masks: all ones.
"""

from __future__ import annotations

import torch

from ...planner.graph.graph import Graph, Node, Ref

_INDEX_DTYPES = ("int64", "int32", "int16", "uint8")


def integer_bounds(graph: Graph) -> dict[str, int]:
    """Return the exclusive upper bound of the values of each integer input that is used as an
    index, by the input's name."""
    bounds: dict[str, int] = {}
    reached: dict[Ref, set[str]] = {
        Ref(node.name): {node.name} for node in graph.inputs if node.spec.dtype in _INDEX_DTYPES
    }
    for node in graph:
        for position, ref in enumerate(node.inputs):
            names = reached.get(ref)
            if not names:
                continue
            bound = _bound(graph, node, position)
            for name in names if bound is not None else ():
                bounds[name] = min(bounds.get(name, bound or 0), bound or 0)
            for index, spec in enumerate(node.outputs):
                if spec.dtype in _INDEX_DTYPES:
                    reached.setdefault(Ref(node.name, index), set()).update(names)
    return bounds


def _bound(graph: Graph, node: Node, position: int) -> int | None:
    """Return the exclusive upper bound of the integers in input number ``position`` of ``node``;
    None if it is not used as an index."""
    family = node.op.removeprefix("aten.").split(".")[0]
    if family == "embedding" and position == 1:
        return graph.spec(node.inputs[0]).shape[0]
    if family in ("cross_entropy_loss", "nll_loss", "nll_loss_nd") and position == 1:
        logits = graph.spec(node.inputs[0]).shape
        return logits[1 if len(logits) > 1 else 0]
    if family == "one_hot":
        return node.spec.shape[-1]
    if family in ("gather", "index_select", "scatter") and position >= 1:
        dim = node.args[1]
        return graph.spec(node.inputs[0]).shape[dim] if isinstance(dim, int) else None
    if family == "index" and position >= 1:
        return min(graph.spec(node.inputs[0]).shape)
    return None


def random_batch(graph: Graph, *, seed: int, dtype: str | None = None) -> dict[str, torch.Tensor]:
    """Return random tensors for the graph's inputs by name, equal for equal seeds. ``dtype``
    replaces the dtype of floating inputs."""
    generator = torch.Generator().manual_seed(seed)
    bounds = integer_bounds(graph)
    batch = {}
    for node in graph.inputs:
        spec = node.spec
        if "float" in spec.dtype:
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            batch[node.name] = values.to(getattr(torch, dtype or spec.dtype))
        elif node.name in bounds:
            batch[node.name] = torch.randint(
                bounds[node.name], spec.shape, generator=generator, dtype=getattr(torch, spec.dtype)
            )
        else:
            batch[node.name] = torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))
    return batch
