"""All records of ops by name, the record of a node, and the list of layout rules for readers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..graph.graph import Node, OpRule
from . import attention, elementwise, indexing, products, reductions, views
from .annotation import Signature, bind
from .case import Case, Specs, argument, packet
from .elementwise import UNARY
from .spec import Family, OpSpec, annotated, describe_splits, named

UNKNOWN = replace(UNARY, name="", rule=None, memory="new")
"""Record of an op of torch that has none of its own. It is never split."""

CUSTOM = replace(UNKNOWN, keeps="inputs")
"""Record of an op of another library."""

CAST = (
    *named(
        UNKNOWN,
        "cdist cosine_embedding_loss cosine_similarity ctc_loss dist erfinv frobenius_norm "
        "hinge_embedding_loss linalg_matrix_norm linalg_matrix_sqrth linalg_norm "
        "margin_ranking_loss multi_margin_loss multilabel_margin_loss nll_loss2d nuclear_norm "
        "pdist poisson_nll_loss renorm triplet_margin_loss",
        autocast="float32",
    ),
    *named(UNKNOWN, "native_group_norm native_layer_norm _safe_softmax", autocast="inside"),
    *named(
        UNKNOWN,
        "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell "
        "_thnn_fused_lstm_cell addbmm addmv addr chain_matmul conv_tbc cudnn_convolution "
        "cudnn_convolution_transpose gru gru_cell linalg_multi_dot linalg_vecdot lstm lstm_cell "
        "prelu rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell",
        autocast="lower",
    ),
)
"""Ops of which only the dtype under autocast is known."""

SPECS: tuple[OpSpec, ...] = (
    *products.SPECS,
    *attention.SPECS,
    *elementwise.SPECS,
    *reductions.SPECS,
    *views.SPECS,
    *indexing.SPECS,
    *CAST,
)
BY_NAME = {spec.name: spec for spec in SPECS}


def spec_named(name: str) -> OpSpec:
    """Return the record of an op by its name without namespace and overload (``packet``)."""
    return BY_NAME.get(name, UNKNOWN if name else CUSTOM)


def is_pointwise(name: str) -> bool:
    """Return whether each entry of an op's result is known to depend on the same entry of its
    inputs alone.

    >>> is_pointwise("silu"), is_pointwise("add"), is_pointwise("softmax")
    (True, True, False)
    """
    rule = spec_named(name).rule
    if rule is None:
        return False
    return rule in (elementwise.SUM.rule, elementwise.QUOTIENT.rule) or (
        _POINTWISE.fullmatch(rule.annotation) is not None
    )


_POINTWISE = re.compile(r"[*+,\[\] ]+[-=]> \*")


def spec_of(node: Node) -> OpSpec:
    """Return the record of a node's op; the user's rule of an op replaces facts of its record."""
    name = packet(node.op)
    return spec_named(name) if node.rule is None else registered(name, node.rule)


@lru_cache(maxsize=1024)
def registered(name: str, rule: OpRule) -> OpSpec:
    """Return the record of an op that the user registered with a rule."""
    spec = replace(spec_named(name), rule=annotated(rule.annotation))
    of_shapes, kept_of_shapes = rule.flops, rule.saved_bytes

    def flops(node: Node, inputs: Specs, outputs: Specs, wanted: Sequence[int]) -> tuple[int, int]:
        if of_shapes is not None:
            forward = int(of_shapes(*(each.shape for each in inputs)))
        else:
            made = sum(each.numel for each in outputs)
            product = annotated_flops(rule.annotation, inputs, outputs)
            forward = product or max(made, inputs[0].numel)
        return forward, 2 * forward * bool(wanted)  # as for a product of two factors

    def kept_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
        assert kept_of_shapes is not None
        return int(kept_of_shapes(*(each.shape for each in inputs)))

    if kept_of_shapes is not None:
        spec = replace(spec, keeps="nothing", kept_bytes=kept_bytes)
    return replace(spec, flops=flops)


def annotated_flops(annotation: str, inputs: Specs, outputs: Specs) -> int:
    """Return the FLOPs of the product that an annotation with summed letters describes, else 0."""
    signature = bind(annotation, [s.shape for s in inputs], [s.shape for s in outputs])
    if signature is None or not signature.terms or len(inputs) < 2:
        return 0
    sizes: dict[str, int] = {}
    for letters, spec in zip(signature.inputs, inputs, strict=True):
        sizes |= {letter: size for letter, size in zip(letters, spec.shape, strict=True) if letter}
    kept = {letter for letters in signature.outputs for letter in letters}
    return 2 * prod(sizes.values()) if set(sizes) - kept else 0


def family_of(node: Node) -> Family:
    """Return the family of a node's op: "matmul", "norm", "view", …."""
    return spec_of(node).family


def has_classes(node: Node) -> bool:
    """Return whether a node is a loss whose second input holds indices of classes."""
    loss = spec_of(node).loss
    return loss is not None and loss.has_classes


def ignored_class(node: Node) -> int:
    """Return the class index that a classification loss ignores among its targets."""
    return int(argument(node, 4, "ignore_index", -100))


def signature_of(case: Case) -> Signature | None:
    """Return the signature of a node; None if it has no rule that applies."""
    rule = spec_of(case.node).rule
    return rule.signature(case) if rule is not None and case.inputs and case.outputs else None


def has_rule(op: str) -> bool:
    """Return whether an op has a rule, without which it is never split.

    >>> has_rule("aten.linear.default"), has_rule("aten.svd.default")
    (True, False)
    """
    return spec_named(packet(op)).rule is not None


@dataclass(frozen=True, slots=True)
class RuleText:
    """Texts about an op's rule. ``annotation`` is empty if it depends on arguments: see
    ``splits``."""

    op: str
    annotation: str
    splits: str


def list_rules(given: Mapping[str, OpRule] | None = None) -> tuple[RuleText, ...]:
    """Return the rules of all ops, by name; ``given`` has the user's rules by op path."""
    found = [
        RuleText(spec.name, spec.rule.annotation.strip(), spec.rule.splits)
        for spec in SPECS
        if spec.rule is not None
    ]
    for path, rule in (given or {}).items():
        found.append(RuleText(path, rule.annotation, describe_splits(rule.annotation)))
    return tuple(sorted(found, key=lambda each: each.op))
