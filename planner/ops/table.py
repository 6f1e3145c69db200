"""The rules as data: how dimensions correspond in each op, listed without overloads.

``ANNOTATED`` has ops with a fixed annotation (grammar: ``annotation.py``); ``ALONG`` ops that work
along some dims and keep every dim; ``REDUCTIONS`` ops that remove dims; ``LOSSES`` elementwise
losses; ``STRUCTURED`` ops whose annotation depends on their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from . import indexing, structured, views
from .annotation import Signature
from .case import Case

_LINEAR_UNARY = "alias clone detach lift_fresh lift_fresh_copy neg positive"
_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil celu cos cosh elu erf erfc exp exp2 "
    "expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu "
    "lgamma log log10 log1p log2 log_sigmoid logical_not mish nan_to_num reciprocal relu relu6 "
    "round rsqrt selu sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh threshold "
    "trunc zeros_like ones_like full_like empty_like"
)
_BINARY = (
    "__and__ __or__ __xor__ atan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift eq floor_divide fmax fmin fmod ge greater greater_equal gt le less "
    "less_equal logical_and logical_or logical_xor lt maximum minimum ne not_equal pow "
    "remainder xlogy"
)
ELEMENTWISE = frozenset(
    f"{_LINEAR_UNARY} {_UNARY} {_BINARY} to _to_copy add sub subtract rsub mul multiply div divide "
    "true_divide where masked_fill addcmul addcdiv lerp clamp clip".split()
)


def _spatial() -> dict[str, str]:
    """Return annotations of pooling and upsampling, whose 1 to 3 spatial dims are not split."""
    found: dict[str, str] = {}
    for count in (1, 2, 3):
        dims = "n c" + " _" * count
        found[f"max_pool{count}d"] = f"{dims} => {dims}"
        found[f"max_pool{count}d_with_indices"] = f"{dims} => {dims}, {dims}"
        found[f"adaptive_max_pool{count}d"] = f"{dims} => {dims}, {dims}"
        found[f"avg_pool{count}d"] = f"{dims} -> {dims}"
        found[f"adaptive_avg_pool{count}d"] = f"{dims} -> {dims}"
        found[f"upsample_nearest{count}d"] = f"{dims} -> {dims}"
        found[f"_upsample_nearest_exact{count}d"] = f"{dims} -> {dims}"
        found[f"reflection_pad{count}d"] = f"{dims} -> {dims}"
        found[f"replication_pad{count}d"] = f"{dims} -> {dims}"
    for name in ("bilinear2d", "bicubic2d"):
        found[f"upsample_{name}"] = found[f"_upsample_{name}_aa"] = "n c _ _ -> n c _ _"
    found["upsample_linear1d"] = "n c _ -> n c _"
    found["upsample_trilinear3d"] = "n c _ _ _ -> n c _ _ _"
    found["grid_sampler"] = "n c _ _, n _ _ _ => n c _ _"
    found["im2col"] = "n _ _ _ -> n _ _"
    found["col2im"] = "n _ _ -> n _ _ _"
    found["pixel_shuffle"] = "*b _ _ _ -> *b _ _ _"
    found["pixel_unshuffle"] = "*b _ _ _ -> *b _ _ _"
    return found


ANNOTATED: dict[str, str] = {
    **dict.fromkeys(_UNARY.split(), "* => *"),
    **dict.fromkeys(_LINEAR_UNARY.split(), "* -> *"),
    **dict.fromkeys(_BINARY.split(), "*, * => *"),
    "contiguous": "* -> *",
    "counter_dropout": "* -> *",
    "counter_uniform": "* => *",
    "copy": "[*], * -> *",
    "fill": "*, * => *",
    "mul": "*, * -> *",
    "multiply": "*, * -> *",
    "addcmul": "* + *, * -> *",
    "addcdiv": "* + *, [*] -> *",
    "lerp": "*, *, * => *",
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), "*, *, * => *"),
    "linear": "*b i, o i + o -> *b o",
    "view_as_complex": "*b _ => *b",
    "view_as_real": "*b => *b _",
    "experts": "t _, t _, t _, e _ _, e _ _, e _, e _ =>+ t _",
    "mm": "i k, k j -> i j",
    "bmm": "b i k, b k j -> b i j",
    "mv": "i k, k -> i",
    "dot": "k, k -> ",
    "outer": "i, j -> i j",
    "addmm": "i j + i k, k j -> i j",
    "baddbmm": "b i j + b i k, b k j -> b i j",
    "tril": "*b _ _ -> *b _ _",
    "triu": "*b _ _ -> *b _ _",
    **_spatial(),
}

ALONG: dict[str, tuple[int, int | None, bool]] = {
    "softmax": (1, None, False),
    "_softmax": (1, None, False),
    "log_softmax": (1, None, False),
    "_log_softmax": (1, None, False),
    "cumsum": (1, None, True),
    "cumprod": (1, None, False),
    "logcumsumexp": (1, None, False),
    "cummax": (1, None, False),
    "sort": (1, -1, False),
    "argsort": (1, -1, False),
    "topk": (2, -1, False),
    "flip": (1, None, True),
    "roll": (2, None, True),
    "diff": (2, -1, True),
    "glu": (1, -1, False),
}
"""By op: position of the dim argument, its default (None: required or all dims), linearity."""

REDUCTIONS: dict[str, tuple[int, bool]] = {
    "sum": (1, True),
    "mean": (1, True),
    "amax": (1, False),
    "amin": (1, False),
    "all": (1, False),
    "any": (1, False),
    "argmax": (1, False),
    "argmin": (1, False),
    "logsumexp": (1, False),
    "max": (1, False),
    "min": (1, False),
    "median": (1, False),
    "prod": (1, False),
    "std": (1, False),
    "std_mean": (1, False),
    "var": (1, False),
    "var_mean": (1, False),
    "norm": (2, False),
    "linalg_vector_norm": (2, False),
}
"""By op: position of the dim argument, and whether a split reduced dim gives partial sums."""

LOSSES: dict[str, int] = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "kl_div": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""By loss op: position of the argument ``reduction``."""

