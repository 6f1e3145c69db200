"""Work of each op, FLOPs and memory traffic, at local shapes.

FLOPs count a multiply-add as two. Products of M×K by K×N: 2MNK in the forward, and 2MNK in the
backward for each factor with a gradient. Attention of B×H heads over S queries and T keys:
4·B·H·S·T·D in the forward (half if causal), 2.5 times that in the backward, which recomputes the
scores (Dao 2023, FlashAttention-2, section 3). Bytes are a kernel's necessary reads and writes,
each once. Products are (batch, m, n, k) of m×k by k×n: for each factor with a gradient the backward
has a product of the same three sizes, m×n by n×k or k×m by m×n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ..graph.graph import Fused, Node, OpRule, TensorSpec
from .annotation import bind
from .case import argument
from .equation import parse_equation
from .products import Product, attention_products, gradient_products, plain_product, product_factors
from .saved import expert_pairs, is_identity, saved_inputs, saved_outputs
from .table import packet

Family = Literal[
    "matmul", "attention", "conv", "norm", "elementwise", "copy", "reduction", "embedding", "view"
]


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

_FAMILIES: dict[Family, str] = {
    "matmul": "linear matmul mm bmm mv dot outer einsum addmm baddbmm experts _grouped_mm",
    "attention": "scaled_dot_product_attention balanced_attention",
    "conv": ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
    "norm": (
        "layer_norm rms_norm group_norm batch_norm instance_norm softmax _softmax log_softmax "
        "_log_softmax _native_batch_norm_legit_functional"
    ),
    "reduction": (
        "sum mean amax amin all any argmax argmin logsumexp max min median prod std std_mean var "
        "var_mean norm linalg_vector_norm sort argsort topk cumsum cumprod logcumsumexp cummax "
        "cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
        "soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits max_pool1d "
        "max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d"
    ),
    "embedding": "embedding",
    "copy": (
        "clone contiguous to _to_copy type_as copy fill slice_scatter "
        "select_scatter cat concat concatenate stack pad constant_pad_nd repeat tile "
        "repeat_interleave flip roll index index_select gather one_hot scatter scatter_add "
        "scatter_reduce index_add index_copy index_fill index_put histc lift_fresh_copy new_zeros "
        "new_ones new_full new_empty zeros_like ones_like full_like empty_like pixel_shuffle "
        "pixel_unshuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    ),
    "view": (
        "view reshape _unsafe_view view_copy flatten unflatten squeeze unsqueeze "
        "expand expand_as view_as reshape_as permute "
        "transpose swapaxes swapdims t mT numpy_T movedim moveaxis slice narrow split "
        "split_with_sizes chunk tensor_split unsafe_split unsafe_chunk select unbind alias detach "
        "lift_fresh"
    ),
}
_FAMILY: dict[str, Family] = {op: family for family, ops in _FAMILIES.items() for op in ops.split()}
_CUTS = frozenset(
    (
        "slice",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "tensor_split",
        "unsafe_split",
        "unsafe_chunk",
        "select",
        "unbind",
    )
)
_FLOPS_PER_ELEMENT: dict[Family, tuple[int, int]] = {
    "norm": (8, 14),
    "elementwise": (1, 2),
    "reduction": (1, 1),
}
_ATTENTION_BACKWARD = 2.5
_BALANCED_KERNELS = 5, 11
"""Kernels of balanced attention. Forward: two of attention, two copies of sent values, one to join
both results. Backward: two of attention, two copies of sent values, one to join the queries'
gradients; two for keys and two for values that pad the second attention's gradients, and the sum.
Bytes count the copies."""


def family_of(node: Node) -> Family:
    """Return the family of a node's op: "matmul", "norm", "view", …."""
    return family_named(packet(node.op))


def family_named(name: str) -> Family:
    """Return the family of an op by its name; unknown ops count as elementwise."""
    return _FAMILY.get(name, "elementwise")


