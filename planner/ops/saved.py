"""Tensors and bytes that autograd keeps for the backward of each op.

In: a node. Out: its inputs and outputs that its backward reads, and other bytes kept (statistics,
masks, log-probabilities). Source: PyTorch's tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Graph, Node, Ref
from .annotation import Shape
from .attention import copies_keys, is_attention, kept_statistics, num_scores, writes_scores
from .case import Specs
from .catalog import spec_of
from .spec import Product, statistic_bytes


def plain_product(node: Node, shapes: Sequence[Shape]) -> Product | None:
    """Return an op's product for factors of these shapes; None for an einsum of other operands."""
    product = spec_of(node).product
    return None if product is None else product(node, shapes)


def product_factors(node: Node, count: int) -> tuple[int, ...]:
    """Return the positions of a product's factors among its operands; other operands are added."""
    return tuple(at for at in spec_of(node).factors if at < count)


def saved(node: Node, graph: Graph | None = None) -> tuple[Ref, ...]:
    """Return the node's inputs and outputs that its backward reads, each once.

    With ``graph``, only tensors that the required gradients read; without it every float input
    counts as requiring a gradient. Parameters are listed like any other input.
    """
    if not any(spec.requires_grad for spec in node.outputs):
        return ()
    refs = node.inputs
    if node.fused is not None:
        own = [Ref(node.name, index) for index in node.fused.keeps_outputs]
        return (*(refs[at] for at in node.fused.keeps_inputs), *own)
    inputs = None if graph is None else [graph.spec(ref) for ref in refs]
    if inputs is not None and writes_scores(node, inputs):
        return ()
    kept = [refs[at] for at in saved_inputs(node, inputs, count=len(refs))]
    kept += [Ref(node.name, index) for index in saved_outputs(node)]
    return tuple(dict.fromkeys(kept))


def saved_inputs(node: Node, inputs: Specs | None, *, count: int) -> tuple[int, ...]:
    """Return the positions in ``node.inputs`` of the tensors that the backward reads."""
    wants = [True] * count if inputs is None else [spec.requires_grad for spec in inputs]
    spec, everything = spec_of(node), tuple(range(count))
    match spec.keeps:
        case "input" | "condition":
            return everything[:1]
        case "both" if inputs is not None and copies_keys(node, inputs):
            return (0, *everything[3:])
        case "inputs" | "both" | "power":
            return everything
        case "rest":
            return everything[1:]
        case "choice":
            return everything if count > 1 else (0,)[: len(node.outputs) == 1]
        case "division":
            return (*((0,) if wants[-1] and count > 1 else ()), *((1,) if count > 1 else ()))
        case "written":
            return everything[1:-1] if count > 2 else everything[1:]
        case "interpolation":
            return everything if count > 2 else ()
        case "others":
            factors = product_factors(node, count)[:2]
            return tuple(
                at for at in factors if any(wants[other] for other in factors if other != at)
            )
    return ()


def saved_outputs(node: Node) -> tuple[int, ...]:
    """Return the indices of the node's outputs that its own backward reads."""
    match spec_of(node).keeps:
        case "indices":
            return (1,)
        case "choice" if len(node.outputs) > 1:
            return (1,)
        case "choice" if len(node.inputs) == 1:
            return (0,)
        case "power" if is_exponential(node):
            return (0,)
        case "output" | "both":
            return (0,)
    return ()


def is_exponential(node: Node) -> bool:
    """Return whether a power's exponent is a tensor: its gradient then reads the result."""
    return node.op != "aten.pow.Tensor_Scalar"


def saved_extra_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes that autograd keeps besides inputs and outputs, at these local shapes."""
    if not any(spec.requires_grad for spec in outputs):
        return 0
    if node.fused is not None and node.fused.is_attention:
        statistic = statistic_bytes(outputs)
        return _num_score_rows(node, inputs) * statistic if node.fused.writes else 0
    return spec_of(node).kept_bytes(node, inputs, outputs)


def kept_extra_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes besides outputs that selective recomputation keeps of an expensive op."""
    if is_attention(node) and not writes_scores(node, inputs):
        return kept_statistics(outputs)
    if not writes_scores(node, inputs):
        return saved_extra_bytes(node, inputs, outputs)
    out = outputs[0]
    wide = statistic_bytes(outputs)
    return num_scores(inputs) * wide + out.numel * (wide - out.itemsize)


def _num_score_rows(node: Node, inputs: Specs) -> int:
    """Return the number of rows of scores in the last product of a written-out attention."""
    product = plain_product(node, [inputs[at].shape for at in product_factors(node, len(inputs))])
    if product is None:
        return 0
    batch, rows, columns, _ = product
    return batch * max(rows, columns)  # the other is the head size
