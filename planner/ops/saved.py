"""Tensors and bytes that autograd keeps for the backward of each op.

In: a node. Out: its inputs and outputs that its backward reads, and other bytes kept (statistics,
masks, log-probabilities). Source: PyTorch's tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..graph.graph import Graph, Node, Ref, TensorSpec
from .case import argument
from .products import plain_product, product_factors
from .table import packet

_STATISTIC_BYTES = 4
_INDEX_BYTES = 8
_EXPERT_WIDTHS = 3
"""Values kept per (token, expert), in widths of the first product: its result, the activation's."""

OTHERS, INPUT, INPUTS, REST, OUTPUT, BOTH, INDICES, NOTHING = (
    "others",
    "input",
    "inputs",
    "rest",
    "output",
    "both",
    "indices",
    "nothing",
)

_CHOOSING = ("max", "min", "median")
"""Ops that choose an element: they save input and result, or only the index if they return it."""

_KEPT = {
    OTHERS: (
        "linear matmul mm bmm mv dot outer einsum addmm baddbmm mul multiply addcmul _grouped_mm "
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"
    ),
    OUTPUT: (
        "elu exp exp2 expm1 reciprocal relu rsqrt sigmoid softmax _softmax log_softmax "
        "_log_softmax sqrt tan tanh"
    ),
    BOTH: (
        "scaled_dot_product_attention balanced_attention amax amin norm linalg_vector_norm "
        "logsumexp logcumsumexp prod std"
    ),
    INPUTS: (
        "maximum minimum fmax fmin atan2 batch_norm "
        "_native_batch_norm_legit_functional instance_norm group_norm layer_norm rms_norm mse_loss "
        "l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits nll_loss nll_loss_nd gather scatter_reduce "
        "soft_margin_loss clamp clip experts"
    ),
    REST: "embedding index index_select cross_entropy_loss masked_fill kl_div addcdiv",
    INDICES: "sort topk cummax",
    NOTHING: (
        "add sub subtract rsub neg positive alias clone contiguous detach to _to_copy dropout "
        "counter_dropout counter_uniform "
        "lift_fresh lift_fresh_copy copy fill "
        "type_as expand_as view_as reshape_as slice_scatter select_scatter "
        "tril triu cumsum flip roll diff sum mean view reshape "
        "_unsafe_view view_copy flatten unflatten squeeze unsqueeze expand repeat tile "
        "repeat_interleave "
        "view_as_complex view_as_real "
        "permute transpose swapaxes swapdims t mT numpy_T movedim moveaxis slice narrow split "
        "split_with_sizes chunk tensor_split unsafe_split unsafe_chunk select unbind cat concat "
        "concatenate stack pad constant_pad_nd pixel_shuffle pixel_unshuffle upsample_nearest1d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest2d "
        "upsample_nearest3d upsample_bilinear2d floor ceil round sign trunc "
        "ones_like zeros_like full_like empty_like new_zeros new_ones new_full new_empty"
    ),
}
_WRITES = frozenset(
    ["scatter", "scatter_add", "index_add", "index_copy", "index_fill", "index_put"]
)
_RULE = {op: rule for rule, ops in _KEPT.items() for op in ops.split()}


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


def saved_inputs(node: Node, inputs: Sequence[TensorSpec] | None, *, count: int) -> tuple[int, ...]:
    """Return the positions in ``node.inputs`` of the tensors that the backward reads."""
    if node.rule is not None and node.rule.saved_bytes is not None:
        return ()
    wants = [True] * count if inputs is None else [spec.requires_grad for spec in inputs]
    name = packet(node.op)
    rule = _RULE.get(name, INPUT) if name else INPUTS
    everything = tuple(range(count))
    if name in _CHOOSING:
        return everything if count > 1 else (0,)[: len(node.outputs) == 1]
    if name in ("div", "divide", "true_divide"):
        return (*((0,) if wants[-1] and count > 1 else ()), *((1,) if count > 1 else ()))
    if name == "where":
        return (0,)
    if name in _WRITES:
        return everything[1:-1] if count > 2 else everything[1:]
    if name in ("pow", "lerp"):
        return everything if name == "pow" or count > 2 else ()
    if rule == OTHERS:
        first = {"addmm": 1, "baddbmm": 1, "addcmul": 1}.get(name, 0)
        factors = everything[first : first + 2]
        return tuple(at for at in factors if any(wants[other] for other in factors if other != at))
    if rule == REST:
        return everything[1:]
    return {INPUT: everything[:1], INPUTS: everything, BOTH: everything}.get(rule, ())


def saved_outputs(node: Node) -> tuple[int, ...]:
    """Return the indices of the node's outputs that its own backward reads."""
    name = packet(node.op)
    rule = _RULE.get(name, INPUT)
    if rule == INDICES or (name in _CHOOSING and len(node.outputs) > 1):
        return (1,)
    if name in _CHOOSING:
        return (0,) if len(node.inputs) == 1 else ()
    if name == "pow":
        return (0,) if is_exponential(node) else ()
    return (0,) if rule in (OUTPUT, BOTH) else ()


def is_exponential(node: Node) -> bool:
    """Return whether a power's exponent is a tensor: its gradient then reads the result."""
    return node.op != "aten.pow.Tensor_Scalar"