def work(node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Work:
    """Return the work of a node at the local shapes of its inputs and outputs.

    The ``requires_grad`` of the specs decides which gradients are computed.
    """
    family = family_of(node)
    if node.kind != "op" or not outputs or is_identity(node, inputs, outputs):
        return _FREE
    if node.rule is not None:
        return _registered(node.rule, inputs, outputs)
    if node.fused is not None:
        return _fused(node, node.fused, inputs, outputs)
    if family == "view":
        return _view(node, inputs, outputs)
    forward, backward = _bytes(node, inputs, outputs, family)
    flops_forward, flops_backward = _flops(node, inputs, outputs, family)
    products_forward, products_backward = _products(node, inputs, family, outputs)
    kernels_backward = _kernels_backward(family, len(_wanted(inputs, outputs)))
    if is_balanced := packet(node.op) == "balanced_attention":
        kernels_backward *= _BALANCED_KERNELS[1]
    return Work(
        family,
        flops_forward,
        flops_backward,
        forward,
        backward,
        products_forward=products_forward,
        products_backward=products_backward,
        kernels_forward=_BALANCED_KERNELS[0] if is_balanced else 1,
        kernels_backward=kernels_backward,
        drawn=outputs[0].numel if packet(node.op).startswith("counter_") else 0,
    )


def _fused(
    node: Node, fused: Fused, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Work:
    """Return an op's share of a fused kernel's work: its memory traffic and its FLOPs."""

    def moved(specs: Sequence[TensorSpec], positions: Sequence[int]) -> int:
        return sum(specs[position].num_bytes for position in positions)

    family: Family = "attention" if fused.is_attention else family_of(node)
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


def _fused_flops(
    node: Node, fused: Fused, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[int, int]:
    """Return the FLOPs of an op in a fused kernel, in forward and backward.

    The efficiency of attention includes its softmax, so only its products count.
    """
    family = family_of(node)
    if fused.is_attention and family != "matmul":
        return 0, 0
    forward, backward = _flops(node, inputs, outputs, family)
    backward += forward if fused.again and backward else 0
    return int(fused.share * forward), int(fused.share * backward)


def _fused_products(node: Node, fused: Fused, inputs: Sequence[TensorSpec]) -> tuple[Product, ...]:
    """Return a fused attention kernel's product, as (batch, queries, keys, head size)."""
    if not fused.is_attention or family_of(node) != "matmul":
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


def _products(
    node: Node, inputs: Sequence[TensorSpec], family: Family, outputs: Sequence[TensorSpec]
) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
    wanted = _wanted(inputs, outputs)
    name = packet(node.op)
    if family == "attention":
        own = attention_products(node, inputs[0], inputs[1])
        return own, own if wanted else ()
    if name == "experts":
        return _expert_products(node, inputs, wanted)
    factors = product_factors(node, len(inputs))
    if family != "matmul" or len(factors) != 2 or name == "_grouped_mm":
        return (), ()
    product = plain_product(node, [inputs[at].shape for at in factors])
    if product is None:
        return (), ()
    first, second = (at in wanted for at in factors)
    return (product,), gradient_products(product, first=first, second=second)


def _expert_products(
    node: Node, inputs: Sequence[TensorSpec], wanted: Sequence[int]
) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
    """Return the products of an expert layer, forward and backward, with even routing."""
    forward: list[Product] = []
    backward: list[Product] = []
    widths, experts = inputs[0].shape[-1], inputs[3].shape[0]
    rows = max(1, expert_pairs(node, inputs) // experts)
    for position in (3, 4):
        weight = inputs[position]
        rest = weight.numel // experts
        # up-projections read tokens; down-projections write values as wide as tokens
        product = (
            (experts, rows, rest // widths, widths)
            if position == 3
            else (experts, rows, widths, rest // widths)
        )
        forward.append(product)
        backward += gradient_products(product, first=True, second=position in wanted)
    return tuple(forward), tuple(backward) if wanted else ()


def _registered(rule: OpRule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Work:
    """Return the work of a registered op: the user's estimate, or an estimate by its annotation's
    product.

    The backward counts twice the forward, as for a product of two factors.
    """
    signature = bind(rule.annotation, [s.shape for s in inputs], [s.shape for s in outputs])
    kept = {letter for letters in signature.outputs for letter in letters} if signature else set()
    sizes: dict[str, int] = {}
    for letters, spec in zip(signature.inputs if signature else (), inputs, strict=False):
        sizes |= {letter: size for letter, size in zip(letters, spec.shape, strict=True) if letter}
    is_product = bool(signature and signature.terms and set(sizes) - kept and len(inputs) > 1)
    if rule.flops is not None:
        flops = int(rule.flops(*(spec.shape for spec in inputs)))
    else:
        made = sum(spec.numel for spec in outputs)
        flops = 2 * prod(sizes.values()) if is_product else max(made, inputs[0].numel)
    wanted = bool(_wanted(inputs, outputs))
    num_bytes = sum(spec.num_bytes for spec in [*inputs, *outputs])
    family: Family = "matmul" if is_product else "elementwise"
    return Work(family, flops, 2 * flops * wanted, num_bytes, 2 * num_bytes * wanted)


def _view(node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Work:
    """Return the work of a view: only its backward, which pads cuts and sums expansions."""
    source, made = inputs[0], sum(spec.num_bytes for spec in outputs)
    name = packet(node.op)
    if not (source.requires_grad and any(spec.requires_grad for spec in outputs)):
        return _FREE
    if name in _CUTS and made > 0 and outputs[0].shape != source.shape:
        return Work("copy", 0, 0, 0, source.num_bytes + made, kernels_forward=0)
    if name.startswith("expand") and outputs[0].numel > source.numel:
        return Work("reduction", 0, outputs[0].numel, 0, source.num_bytes + made, kernels_forward=0)
    return _FREE


def _wanted(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> list[int]:
    """Return the positions of the inputs whose gradients the backward computes."""
    if not any(spec.requires_grad for spec in outputs):
        return []
    return [position for position, spec in enumerate(inputs) if spec.requires_grad]


def _bytes(
    node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], family: Family
) -> tuple[int, int]:
    made = sum(spec.num_bytes for spec in outputs)
    read = sum(spec.num_bytes for spec in inputs)
    wanted = _wanted(inputs, outputs)
    name = packet(node.op)
    if name in ("embedding", "index", "index_select", "gather"):
        read = made + sum(spec.num_bytes for spec in inputs[1:])
    if name == "cross_entropy_loss":
        read += inputs[0].num_bytes
    if not wanted:
        return read + made, 0
    gradients = sum(inputs[position].num_bytes for position in wanted)
    if family in ("matmul", "conv"):
        return read + made, _product_bytes(node, inputs, made, wanted)
    kept = sum(
        inputs[position].num_bytes for position in saved_inputs(node, inputs, count=len(inputs))
    )
    kept += sum(outputs[index].num_bytes for index in saved_outputs(node))
    if name == "cross_entropy_loss":
        kept += inputs[0].num_bytes
    if name == "balanced_attention":
        query, key, value = (spec.num_bytes for spec in inputs[:3])
        return read + query + 4 * made, 4 * made + gradients + kept + query + 4 * (key + value)
    return read + made, made + gradients + kept


def _product_bytes(node: Node, inputs: Sequence[TensorSpec], made: int, wanted: list[int]) -> int:
    """Return the backward bytes of a product: for each gradient, reads of the output's gradient and
    the other factor, and the write of the gradient."""
    factors = product_factors(node, len(inputs))
    total = 0
    for position in wanted:
        others = [at for at in factors if at != position] if position in factors else []
        total += made + inputs[position].num_bytes + sum(inputs[at].num_bytes for at in others)
    return total


def _flops(
    node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], family: Family
) -> tuple[int, int]:
    wanted = _wanted(inputs, outputs)
    if packet(node.op) == "experts":
        product = expert_pairs(node, inputs) * sum(
            2 * weight.numel // weight.shape[0] for weight in inputs[3:5]
        )
        return product, product * sum(position in (0, 3) for position in wanted)
    if family in ("matmul", "conv"):
        factors = product_factors(node, len(inputs))
        product = _product_flops(node, inputs, outputs[0], factors)
        return product, product * sum(position in factors for position in wanted)
    if family == "attention":
        forward = _attention_flops(node, inputs)
        return forward, int(forward * _ATTENTION_BACKWARD) if wanted else 0
    per_forward, per_backward = _FLOPS_PER_ELEMENT.get(family, (0, 0))
    elements = max(spec.numel for spec in [*inputs, *outputs])
    return per_forward * elements, per_backward * elements if wanted else 0


def _product_flops(
    node: Node, inputs: Sequence[TensorSpec], out: TensorSpec, factors: tuple[int, ...]
) -> int:
    name = packet(node.op)
    first, second = inputs[factors[0]], inputs[factors[-1]]
    if name.startswith("conv_transpose"):
        return 2 * first.numel * (second.numel // second.shape[0])
    if name.startswith("conv"):
        return 2 * out.numel * (second.numel // second.shape[0])
    if name == "einsum":
        operands, _ = parse_equation(
            str(argument(node, 0, "equation")), [len(spec.shape) for spec in inputs]
        )
        sizes: dict[str, int] = {}
        for names, spec in zip(operands, inputs, strict=True):
            for name, size in zip(names, spec.shape, strict=True):
                sizes[name] = max(size, sizes.get(name, 1))
        return 2 * prod(sizes.values())
    return 2 * out.numel * (1 if name == "outer" else first.shape[-1])


def is_lower_right(node: Node, query: TensorSpec) -> bool:
    """Return whether an attention is causal and its queries are a part of the positions only."""
    return (
        packet(node.op) == "scaled_dot_product_attention"
        and bool(argument(node, 5, "is_causal", False))
        and query.shape[-2] != node.spec.shape[-2]
    )


def _attention_flops(node: Node, inputs: Sequence[TensorSpec]) -> int:
    query, key, value = inputs[:3]
    if packet(node.op) == "balanced_attention":
        halves = attention_products(node, query, key)
        pairs = sum(heads * (rows * end - rows * rows // 2) for heads, rows, end, _ in halves)
        return 2 * pairs * (query.shape[-1] + value.shape[-1])
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    is_causal = bool(argument(node, 5, "is_causal", False))
    if is_causal and query.shape[-2] == key.shape[-2]:
        pairs //= 2
    elif is_lower_right(node, query):  # the rank with the last positions: all others wait
        pairs -= prod(query.shape[:-1]) * query.shape[-2] // 2
    return 2 * pairs * (query.shape[-1] + value.shape[-1])
