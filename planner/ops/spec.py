"""The record of an op: each fact that planner, passes, profiler and scripts know about it.

A family of ops (``products``, ``attention``, ``elementwise``, ``reductions``, ``views``,
``indexing``) is a tuple of records. No fact has a default: the record of an op without special
facts, ``abs``, has all of them, and others derive from a similar op by the facts that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..graph.graph import Node
from .annotation import Pattern, Signature, parse
from .case import Case, Specs, annotate, letters_of

Family = Literal[
    "matmul", "attention", "conv", "norm", "elementwise", "copy", "reduction", "embedding", "view"
]
Keeps = Literal[
    "nothing",
    "input",
    "inputs",
    "rest",
    "output",
    "both",
    "indices",
    "others",
    "choice",
    "condition",
    "division",
    "interpolation",
    "power",
    "written",
]
"""Tensors that a backward reads. ``rest``: all inputs but the first. ``both``: inputs and output.
``indices``: the second output. ``others``: for the gradient of a factor the other factor.
``choice``: inputs and result, or only the indices if the op returns them. ``condition``: the first
input. ``division`` and ``power``: inputs and result, by the wanted gradients. ``interpolation``:
all inputs if the weight is a tensor. ``written``: neither the tensor written to nor the values."""

Form = Literal[
    "as_complex",
    "as_real",
    "expand",
    "fill",
    "move",
    "other",
    "pad",
    "repeat",
    "reshape",
    "same",
    "cut",
    "parts",
    "take",
]
"""Change of the entries of the first input: ``same`` keeps their order and shape, ``reshape`` their
order, ``move`` permutes dims, ``cut`` keeps a range of a dim, ``parts`` divides a dim, ``take``
removes a dim. ``fill``: all entries are equal."""

Memory = Literal["new", "ordered", "queries", "dense", "view"]
"""Memory of the outputs: ``new`` and row-major; new, with dims in the order of an input of equal
shape (``ordered``) or of ``queries``; the input's if it is ``dense``; the input's (``view``)."""

Fusion = Literal["any", "groups", "products", "apart"]
"""Kernels of a compiler that may contain the op: any; ``groups`` without matrix products; kernels
with ``products``; none but its own (``apart``)."""

Autocast = Literal["float32", "inside", "lower", "as inputs"]
"""Dtype under autocast: float32; float32 ``inside`` of the kernel only; half precision (``lower``).
Source: aten/src/ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_PROMOTE)."""

Product = tuple[int, int, int, int]
"""Matrix product (batch, m, n, k) of m×k by k×n."""

Products = tuple[tuple[Product, ...], tuple[Product, ...]]
Change = tuple[int, str, Any]
"""An argument of an op with a new value: position, name, value."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of an op's layouts: the signature of a node, and texts for readers, its annotation and
    its splits. ``annotation`` is empty if it depends on arguments."""

    signature: Callable[[Case], Signature | None]
    annotation: str
    splits: str


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss with the position of its argument ``reduction``; ``has_classes`` if its second input
    holds indices of classes."""

    reduction: int
    has_classes: bool


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """Positions, among an op's arguments, of the data and of the weights whose gradients can be
    computed later than the gradient of the data."""

    data: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """Record of an op. ``name`` lacks namespace and overload; a function gets the node and the
    specs of its inputs and outputs, at local shapes.

    - Layouts: ``rule``; without a rule the op is never split.
    - Work: ``family``; ``flops`` in forward and backward, given the positions of wanted gradients;
      ``factors``, their positions in a product; ``product`` of factors of given shapes, or
      ``products`` if there are several; ``reads``, the memory that a forward reads (``rows``: only
      rows that are looked up; ``twice``: the first input twice; ``halves``: of balanced attention;
      ``steps``: in every step of ring attention, whose number also multiplies ``kernels``);
      ``kernels`` in forward and backward, in multiples of its family's; ``is_counted``, if random
      numbers are hashes of their positions.
    - Gradient: ``keeps``; ``kept_bytes`` besides inputs and outputs; ``is_costly``, if selective
      recomputation keeps the result; ``weight_gradient``, if it can be deferred.
    - Storage: ``form``; ``memory``; ``is_identity``, if a call returns its input; ``copies``, the
      number of factors that the op copies unless their strides allow to fold them into rows.
    - Kernels: ``fusion``; ``autocast``.
    - Parts: ``local``, the arguments that change with shapes; ``is_sized``, if they are sizes of
      the output.
    - Values: ``loss``; ``largest_index``, the exclusive upper bound of integer inputs.
    - Scripts: ``script``, the call (``{}`` is the name, ``(*)`` takes sizes without brackets,
      ``(3)`` takes three arguments by position); ``result``, a name for the result, or
      ``is_weighted``, if it is named after the module; ``is_inline``, if a call of one tensor is
      written inside of another expression.
    """

    name: str
    rule: Rule | None
    family: Family
    flops: Callable[[Node, Specs, Specs, Sequence[int]], tuple[int, int]]
    factors: tuple[int, ...]
    product: Callable[[Node, Sequence[tuple[int, ...]]], Product | None] | None
    products: Callable[[Node, Specs, Sequence[int]], Products] | None
    reads: Literal["inputs", "rows", "twice", "halves", "steps"]
    kernels: tuple[int, int]
    is_counted: bool
    keeps: Keeps
    kept_bytes: Callable[[Node, Specs, Specs], int]
    is_costly: bool
    weight_gradient: WeightGradient | None
    form: Form
    memory: Memory
    is_identity: Callable[[Node, Specs, Specs], bool]
    copies: int
    fusion: Fusion
    autocast: Autocast
    local: Callable[[Node, Specs, Specs], tuple[Change, ...]] | None
    is_sized: bool
    loss: Loss | None
    largest_index: Callable[[Node, Specs], int | None] | None
    script: str
    result: str
    is_weighted: bool
    is_inline: bool


