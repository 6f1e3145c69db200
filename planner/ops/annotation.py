"""Dimension annotations: one line of text tells which dimensions of an op's tensors correspond.

::

    "*b i, o i + o -> *b o"          linear: a product, plus a bias
    "[*b q _], [*b _ _], *b _ _ => *b q _"   attention

- a letter names a dimension; ``*b`` stands for any leading dimensions, broadcast from the
  right as torch does; ``_`` is a dimension that is never split;
- ``,`` joins the factors of a product and ``+`` the terms of a sum, in call order; an
  operand in ``[]`` only conditions the result (a mask, indices, a divisor);
- ``->``: linear in each factor, so a letter that the output lacks is summed over, and
  partial sums pass through; ``=>``: any function; ``=>+``: any function, summed over the
  letters that the output lacks.

Trailing operands may be absent (an optional bias), and an operand of lower rank lacks the
leftmost dimensions of its annotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..graph.layout import InnerCollective

Letters = tuple[str | None, ...]
Shape = tuple[int, ...]

FLOATS = frozenset(
    (
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    )
)
"""Dtypes of tensors that may be partial sums."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Correspondence of the dimensions of one node's tensors: dimensions with the same letter are
    split together.

    ``inputs`` and ``outputs`` have a letter per dimension, None if it is never split. ``terms``:
    the op is a sum of products of the inputs at these positions (empty: not linear). ``sums``:
    letters missing in an output are summed over although the op is not linear. ``inner``: the
    collectives that the op needs when a letter is split. ``invariant``: the letters that these
    collectives reduce entirely, so that outputs without them are whole, not partial. ``groups``:
    letters that can only be cut between groups, with the number of groups.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    terms: tuple[tuple[int, ...], ...] = ()
    sums: bool = False
    inner: Mapping[str, tuple[InnerCollective, ...]] = field(default_factory=dict)
    invariant: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Parsed annotation, before it is bound to shapes: letters of each input and output; ``terms``
    and ``sums`` as in ``Signature``."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    terms: tuple[tuple[int, ...], ...]
    sums: bool


@lru_cache(maxsize=1024)
def parse(annotation: str) -> Pattern:
    """Parse an annotation into a pattern.

    >>> parse("*b i, o i + o -> *b o").terms
    ((0, 1), (2,))
    """
    arrow = next(arrow for arrow in ("=>+", "=>", "->") if arrow in annotation)
    left, right = annotation.split(arrow)
    inputs: list[tuple[str, ...]] = []
    terms: list[tuple[int, ...]] = []
    for term in left.split("+"):
        factors = []
        for operand in term.split(","):
            if not operand.strip().startswith("["):
                factors.append(len(inputs))
            inputs.append(tuple(operand.strip(" []").split()))
        terms.append(tuple(factors))
    return Pattern(
        inputs=tuple(inputs),
        outputs=tuple(tuple(output.split()) for output in right.split(",")),
        terms=tuple(term for term in terms if term) if arrow == "->" else (),
        sums=arrow == "=>+",
    )


def bind(annotation: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Signature | None:
    """Return the signature of an annotation for tensors of these shapes; None if it does not fit.

    >>> bind("*b i, o i -> *b o", [(4, 8), (6, 8)], [(4, 6)]).inputs
    (('b0', 'i'), ('o', 'i'))
    """
    pattern = parse(annotation)
    if len(inputs) > len(pattern.inputs) or len(outputs) > len(pattern.outputs):
        return None
    tokens = pattern.inputs[: len(inputs)] + pattern.outputs[: len(outputs)]
    shapes = [*inputs, *outputs]
    group_rank = max(
        (
            len(shape) - len(names) + 1
            for names, shape in zip(tokens, shapes, strict=True)
            if names and names[0].startswith("*")
        ),
        default=0,
    )
    letters: list[list[str | None]] = []
    for names, shape in zip(tokens, shapes, strict=True):
        found = _letters(names, len(shape), group_rank)
        if found is None:
            return None
        letters.append(found)
    _drop_broadcast(letters, shapes)
    return Signature(
        inputs=tuple(tuple(found) for found in letters[: len(inputs)]),
        outputs=tuple(tuple(found) for found in letters[len(inputs) :]),
        terms=_present(pattern.terms, len(inputs)),
        sums=pattern.sums,
    )


def output_shapes(annotation: str, inputs: Sequence[Shape]) -> tuple[Shape, ...] | None:
    """Return the shapes of an op's outputs; None if an output has a dimension that no input has.

    >>> output_shapes("*b i, o i -> *b o", [(4, 8), (6, 8)])
    ((4, 6),)
    """
    pattern = parse(annotation)
    bound = bind(annotation, inputs, ())
    if bound is None:
        return None
    sizes: dict[str, int] = {}
    for names, shape in zip(bound.inputs, inputs, strict=True):
        sizes |= {name: size for name, size in zip(names, shape, strict=True) if name}
    group = [len(s) - len(t) + 1 for t, s in zip(pattern.inputs, inputs, strict=False) if _group(t)]
    found = []
    for names in pattern.outputs:
        letters = _letters(
            names,
            max(group, default=0) * _group(names) + len(names) - _group(names),
            max(group, default=0),
        )
        if letters is None or any(letter not in sizes for letter in letters):
            return None
        found.append(tuple(sizes[letter] for letter in letters if letter is not None))
    return tuple(found)


def _group(names: tuple[str, ...]) -> bool:
    return bool(names) and names[0].startswith("*")


def _present(terms: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[int, ...], ...]:
    kept = (tuple(position for position in term if position < count) for term in terms)
    return tuple(term for term in kept if term)


def _letters(names: tuple[str, ...], rank: int, group_rank: int) -> list[str | None] | None:
    """Return the letters of a tensor's ``rank`` dimensions, matched from the right, or None."""
    spread: list[str | None] = []
    for name in names:
        if name.startswith("*"):
            spread += [f"{name[1:] or 'd'}{index}" for index in range(group_rank)]
        else:
            spread.append(None if name == "_" else name)
    if rank > len(spread):
        return None
    return spread[len(spread) - rank :]


def _drop_broadcast(letters: list[list[str | None]], shapes: Sequence[Shape]) -> None:
    """Remove the letters of dimensions of size 1 that broadcast to a larger dimension."""
    largest: dict[str, int] = {}
    for names, shape in zip(letters, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            if name is not None:
                largest[name] = max(size, largest.get(name, 0))
    for names, shape in zip(letters, shapes, strict=True):
        for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
            if name is not None and size == 1 and largest[name] > 1:
                names[dim] = None
