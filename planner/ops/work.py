"""Work of each op, FLOPs and memory traffic, at local shapes.

FLOPs count a multiply-add as two; the records of ops have the formulas. Bytes are a kernel's
necessary reads and writes, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.graph import Fused, Node, OpRule
from .attention import num_steps
from .case import Specs
from .catalog import annotated_flops, spec_of
from .products import gradient_products
from .saved import plain_product, product_factors, saved_inputs, saved_outputs
from .spec import Family, OpSpec, Product, Products


@dataclass(frozen=True, slots=True)
class Work:
    """An op's work on one rank, forward and backward.

    ``products_*`` are its plain matrix products; for fused attention (batch · heads, queries, keys,
    head size). ``kernels_*`` is the number of kernels that the host issues. ``drawn`` is the number
    of random numbers, drawn in the forward and again in the backward.
    """

    family: Family
    flops_forward: int
    flops_backward: int
    bytes_forward: int
    bytes_backward: int
    products_forward: tuple[Product, ...] = ()
    products_backward: tuple[Product, ...] = ()
    kernels_forward: int = 1
    kernels_backward: int = 1
    drawn: int = 0


FAMILIES_FUSED: frozenset[Family] = frozenset(("norm", "elementwise", "copy", "reduction", "view"))
"""Families of ops whose kernels a compiler generates, and so can fuse."""

_FREE: Work = Work("view", 0, 0, 0, 0, kernels_forward=0, kernels_backward=0)


def work(node: Node, inputs: Specs, outputs: Specs) -> Work:
    """Return the work of a node at the local shapes of its inputs and outputs.

    The ``requires_grad`` of the specs decides which gradients are computed.
    """
    spec = spec_of(node)
    if node.kind != "op" or not outputs or spec.is_identity(node, inputs, outputs):
        return _FREE
    if node.rule is not None:
        return _registered(node, node.rule, inputs, outputs)
    if node.fused is not None:
        return _fused(node, node.fused, inputs, outputs)
    if spec.family == "view":
        return _view(spec, inputs, outputs)
    wanted = _wanted(inputs, outputs)
    bytes_forward, bytes_backward = _bytes(node, inputs, outputs, wanted)
    flops_forward, flops_backward = spec.flops(node, inputs, outputs, wanted)
    products_forward, products_backward = _products(node, inputs, wanted)
    steps = num_steps(node) if spec.reads == "steps" else 1
    return Work(
        spec.family,
        flops_forward,
        flops_backward,
        steps * bytes_forward,
        steps * bytes_backward,
        products_forward=products_forward,
        products_backward=products_backward,
        kernels_forward=steps * spec.kernels[0],
        kernels_backward=steps * _kernels_backward(spec.family, len(wanted)) * spec.kernels[1],
        drawn=outputs[0].numel if spec.is_counted else 0,
    )


def _fused(node: Node, fused: Fused, inputs: Specs, outputs: Specs) -> Work:
    """Return an op's share of a fused kernel's work: its memory traffic and its FLOPs."""

    def moved(specs: Specs, positions: Sequence[int]) -> int:
        return sum(specs[position].num_bytes for position in positions)

    family: Family = "attention" if fused.is_attention else spec_of(node).family
    forward = moved(inputs, fused.reads) + moved(outputs, fused.writes)
    backward = moved(outputs, (*fused.reads_gradients, *fused.keeps_outputs)) + moved(
        inputs, (*fused.gradients, *fused.keeps_inputs)
    )
    flops_forward, flops_backward = _fused_flops(node, fused, inputs, outputs)
    products = _fused_products(node, fused, inputs)
    return Work(
        family,
        flops_forward,
        flops_backward,
        forward,
        backward,
        products_forward=products,
        products_backward=products if flops_backward else (),
        kernels_forward=fused.kernels_forward,
        kernels_backward=fused.kernels_backward,
    )


def _fused_flops(node: Node, fused: Fused, inputs: Specs, outputs: Specs) -> tuple[int, int]:
    """Return the FLOPs of an op in a fused kernel, in forward and backward.

    The efficiency of attention includes its softmax, so only its products count.
    """
    spec = spec_of(node)
    if fused.is_attention and spec.family != "matmul":
        return 0, 0
    forward, backward = spec.flops(node, inputs, outputs, _wanted(inputs, outputs))
    backward += forward if fused.again and backward else 0
    return int(fused.share * forward), int(fused.share * backward)


def _fused_products(node: Node, fused: Fused, inputs: Specs) -> tuple[Product, ...]:
    """Return a fused attention kernel's product, as (batch, queries, keys, head size)."""
    if not fused.is_attention:
        return ()
    found = plain_product(node, [spec.shape for spec in inputs])
    if found is None:
        return ()
    batch, rows, columns, inner = found
    return (found,) if fused.again else ((batch, rows, inner, columns),)