def saved_extra_bytes(
    node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> int:
    """Return the bytes that autograd keeps besides inputs and outputs, at these local shapes."""
    if not any(spec.requires_grad for spec in outputs):
        return 0
    if node.rule is not None and node.rule.saved_bytes is not None:
        return int(node.rule.saved_bytes(*(spec.shape for spec in inputs)))
    name, out = packet(node.op), outputs[0]
    statistic = max(_STATISTIC_BYTES, out.itemsize)
    if node.fused is not None and node.fused.is_attention:
        return _num_score_rows(node, inputs) * statistic if node.fused.writes else 0
    if name == "experts":
        gathered = 2 * inputs[0].shape[-1] + _EXPERT_WIDTHS * inputs[3].numel // (
            inputs[3].shape[0] * inputs[0].shape[-1]
        )
        return inputs[1].numel * gathered * out.itemsize
    if writes_scores(node, inputs):
        factors = sum(spec.numel for spec in inputs[:3])
        return (factors + _num_scores(inputs)) * statistic
    if name == "scaled_dot_product_attention":
        return prod(out.shape[:-1]) * statistic
    if name == "balanced_attention":  # half of the queries, and the results before they are joined
        return prod(out.shape[:-1]) * statistic + inputs[0].num_bytes // 2 + out.num_bytes
    if name in ("layer_norm", "rms_norm"):
        normalized = prod(argument(node, 1, "normalized_shape"))
        return (2 if name == "layer_norm" else 1) * _rows(out, normalized) * statistic
    if name == "group_norm":
        groups: int = argument(node, 1, "num_groups") * out.shape[1] // node.spec.shape[1]
        return 2 * out.shape[0] * max(groups, 1) * statistic
    if name in ("batch_norm", "instance_norm", "_native_batch_norm_legit_functional"):
        return 2 * out.shape[1] * statistic + _normalized_bytes(node, out, statistic)
    if name == "cross_entropy_loss":
        # fused, the log-probabilities are recomputed from the classes' log-sum
        classes = 1 if node.fused is None else inputs[0].shape[min(1, len(inputs[0].shape) - 1)]
        return inputs[0].num_bytes // classes
    if name.startswith(("max_pool", "adaptive_max_pool")):
        return out.numel * _INDEX_BYTES
    if name in ("dropout", "feature_dropout") and not is_identity(node, inputs, outputs):
        return out.numel if node.fused is None else 0  # a fused kernel draws again from the seed
    return 0


def kept_extra_bytes(
    node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> int:
    """Return the bytes besides outputs that selective recomputation keeps of an expensive op."""
    if not writes_scores(node, inputs):
        return saved_extra_bytes(node, inputs, outputs)
    out = outputs[0]
    wide = max(_STATISTIC_BYTES, out.itemsize)
    return _num_scores(inputs) * wide + out.numel * (wide - out.itemsize)


def writes_scores(node: Node, inputs: Sequence[TensorSpec]) -> bool:
    """Return whether an attention runs as two products and a softmax: if its mask needs a gradient,
    which PyTorch's flash attention does not compute.

    It then keeps its own copies of queries, keys and values, and the softmax's result, in float32
    at least (``_scaled_dot_product_attention_math``, ATen/native/transformers/attention.cpp).
    """
    is_attention = packet(node.op) == "scaled_dot_product_attention"
    return is_attention and len(inputs) > 3 and inputs[3].requires_grad


def _num_scores(inputs: Sequence[TensorSpec]) -> int:
    query, key = inputs[:2]
    return query.numel // query.shape[-1] * key.shape[-2]


def _normalized_bytes(node: Node, out: TensorSpec, itemsize: int) -> int:
    """Return the bytes of normalized values that a batch norm also keeps if ranks split its rows.

    It is then written out in elementary ops, so that its statistics can be summed over the ranks
    (``passes.ops.batch_norm``).
    """
    split = [whole != own for whole, own in zip(node.spec.shape, out.shape, strict=True)]
    is_split = any(split[:1] + split[2:])
    return out.numel * itemsize if is_split else 0


def expert_pairs(node: Node, inputs: Sequence[TensorSpec]) -> int:
    """Return the number of (token, expert) pairs that an expert layer computes if evenly routed."""
    held = inputs[3].shape[0]
    return int(inputs[1].numel * held / argument(node, 8, "num_experts", held))


def is_identity(node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Return whether an op changes nothing, such as a cast to its own dtype or dropout at p = 0."""
    name = packet(node.op)
    if name == "to":
        return inputs[0].dtype == outputs[0].dtype and not node.kwargs.get("copy", False)
    if name in ("dropout", "feature_dropout"):
        return not (argument(node, 1, "p") and argument(node, 2, "train"))
    return name in ("alias", "detach", "lift_fresh")


def _num_score_rows(node: Node, inputs: Sequence[TensorSpec]) -> int:
    """Return the number of rows of scores in the last product of a written-out attention."""
    product = plain_product(node, [inputs[at].shape for at in product_factors(node, len(inputs))])
    if product is None:
        return 0
    batch, rows, columns, _ = product
    return batch * max(rows, columns)  # the other is the head size


def _rows(spec: TensorSpec, width: int) -> int:
    return spec.numel // max(width, 1)
