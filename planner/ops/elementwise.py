"""Records of elementwise ops, casts and copies, filled tensors, and random numbers."""

from __future__ import annotations

from dataclasses import replace

from ..graph.graph import Node
from .annotation import Signature
from .case import Case, Specs, annotate, argument, is_ref, letters_of
from .spec import OpSpec, annotated, by, named, never, nothing_kept, per_element, size_at


def add(case: Case) -> Signature | None:
    """Split all dims; a sum of tensors is linear in them jointly, adding a number is not linear."""
    return annotate(case, "* + * -> *" if len(case.inputs) == 2 else "* => *")


def divide(case: Case) -> Signature | None:
    """Split all dims; linear in the dividend, unless it rounds."""
    if case.argument(2, "rounding_mode") is not None or not is_ref(case.node.args[0]):
        return annotate(case, "*, * => *")
    return annotate(case, "*, [*] -> *")


def where(case: Case) -> Signature | None:
    """Split all dims; linear in both branches jointly when both are tensors."""
    return annotate(case, "[*], * + * -> *" if len(case.inputs) == 3 else "*, * => *")


def masked_fill(case: Case) -> Signature | None:
    """Split all dims; linear when it fills with zero."""
    value = case.argument(2, "value")
    if is_ref(value) or value:
        return annotate(case, "*, *, * => *")
    return annotate(case, "*, [*] -> *")


def dropout(case: Case) -> Signature | None:
    """Split all dims without randomness; a random mask must be the same on every rank."""
    if case.argument(2, "train") and case.argument(1, "p"):
        return None
    return annotate(case, "* -> *")


def convert(case: Case) -> Signature:
    """Split all dims of a cast; a tensor that only gives the dtype stays whole."""
    letters = letters_of(case.rank)
    others = tuple((None,) * len(spec.shape) for spec in case.inputs[1:])
    return Signature((letters, *others), (letters,), ((0,),))


def new(case: Case) -> Signature:
    """Split any dim of ``new_zeros`` and similar ops; equal dims of the input go together."""
    shape = case.outputs[0].shape
    before: list[str | None] = [None] * case.rank
    for dim, (source, size) in enumerate(zip(case.shape, shape, strict=False)):
        if source == size:
            before[dim] = f"d{dim}"
    return Signature((tuple(before),), (letters_of(len(shape)),))


def _has_dtype(node: Node, inputs: Specs, outputs: Specs) -> bool:
    return inputs[0].dtype == outputs[0].dtype and not node.kwargs.get("copy", False)


def _is_off(node: Node, inputs: Specs, outputs: Specs) -> bool:
    return not (argument(node, 1, "p") and argument(node, 2, "train"))


def _mask_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    # a fused kernel draws again from the seed
    is_kept = node.fused is None and not _is_off(node, inputs, outputs)
    return outputs[0].numel if is_kept else 0


