"""Limits of what a query of causal attention sees: a window, and packed documents.

In: a node of attention and the specs of its inputs. Out: its limits; for prices, the attention
without ids of documents that costs as much.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph.graph import Node, TensorSpec
from .case import Specs

SDPA = "aten.scaled_dot_product_attention.default"

DOCUMENT_LENGTH = "document_length"
"""Argument of attention within packed documents, for prices alone: the mean length of a document.
Ops do not take it."""


def window_of(node: Node) -> int:
    """Return the number of keys that a query sees at most; 0 without a window."""
    return int(node.kwargs.get("window", 0))


def is_packed(node: Node) -> bool:
    """Return whether a node is attention within documents that are packed into sequences, whose ids
    are its last input (``passes.ops.documents``)."""
    return node.kind == "op" and "documents" in node.kwargs


def unpacked(node: Node, inputs: Specs) -> tuple[Node, Specs]:
    """Return a node and its inputs; for attention within packed documents, attention of whole
    sequences, or of the mean length of a document if it is known. It has a window only if that is
    at most half of them."""
    if not is_packed(node):
        return node, inputs[: len(node.inputs)]
    node, inputs = _in_documents(node, inputs[:3])
    is_narrow = 0 < 2 * window_of(node) <= inputs[1].shape[-2]
    left_out = ("documents",) if is_narrow else ("documents", "window")
    kwargs = {name: value for name, value in node.kwargs.items() if name not in left_out}
    op = node.op if is_narrow else SDPA
    return replace(node, op=op, kwargs=kwargs), inputs


def _in_documents(node: Node, inputs: Specs) -> tuple[Node, Specs]:
    """Return attention in which each document is a row of a batch, if their length is known. A rank
    with a part of a document has its last queries."""
    length = int(node.kwargs.get(DOCUMENT_LENGTH, 0))
    if not length:
        return node, inputs
    query, key = (spec.shape for spec in inputs[:2])
    number = max(1, query[-2] // length)
    rows = query[-2] // number
    columns = min(key[-2], max(rows, length))

    def cut(spec: TensorSpec, positions: int) -> TensorSpec:
        return replace(
            spec, shape=(spec.shape[0] * number, *spec.shape[1:-2], positions, spec.shape[-1])
        )

    kwargs = {name: value for name, value in node.kwargs.items() if name != DOCUMENT_LENGTH}
    outputs = tuple(cut(spec, columns) for spec in node.outputs)
    made = replace(node, kwargs=kwargs, outputs=outputs)
    return made, tuple(map(cut, inputs, (rows, columns, columns)))
