"""Equations of ``einsum``, parsed into letters per operand."""

from __future__ import annotations

from collections.abc import Sequence

Names = tuple[str, ...]


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[tuple[Names, ...], Names]:
    """Return the names of the dimensions of each operand, and of the output.

    ``...`` stands for dimensions that align from the right; without ``->`` the output has the
    ellipsis and then, in alphabetical order, the letters that occur once.

    >>> parse_equation("...ij,jk", (3, 2))
    ((('0', 'i', 'j'), ('j', 'k')), ('0', 'i', 'k'))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    spread = [
        rank - len(text) + 3 if "..." in text else 0
        for text, rank in zip(operands, ranks, strict=True)
    ]
    widest = max(spread)
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    names = tuple(_names(text, count, widest) for text, count in zip(operands, spread, strict=True))
    return names, _names(right, widest, widest)


def _names(text: str, count: int, widest: int) -> Names:
    before, dots, after = text.partition("...")
    middle = tuple(str(at) for at in range(widest - count, widest)) if dots else ()
    return (*before, *middle, *after)