UNARY = OpSpec(
    name="abs",
    rule=annotated("* => *"),
    family="elementwise",
    flops=per_element(1, 2),
    factors=(),
    product=None,
    products=None,
    reads="inputs",
    kernels=(1, 1),
    is_counted=False,
    keeps="input",
    kept_bytes=nothing_kept,
    is_costly=False,
    weight_gradient=None,
    form="other",
    memory="ordered",
    is_identity=never,
    copies=0,
    fusion="any",
    autocast="as inputs",
    local=None,
    is_sized=False,
    loss=None,
    largest_index=None,
    script="",
    result="",
    is_weighted=False,
    is_inline=False,
)
SIGNS = {"bitwise_and": "&", "bitwise_or": "|", "eq": "==", "ne": "!="}
SIGNS |= {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
BINARY = replace(UNARY, rule=annotated("*, * => *"))
SUM = replace(UNARY, name="add", rule=by(add), keeps="nothing", script="a + b", result="sum_")
QUOTIENT = replace(UNARY, name="div", rule=by(divide), keeps="division", script="a / b")
CLAMP = replace(UNARY, name="clamp", rule=annotated("*, *, * => *"), keeps="inputs")
CLONE = replace(
    UNARY,
    name="clone",
    rule=annotated("* -> *"),
    family="copy",
    flops=per_element(0, 0),
    keeps="nothing",
    form="same",
    script=".{}()",
)
CAST = replace(CLONE, name="_to_copy", rule=by(convert), script="", result="cast", is_inline=True)
ALIAS = replace(CLONE, name="alias", family="view", is_identity=lambda node, inputs, outputs: True)
FILLED = replace(CLONE, name="zeros_like", rule=annotated("* => *"), form="fill", script="")
SIZED = replace(
    FILLED, name="new_zeros", rule=by(new), memory="new", local=size_at(1), is_sized=True
)
DROPOUT = replace(
    UNARY,
    name="dropout",
    rule=by(dropout),
    keeps="nothing",
    kept_bytes=_mask_bytes,
    memory="new",
    is_identity=_is_off,
    fusion="products",
)
COUNTED = replace(
    UNARY,
    name="counter_dropout",
    rule=annotated("* -> *"),
    is_counted=True,
    keeps="nothing",
    memory="new",
    result="dropped",
)

SPECS = (
    replace(UNARY, result="size"),
    *named(UNARY, "acos asin cosh log log10 log1p log2 sinh square", autocast="float32"),
    *named(
        UNARY,
        "acosh asinh atan atanh bitwise_not celu cos erf erfc frac hardsigmoid isfinite isinf "
        "isnan lgamma log_sigmoid logical_not nan_to_num relu6 sgn sin threshold",
    ),
    *named(UNARY, "gelu hardswish hardtanh leaky_relu mish selu silu", script="F.{}()"),
    *named(UNARY, "softplus", autocast="float32", script="F.{}()"),
    *named(UNARY, "logsigmoid", rule=None, memory="new", script="F.{}()"),
    *named(UNARY, "elu relu", keeps="output", script="F.{}()"),
    *named(UNARY, "exp expm1 reciprocal rsqrt tan", keeps="output", autocast="float32"),
    *named(UNARY, "exp2 sigmoid sqrt tanh", keeps="output"),
    *named(UNARY, "ceil floor round sign trunc", keeps="nothing"),
    *named(UNARY, "positive", rule=annotated("* -> *"), keeps="nothing"),
    *named(UNARY, "neg", rule=annotated("* -> *"), keeps="nothing", result="negated"),
    *named(
        BINARY,
        "__and__ __or__ __xor__ bitwise_left_shift bitwise_right_shift bitwise_xor floor_divide "
        "fmod greater greater_equal less less_equal logical_and logical_or logical_xor not_equal "
        "remainder xlogy",
    ),
    *named(BINARY, "atan2 fmax fmin maximum minimum", keeps="inputs"),
    *(replace(BINARY, name=name, script=f"a {sign} b") for name, sign in SIGNS.items()),
    *named(BINARY, "pow", keeps="power", autocast="float32", script="a ** b", result="power"),
    SUM,
    *named(SUM, "sub", script="a - b", result="difference"),
    *named(SUM, "rsub subtract", script="", result=""),
    replace(QUOTIENT, result="quotient"),
    *named(QUOTIENT, "divide true_divide", script=""),
    *named(
        UNARY,
        "mul",
        rule=annotated("*, * -> *"),
        factors=(0, 1),
        keeps="others",
        script="a * b",
        result="product",
    ),
    *named(UNARY, "multiply", rule=annotated("*, * -> *"), factors=(0, 1), keeps="others"),
    *named(UNARY, "addcmul", rule=annotated("* + *, * -> *"), factors=(1, 2), keeps="others"),
    *named(UNARY, "addcdiv", rule=annotated("* + *, [*] -> *"), keeps="rest"),
    *named(CLAMP, "clamp clip"),
    *named(CLAMP, "clamp_max clamp_min", keeps="input", memory="new"),
    *named(CLAMP, "lerp", keeps="interpolation"),
    *named(UNARY, "masked_fill", rule=by(masked_fill), keeps="rest", script=".{}()"),
    *named(UNARY, "where", rule=by(where), keeps="condition", result="chosen"),
    CLONE,
    *named(CLONE, "contiguous", memory="dense"),
    *named(CLONE, "lift_fresh_copy", script=""),
    *named(CLONE, "fill", rule=annotated("*, * => *"), form="other", memory="new", script=""),
    *named(CLONE, "copy", rule=annotated("[*], * -> *"), form="other", memory="new", script=""),
    *named(ALIAS, "alias detach"),
    *named(ALIAS, "lift_fresh", script=""),
    CAST,
    replace(CAST, name="to", is_identity=_has_dtype),
    *named(CAST, "type_as", memory="new", result="", is_inline=False),
    *named(FILLED, "empty_like full_like ones_like zeros_like"),
    *named(SIZED, "new_empty new_full new_ones new_zeros"),
    *named(
        SIZED,
        "empty full ones zeros",
        rule=None,
        family="elementwise",
        flops=per_element(1, 2),
        keeps="input",
        local=size_at(0),
    ),
    DROPOUT,
    *named(DROPOUT, "feature_dropout", keeps="input", fusion="apart"),
    *named(UNARY, "bernoulli rand randn", rule=None, memory="new", fusion="apart"),
    COUNTED,
    *named(COUNTED, "counter_uniform", rule=annotated("* => *"), result="uniform"),
)
