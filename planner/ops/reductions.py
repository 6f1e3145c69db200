"""Records of reductions, norms, losses, and ops along dims or over windows."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ..graph.graph import Node
from ..graph.layout import InnerCollective
from .annotation import FLOATS, Letters, Signature
from .case import Case, Specs, annotate, argument, is_ref, letters_of
from .elementwise import UNARY
from .spec import (
    Change,
    Loss,
    OpSpec,
    Rule,
    along,
    annotated,
    by,
    named,
    nothing_kept,
    per_element,
    reduces,
    statistic_bytes,
)

_COUNT_BYTES = 8
_REDUCTION_MEAN = 1
_REDUCTION_NONE = 0


def normalized_last(case: Case) -> Signature:
    """Split any dim before the normalized dims of ``layer_norm`` or ``rms_norm``."""
    normalized = len(case.argument(1, "normalized_shape"))
    letters = letters_of(case.rank, tuple(range(case.rank - normalized, case.rank)))
    weights = tuple((None,) * len(spec.shape) for spec in case.inputs[1:])
    return Signature((letters, *weights), (letters,))


def grouped_norm(case: Case) -> Signature:
    """Split the batch, or the channels of ``group_norm`` between groups."""
    letters: Letters = ("n", "c", *(None,) * (case.rank - 2))
    weights: tuple[Letters, ...] = (("c",),) * (len(case.inputs) - 1)
    groups = {"c": int(case.argument(1, "num_groups"))}
    return Signature((letters, *weights), (letters,), groups=groups)


def instance_norm(case: Case) -> Signature | None:
    """Split the batch or the channels, unless running statistics are kept."""
    if is_ref(case.argument(3, "running_mean")):
        return None
    letters: Letters = ("n", "c", *(None,) * (case.rank - 2))
    weights: tuple[Letters, ...] = (("c",),) * (len(case.inputs) - 1)
    return Signature((letters, *weights), (letters,))


def batch_norm(case: Case) -> Signature:
    """Split the channels or the batch: in training the ranks then share their statistics.

    They gather means and variances by channel forward, and reduce two sums backward.
    """
    letters: Letters = ("n", "c", *(None,) * (case.rank - 2))
    channels: tuple[Letters, ...] = (("c",),) * (len(case.inputs) - 1)
    statistics: tuple[Letters, ...] = (("c",),) * (len(case.outputs) - 1)
    inner: dict[str, tuple[InnerCollective, ...]] = {}
    if case.argument(5, "training"):
        num_bytes = 2 * case.shape[1] * max(case.inputs[0].itemsize, 4)
        gathered = InnerCollective("all_gather", num_bytes)
        reduced = InnerCollective("all_reduce", num_bytes, backward=True)
        inner["n"] = (gathered, reduced)
    return Signature((letters, *channels), (letters, *statistics), inner=inner, invariant="n")


def elementwise_loss(position: int) -> Rule:
    """Return the rule of an elementwise loss: its mean or sum over a split dim is partial."""

    def signature(case: Case) -> Signature | None:
        reduction = case.argument(position, "reduction", _REDUCTION_MEAN)
        operands = ", ".join("*" for _ in case.inputs)
        is_none = reduction == _REDUCTION_NONE
        return annotate(case, f"{operands} => *" if is_none else f"{operands} =>+ ")

    return Rule(signature, "*, * =>+ ", "any dim; the loss is then a partial sum")


def class_loss(case: Case) -> Signature | None:
    """Split rows of ``cross_entropy_loss`` and ``nll_loss``, or the vocabulary of cross entropy.

    A mean over split rows divides by the count of all ranks' targets, hence a collective;
    a split vocabulary reduces a maximum and a stack of sums per row.
    """
    logits, target = case.inputs[0], case.inputs[1]
    is_mean = case.argument(3, "reduction", _REDUCTION_MEAN) == _REDUCTION_MEAN
    weighted, of_probabilities = len(case.inputs) > 2, target.dtype in FLOATS
    dims = min(1, case.rank - 1)
    rows = tuple(f"d{dim}" for dim in range(case.rank) if dim != dims)
    vocabulary = "v" if _splits_vocabulary(case) and not weighted | of_probabilities else None
    scores: Letters = (*rows[:dims], vocabulary, *rows[dims:])
    inner: dict[str, tuple[InnerCollective, ...]] = {}
    if is_mean:
        inner = dict.fromkeys(rows, (InnerCollective("all_reduce", _COUNT_BYTES),))
    count = target.numel * max(logits.itemsize, 4)
    sums = 3 if case.argument(5, "label_smoothing", 0.0) else 2
    inner["v"] = (InnerCollective("all_reduce", count), InnerCollective("all_reduce", sums * count))
    return Signature(
        inputs=(scores, scores if of_probabilities else rows, *((None,),) * weighted),
        outputs=(() if case.outputs[0].shape == () else rows,),
        sums=True,
        inner=inner,
        invariant="v",
    )


def _splits_vocabulary(case: Case) -> bool:
    return case.node.op.startswith("aten.cross_entropy_loss")


def _own_groups(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
    """Return the number of groups in a rank's channels."""
    parts = max(1, node.spec.shape[1] // max(outputs[0].shape[1], 1))
    return ((1, "num_groups", max(1, argument(node, 1, "num_groups") // parts)),)


def _mean_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    normalized: int = prod(argument(node, 1, "normalized_shape"))
    return outputs[0].numel // max(normalized, 1) * statistic_bytes(outputs)


def _group_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    out = outputs[0]
    groups: int = argument(node, 1, "num_groups") * out.shape[1] // node.spec.shape[1]
    return 2 * out.shape[0] * max(groups, 1) * statistic_bytes(outputs)


def _channel_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes of a batch norm's statistics, and of its normalized values if ranks split
    its rows.

    It is then written out in elementary ops, so that its statistics can be summed over the ranks
    (``passes.ops.batch_norm``).
    """
    out, itemsize = outputs[0], statistic_bytes(outputs)
    split = [whole != own for whole, own in zip(node.spec.shape, out.shape, strict=True)]
    is_split = any(split[:1] + split[2:])
    return 2 * out.shape[1] * itemsize + (out.numel * itemsize if is_split else 0)


def _probability_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    # fused, the log-probabilities are recomputed from the classes' log-sum
    classes = 1 if node.fused is None else inputs[0].shape[min(1, len(inputs[0].shape) - 1)]
    return inputs[0].num_bytes // classes


def _num_classes(node: Node, inputs: Specs) -> int | None:
    scores = inputs[0].shape
    return scores[1 if len(scores) > 1 else 0]


def _windows(base: OpSpec, name: str, rule: str = "{} -> {}", **facts: Any) -> tuple[OpSpec, ...]:
    """Return the records of an op on windows of 1, 2 and 3 spatial dims, which are not split."""
    counts = {f"{count}d": "n c" + " _" * count for count in (1, 2, 3)}
    return tuple(
        replace(base, name=name.format(count), rule=annotated(rule.replace("{}", dims)), **facts)
        for count, dims in counts.items()
    )


NORM = replace(
    UNARY,
    name="layer_norm",
    rule=by(normalized_last),
    family="norm",
    flops=per_element(8, 14),
    keeps="inputs",
    kept_bytes=lambda node, inputs, outputs: 2 * _mean_bytes(node, inputs, outputs),
    memory="new",
    autocast="inside",
    script="F.{}(4)",
    result="norm",
    is_weighted=True,
)
BATCH_NORM = replace(
    NORM,
    name="batch_norm",
    rule=by(batch_norm),
    kept_bytes=_channel_bytes,
    fusion="apart",
    autocast="as inputs",
    script="",
    result="",
)
SOFTMAX = replace(
    NORM,
    name="softmax",
    rule=along(1, None, is_linear=False),
    keeps="output",
    kept_bytes=nothing_kept,
    script="",
    result="",
    is_weighted=False,
)
REDUCTION = replace(
    SOFTMAX,
    name="var",
    rule=reduces(1, is_sum=False),
    family="reduction",
    flops=per_element(1, 1),
    keeps="input",
    autocast="as inputs",
)
TOTAL = replace(
    REDUCTION, name="sum", rule=reduces(1, is_sum=True), keeps="nothing", result="total"
)
SCAN = replace(REDUCTION, name="cumprod", rule=along(1, None, is_linear=False), fusion="products")
SORT = replace(
    REDUCTION, name="sort", rule=along(1, -1, is_linear=False), keeps="indices", fusion="apart"
)
LOSS = replace(
    REDUCTION,
    name="mse_loss",
    rule=elementwise_loss(2),
    keeps="inputs",
    autocast="float32",
    loss=Loss(2, has_classes=False),
)
CLASS_LOSS = replace(
    LOSS,
    name="nll_loss",
    rule=by(class_loss),
    loss=Loss(3, has_classes=True),
    largest_index=_num_classes,
    script="F.nll_loss(2)",
    result="loss",
)
POOL = replace(REDUCTION, name="avg_pool2d", script="F.{}()")
MAX_POOL = replace(POOL, kept_bytes=lambda node, inputs, outputs: 8 * outputs[0].numel)
WINDOW = replace(POOL, family="elementwise", flops=per_element(1, 2), script="")
PLACES = replace(WINDOW, kept_bytes=MAX_POOL.kept_bytes)
NEAREST = replace(WINDOW, family="copy", flops=per_element(0, 0), keeps="nothing")
TRIANGLE = replace(WINDOW, rule=annotated("*b _ _ -> *b _ _"), keeps="nothing")
RESIZED = replace(WINDOW, rule=annotated("n c _ _ -> n c _ _"), autocast="float32")

SPECS = (
    NORM,
    replace(NORM, name="rms_norm", kept_bytes=_mean_bytes, script="F.{}(3)", result=""),
    replace(
        NORM,
        name="group_norm",
        rule=by(grouped_norm),
        kept_bytes=_group_bytes,
        local=_own_groups,
        script="",
        result="",
    ),
    BATCH_NORM,
    replace(BATCH_NORM, name="instance_norm", rule=by(instance_norm), is_weighted=False),
    replace(
        BATCH_NORM,
        name="_native_batch_norm_legit_functional",
        result="normalized",
        is_weighted=False,
    ),
    *named(SOFTMAX, "softmax _softmax"),
    *named(SOFTMAX, "log_softmax", autocast="float32"),
    *named(SOFTMAX, "_log_softmax", autocast="as inputs"),
    *named(REDUCTION, "argmax argmin std_mean var var_mean"),
    *named(REDUCTION, "all", result="all_"),
    *named(REDUCTION, "any", result="any_"),
    *named(REDUCTION, "amax amin std", keeps="both"),
    *named(REDUCTION, "logsumexp", keeps="both", autocast="float32"),
    *named(REDUCTION, "max", keeps="choice", result="largest"),
    *named(REDUCTION, "min", keeps="choice", result="least"),
    *named(REDUCTION, "median", keeps="choice", fusion="apart"),
    *named(REDUCTION, "prod", keeps="both", fusion="products", autocast="float32"),
    *named(
        REDUCTION,
        "linalg_vector_norm norm",
        rule=reduces(2, is_sum=False),
        keeps="both",
        autocast="float32",
    ),
    TOTAL,
    *named(TOTAL, "mean", result="", is_inline=True),
    *named(SCAN, "cumprod", autocast="float32"),
    *named(SCAN, "logcumsumexp", keeps="both"),
    *named(
        SCAN, "cumsum", rule=along(1, None, is_linear=True), keeps="nothing", autocast="float32"
    ),
    SORT,
    *named(SORT, "argsort", keeps="input"),
    *named(SORT, "cummax", rule=along(1, None, is_linear=False)),
    *named(SORT, "topk", rule=along(2, -1, is_linear=False)),
    *named(LOSS, "huber_loss l1_loss mse_loss smooth_l1_loss soft_margin_loss"),
    *named(LOSS, "kl_div", keeps="rest"),
    *named(LOSS, "binary_cross_entropy", rule=elementwise_loss(3), loss=Loss(3, has_classes=False)),
    *named(
        LOSS,
        "binary_cross_entropy_with_logits",
        rule=elementwise_loss(4),
        loss=Loss(4, has_classes=False),
    ),
    *named(CLASS_LOSS, "nll_loss nll_loss_nd"),
    replace(
        CLASS_LOSS,
        name="cross_entropy_loss",
        reads="twice",
        keeps="rest",
        kept_bytes=_probability_bytes,
        fusion="groups",
        script="F.cross_entropy(2)",
    ),
    *_windows(POOL, "avg_pool{}"),
    *_windows(POOL, "adaptive_avg_pool{}", keeps="nothing"),
    *_windows(MAX_POOL, "max_pool{}", "{} => {}", fusion="apart"),
    *_windows(PLACES, "max_pool{}_with_indices", "{} => {}, {}"),
    *_windows(PLACES, "adaptive_max_pool{}", "{} => {}, {}"),
    *_windows(WINDOW, "reflection_pad{}"),
    *_windows(WINDOW, "replication_pad{}"),
    *_windows(NEAREST, "upsample_nearest{}", autocast="float32"),
    *_windows(WINDOW, "_upsample_nearest_exact{}", autocast="float32"),
    *named(RESIZED, "_upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_bicubic2d"),
    *named(RESIZED, "upsample_bilinear2d", keeps="nothing"),
    *named(RESIZED, "upsample_linear1d", rule=annotated("n c _ -> n c _")),
    *named(RESIZED, "upsample_trilinear3d", rule=annotated("n c _ _ _ -> n c _ _ _")),
    *named(WINDOW, "grid_sampler", rule=annotated("n c _ _, n _ _ _ => n c _ _")),
    *named(WINDOW, "im2col", rule=annotated("n _ _ _ -> n _ _")),
    *named(WINDOW, "col2im", rule=annotated("n _ _ -> n _ _ _")),
    *named(TRIANGLE, "tril triu"),
    *named(WINDOW, "glu", rule=along(1, -1, is_linear=False), script="F.{}()"),
    *named(WINDOW, "diff", rule=along(2, -1, is_linear=True), keeps="nothing"),
)