def _kernels_backward(family: Family, num_wanted: int) -> int:
    """Return the number of backward kernels: one per gradient, or one or two for all of them."""
    if family in ("matmul", "conv", "elementwise"):
        return num_wanted
    return min(num_wanted, 2 if family == "norm" else 1)


def _products(node: Node, inputs: Specs, wanted: Sequence[int]) -> Products:
    spec, factors = spec_of(node), product_factors(node, len(inputs))
    if spec.products is not None:
        return spec.products(node, inputs, wanted)
    if spec.product is None or len(factors) != 2:
        return (), ()
    product = plain_product(node, [inputs[at].shape for at in factors])
    if product is None:
        return (), ()
    first, second = (at in wanted for at in factors)
    return (product,), gradient_products(product, first=first, second=second)


def _registered(node: Node, rule: OpRule, inputs: Specs, outputs: Specs) -> Work:
    """Return the work of a registered op, which reads and writes each of its tensors once."""
    wanted = _wanted(inputs, outputs)
    forward, backward = spec_of(node).flops(node, inputs, outputs, wanted)
    num_bytes = sum(each.num_bytes for each in [*inputs, *outputs])
    is_product = annotated_flops(rule.annotation, inputs, outputs) > 0
    family: Family = "matmul" if is_product else "elementwise"
    return Work(family, forward, backward, num_bytes, 2 * num_bytes * bool(wanted))


def _view(spec: OpSpec, inputs: Specs, outputs: Specs) -> Work:
    """Return the work of a view: only its backward, which pads cuts and sums expansions."""
    source, made = inputs[0], sum(each.num_bytes for each in outputs)
    if not (source.requires_grad and any(each.requires_grad for each in outputs)):
        return _FREE
    if spec.form in ("cut", "parts", "take") and made > 0 and outputs[0].shape != source.shape:
        return Work("copy", 0, 0, 0, source.num_bytes + made, kernels_forward=0)
    if spec.form == "expand" and outputs[0].numel > source.numel:
        return Work("reduction", 0, outputs[0].numel, 0, source.num_bytes + made, kernels_forward=0)
    return _FREE


def _wanted(inputs: Specs, outputs: Specs) -> list[int]:
    """Return the positions of the inputs whose gradients the backward computes."""
    if not any(spec.requires_grad for spec in outputs):
        return []
    return [position for position, spec in enumerate(inputs) if spec.requires_grad]


def _bytes(node: Node, inputs: Specs, outputs: Specs, wanted: list[int]) -> tuple[int, int]:
    spec = spec_of(node)
    made = sum(each.num_bytes for each in outputs)
    read = sum(each.num_bytes for each in inputs)
    if spec.reads == "rows":
        read = made + sum(each.num_bytes for each in inputs[1:])
    if spec.reads == "twice":
        read += inputs[0].num_bytes
    if not wanted:
        return read + made, 0
    gradients = sum(inputs[position].num_bytes for position in wanted)
    if spec.family in ("matmul", "conv"):
        return read + made, _product_bytes(node, inputs, made, wanted)
    kept = sum(
        inputs[position].num_bytes for position in saved_inputs(node, inputs, count=len(inputs))
    )
    kept += sum(outputs[index].num_bytes for index in saved_outputs(node))
    if spec.reads == "twice":
        kept += inputs[0].num_bytes
    if spec.reads == "halves":
        query, key, value = (each.num_bytes for each in inputs[:3])
        return read + query + 4 * made, 4 * made + gradients + kept + query + 4 * (key + value)
    if spec.reads == "steps":
        kept = read + made
    return read + made, made + gradients + kept


def _product_bytes(node: Node, inputs: Specs, made: int, wanted: list[int]) -> int:
    """Return the backward bytes of a product: for each gradient, reads of the output's gradient and
    the other factor, and the write of the gradient."""
    factors = product_factors(node, len(inputs))
    total = 0
    for position in wanted:
        others = [at for at in factors if at != position] if position in factors else []
        total += made + inputs[position].num_bytes + sum(inputs[at].num_bytes for at in others)
    return total