STRUCTURED: dict[str, Callable[[Case], Signature | None]] = {
    "to": structured.convert,
    "_to_copy": structured.convert,
    "type_as": structured.convert,
    "add": structured.add,
    "sub": structured.add,
    "subtract": structured.add,
    "rsub": structured.add,
    "div": structured.divide,
    "divide": structured.divide,
    "true_divide": structured.divide,
    "where": structured.where,
    "masked_fill": structured.masked_fill,
    "dropout": structured.dropout,
    "feature_dropout": structured.dropout,
    "matmul": structured.matmul,
    "einsum": structured.einsum,
    "scaled_dot_product_attention": structured.attention,
    "embedding": structured.embedding,
    "layer_norm": structured.normalized_last,
    "rms_norm": structured.normalized_last,
    "group_norm": structured.grouped_norm,
    "instance_norm": structured.instance_norm,
    "batch_norm": structured.batch_norm,
    "_native_batch_norm_legit_functional": structured.batch_norm,
    **dict.fromkeys(
        (
            "conv1d",
            "conv2d",
            "conv3d",
            "conv_transpose1d",
            "conv_transpose2d",
            "conv_transpose3d",
            "convolution",
        ),
        structured.convolution,
    ),
    "cross_entropy_loss": structured.class_loss,
    "nll_loss": structured.class_loss,
    "nll_loss_nd": structured.class_loss,
    "index": indexing.index,
    "index_select": indexing.index_select,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter_add,
    "scatter_reduce": indexing.scatter_reduce,
    "index_add": indexing.index_add,
    "index_copy": indexing.index_copy,
    "index_fill": indexing.index_fill,
    "index_put": indexing.index_put,
    "histc": indexing.histogram,
    "_grouped_mm": indexing.grouped_mm,
    "one_hot": structured.one_hot,
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "_unsafe_view",
            "view_copy",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
        ),
        views.reshape,
    ),
    "expand": views.expand,
    "expand_as": views.like_other,
    "view_as": views.like_other,
    "reshape_as": views.like_other,
    "slice_scatter": views.scatter_part,
    "select_scatter": views.scatter_part,
    "repeat": views.repeat,
    "tile": views.repeat,
    "repeat_interleave": views.repeat_interleave,
    **dict.fromkeys(
        (
            "permute",
            "transpose",
            "swapaxes",
            "swapdims",
            "t",
            "mT",
            "numpy_T",
            "movedim",
            "moveaxis",
        ),
        views.permute,
    ),
    **dict.fromkeys(
        (
            "slice",
            "narrow",
            "split",
            "split_with_sizes",
            "chunk",
            "tensor_split",
            "unsafe_split",
            "unsafe_chunk",
        ),
        views.cut,
    ),
    "select": views.take,
    "unbind": views.take,
    "cat": views.cat,
    "concat": views.cat,
    "concatenate": views.cat,
    "stack": views.stack,
    "pad": views.pad,
    "constant_pad_nd": views.pad,
    "new_zeros": views.new,
    "new_ones": views.new,
    "new_full": views.new,
    "new_empty": views.new,
}


@lru_cache(maxsize=4096)
def packet(op: str) -> str:
    """Return an op's name without namespace and overload, and without "_" if it is in-place.

    >>> packet("aten.add_.Tensor"), packet("aten.__and__.Tensor")
    ('add', '__and__')
    """
    parts = op.split(".")
    if len(parts) < 2 or parts[0] not in ("aten", "autoparallel"):
        return ""
    name = parts[1]
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def signature(case: Case) -> Signature | None:
    """Return the signature of a node; None if it has no rule that applies."""
    name = packet(case.node.op)
    if not case.inputs or not case.outputs:
        return None
    if case.node.rule is not None:
        return structured.annotate(case, case.node.rule.annotation)
    if name in STRUCTURED:
        return STRUCTURED[name](case)
    if name in ("max", "min") and case.node.op.endswith(".other"):
        return structured.annotate(case, "*, * => *")
    if name in ALONG:
        position, default, is_linear = ALONG[name]
        return structured.along(case, position, default, is_linear=is_linear)
    if name in REDUCTIONS:
        position, is_sum = REDUCTIONS[name]
        return structured.reduce(case, position, is_sum=is_sum)
    if name in LOSSES:
        return structured.elementwise_loss(case, LOSSES[name])
    if name in ANNOTATED:
        return structured.annotate(case, ANNOTATED[name])
    return None


def _description(rule: Callable[[Case], Signature | None]) -> str:
    return (rule.__doc__ or "").strip().splitlines()[0]


def _listing() -> tuple[tuple[str, str], ...]:
    rules = dict(ANNOTATED)
    rules |= {
        op: f"*a [dim] *c {'->' if is_linear else '=>'} *a [dim] *c"
        for op, (_, _, is_linear) in ALONG.items()
    }
    rules |= {
        op: "*a dim *c -> *a *c" if is_sum else "*a [dim] *c => *a *c"
        for op, (_, is_sum) in REDUCTIONS.items()
    }
    rules |= dict.fromkeys(LOSSES, "*, * =>+ ")
    rules |= {op: _description(rule) for op, rule in STRUCTURED.items()}
    return tuple(sorted(rules.items()))


RULES = _listing()
"""(op, rule) for every op with a rule: its annotation, or a sentence if it depends on arguments."""