def nothing_kept(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return 0, the bytes that an op keeps besides its inputs and outputs."""
    return 0


def never(node: Node, inputs: Specs, outputs: Specs) -> bool:
    """Return False: the op always changes its input."""
    return False


def named(base: OpSpec, names: str, **facts: Any) -> tuple[OpSpec, ...]:
    """Return a record for each name in ``names``: ``base`` with other ``facts``."""
    return tuple(replace(base, name=name, **facts) for name in names.split())


def statistic_bytes(outputs: Specs) -> int:
    """Return the bytes of a statistic that a kernel keeps, a number in float32 at least."""
    return max(4, outputs[0].itemsize)


def per_element(forward: int, backward: int) -> Callable[..., tuple[int, int]]:
    """Return a function of an op's FLOPs, given the FLOPs per element of its largest tensor."""

    def flops(node: Node, inputs: Specs, outputs: Specs, wanted: Sequence[int]) -> tuple[int, int]:
        elements = max(spec.numel for spec in [*inputs, *outputs])
        return forward * elements, backward * elements if wanted else 0

    return flops


def size_at(position: int) -> Callable[[Node, Specs, Specs], tuple[Change, ...]]:
    """Return a local form that sets the argument ``size`` to the shape of the output."""

    def local(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
        if node.op == "aten.view.dtype":
            return ()
        return ((position, "size", list(outputs[0].shape)),)

    return local


def annotated(annotation: str) -> Rule:
    """Return the rule of a fixed annotation (grammar: ``annotation``)."""
    return Rule(lambda case: annotate(case, annotation), annotation, describe_splits(annotation))


def by(signature: Callable[[Case], Signature | None]) -> Rule:
    """Return the rule of a function of the arguments, whose docstring describes its splits."""
    text = (signature.__doc__ or "").strip().splitlines()[0]
    return Rule(signature, "", text.replace("``", "").rstrip("."))


def along(position: int, default: int | None, *, is_linear: bool) -> Rule:
    """Return the rule of an op that works along dims and keeps them: any other dim may be split.

    ``position`` is that of its argument for the dims, ``default`` its default (None: required, or
    all dims).
    """

    def signature(case: Case) -> Signature:
        takes_dims = case.node.op.startswith(("aten.flip", "aten.roll"))
        letters = letters_of(
            case.rank, case.dims(position, "dims" if takes_dims else "dim", default)
        )
        terms = tuple((at,) for at in range(len(case.inputs))) if is_linear else ()
        return Signature((letters,) * len(case.inputs), (letters,) * len(case.outputs), terms)

    partial = "; passes partial sums" if is_linear else ""
    return Rule(
        signature,
        f"*a [dim] *c {'->' if is_linear else '=>'} *a [dim] *c",
        f"any dim but the one it works along{partial}",
    )


def reduces(position: int, *, is_sum: bool) -> Rule:
    """Return the rule of a reduction: a split reduced dim gives partial sums, or is not allowed."""

    def signature(case: Case) -> Signature | None:
        if case.node.op.split(".")[-1] == "other":  # of max and min: the larger of two tensors
            return annotate(case, "*, * => *")
        if len(case.inputs) != 1:
            return None
        has_dim = len(case.node.args) > 1 or "dim" in case.node.kwargs
        reduced = case.dims(position, "dim") if has_dim else tuple(range(case.rank))
        before = letters_of(case.rank, () if is_sum else reduced)
        terms = ((0,),) if is_sum else ()
        keeps_dims = len(case.outputs[0].shape) == case.rank
        after = tuple(
            None if dim in reduced else letter
            for dim, letter in enumerate(before)
            if keeps_dims or dim not in reduced
        )
        return Signature((before,), (after,) * len(case.outputs), terms, sums=is_sum)

    return Rule(
        signature,
        "*a dim *c -> *a *c" if is_sum else "*a [dim] *c => *a *c",
        "any dim; a reduced one gives partial sums" if is_sum else "any dim that stays",
    )


def describe_splits(annotation: str) -> str:
    """Describe the splits that an annotation offers on one mesh axis.

    >>> describe_splits("*b i, o i + o -> *b o")
    '*b, o; i gives partial sums; passes partial sums'
    """
    pattern = parse(annotation)
    kept, summed = _letters(pattern)
    parts = ["any dim" if kept == ["*"] else ", ".join(kept) if kept else ""]
    if summed and (pattern.terms or pattern.sums):
        parts.append(f"{', '.join(summed)} gives partial sums")
    if pattern.terms:
        parts.append("passes partial sums")
    return "; ".join(part for part in parts if part) or "nothing"


def _letters(pattern: Pattern) -> tuple[list[str], list[str]]:
    """Return the letters that every output has, and the letters missing in some output."""
    listed = dict.fromkeys(token for operand in pattern.inputs for token in operand if token != "_")
    kept = [token for token in listed if all(token in output for output in pattern.outputs)]
    return kept, [token for token in listed if token not in kept]
