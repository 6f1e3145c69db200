"""Random batches for a graph, with values that every op of the graph accepts.

Float inputs are standard normal. Integer inputs are uniform below the smallest bound of the ops
they reach (rows of an embedding, classes of a loss), through views, slices and other ops that keep
integers. Inputs that say which documents are packed into a sequence give four documents or fewer of
random lengths: as numbers of documents, or as positions that restart at 0 with each document. Other
inputs without a bound count as masks: all ones.
"""

from __future__ import annotations

import torch

from ...planner.graph.graph import Graph, Node, Ref
from ...planner.ops.attention_limits import is_packed
from ...planner.ops.case import packet
from ...planner.ops.catalog import spec_of

NUM_STARTS = 3
"""Starts of documents drawn in each sequence, beside its own."""

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
    bound = spec_of(node).largest_index
    is_index = position >= 1 or len(node.inputs) == 1
    if bound is None or not is_index:
        return None
    return bound(node, [graph.spec(ref) for ref in node.inputs])


def document_inputs(graph: Graph) -> dict[str, str]:
    """Return the inputs that attention's ids of packed documents come from, by name: "ids" or
    "positions". An input that is used as an index, too, is one only if it is these ids or if its
    differences make them: ids may also be counted from tokens."""
    found: dict[str, str] = {}
    bounds = integer_bounds(graph)
    pending = [(node.kwargs["documents"], "ids") for node in graph if is_packed(node)]
    while pending:
        ref, kind = pending.pop()
        node = graph[ref.name]
        if node.kind == "input" and (kind or node.name not in bounds):
            found[node.name] = kind or "positions"
        elif packet(node.op) == "diff":
            kind = "positions"
        elif kind == "ids" and spec_of(node).form != "reshape":
            kind = ""
        pending += [(each, kind) for each in node.inputs]
    return found


def _drawn_documents(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> torch.Tensor:
    """Draw documents for sequences along the last dimension of ``shape``."""
    length = shape[-1]
    starts = torch.randint(length, (*shape[:-1], NUM_STARTS, 1), generator=generator)
    places = torch.arange(length)
    is_later = starts <= places
    return is_later.sum(-2) if kind == "ids" else places - (starts * is_later).amax(-2)


def random_batch(graph: Graph, *, seed: int, dtype: str | None = None) -> dict[str, torch.Tensor]:
    """Return random tensors for the graph's inputs by name, equal for equal seeds. ``dtype``
    replaces the dtype of floating inputs."""
    generator = torch.Generator().manual_seed(seed)
    bounds, documents = integer_bounds(graph), document_inputs(graph)
    batch = {}
    for node in graph.inputs:
        spec = node.spec
        if "float" in spec.dtype:
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            batch[node.name] = values.to(getattr(torch, dtype or spec.dtype))
        elif node.name in documents:
            drawn = _drawn_documents(spec.shape, documents[node.name], generator)
            drawn %= bounds.get(node.name, spec.shape[-1])
            batch[node.name] = drawn.to(getattr(torch, spec.dtype))
        elif node.name in bounds:
            batch[node.name] = torch.randint(
                bounds[node.name], spec.shape, generator=generator, dtype=getattr(torch, spec.dtype)
            )
        else:
            batch[node.name] = torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))
    return batch
