"""The meaning of a mask that is a conjunction of comparisons, without computing it.

A mask over long sequences has too many elements to evaluate: 65,536 positions make 4.3e9 of
them. Hugging Face models write it as ``mask[i, j] = a & b & ...`` where each term is a value
that holds everywhere or a comparison of a vector over rows with a vector over columns. Each
term then follows from its vectors: ``columns[j] <= rows[i]`` is causal if and only if, for
every row ``i``, the largest of ``columns[:i + 1]`` satisfies it and the smallest of
``columns[i + 1:]`` does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref
from ..programs.constants import evaluate_constants

Meaning: TypeAlias = Literal["causal", "all"]
"""Meaning of an attention mask. ``"causal"``: position i sees j if and only if j <= i. ``"all"``:
no position is hidden."""

Compare: TypeAlias = Callable[[Tensor, Tensor], Tensor]

CONJUNCTIONS = frozenset(
    {"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"}
)
COMPARISONS: Mapping[str, Compare] = {
    "aten.le.Tensor": operator.le,
    "aten.lt.Tensor": operator.lt,
    "aten.ge.Tensor": operator.ge,
    "aten.gt.Tensor": operator.gt,
    "aten.eq.Tensor": operator.eq,
}


def conjunction_meaning(
    graph: Graph, name: str, buffers: Mapping[str, Tensor], can_evaluate: Callable[[str], bool]
) -> Meaning | None:
    """Return the meaning of the boolean attention mask ``name``, a constant of shape (..., rows,
    columns): "causal", or "all" if it hides nothing. None if it is neither, or not a conjunction of
    known comparisons. Only constants for which ``can_evaluate`` is true are computed."""
    if graph[name].spec.shape[-2] != graph[name].spec.shape[-1]:
        return None

    def value(ref: Ref) -> Tensor:
        return evaluate_constants(graph, [ref.name], device="cpu", buffers=buffers)[ref.name]

    meanings: set[Meaning | None] = set()
    for term in _terms(graph, name):
        operands = [arg for arg in term.args if isinstance(arg, Ref)]
        if term.op in COMPARISONS and all(can_evaluate(ref.name) for ref in operands):
            left, right = map(value, operands)
            meanings.add(_comparison_meaning(COMPARISONS[term.op], left, right))
        elif can_evaluate(term.name):
            meanings.add("all" if bool(value(Ref(term.name)).all()) else None)
        else:
            return None
    if None in meanings:
        return None
    return "causal" if "causal" in meanings else "all"


def _terms(graph: Graph, name: str) -> Iterator[Node]:
    """Yield the nodes whose logical conjunction (broadcast) is the boolean mask ``name``."""
    node = graph[name]
    if node.op == "aten.expand.default" or node.op in CONJUNCTIONS:
        for ref in node.inputs:
            yield from _terms(graph, ref.name)
    else:
        yield node


def _comparison_meaning(compare: Compare, left: Tensor, right: Tensor) -> Meaning | None:
    """Return the meaning ("causal" or "all") of the mask ``compare(left, right)``, where ``left``
    and ``right`` are a vector over rows and a vector over columns; None if it is neither.

    >>> positions = torch.arange(4)
    >>> _comparison_meaning(operator.ge, positions[:, None], positions[None, :])
    'causal'
    >>> _comparison_meaning(operator.gt, positions[:, None] + 4, positions[None, :])
    'all'
    >>> _comparison_meaning(operator.gt, positions[:, None], positions[None, :])
    """
    matrices = [value.reshape(-1, *value.shape[-2:]) for value in (left, right)]
    if any(not torch.equal(each, each[:1].expand_as(each)) for each in matrices):
        return None  # it differs between sequences or heads
    left, right = (each[0] for each in matrices)
    if left.shape[-1] == 1 and right.shape[-2] == 1:
        rows, columns, holds = left[:, 0], right[0], compare
    elif left.shape[-2] == 1 and right.shape[-1] == 1:
        rows, columns, holds = right[:, 0], left[0], _swapped(compare)
    else:
        return None
    if all(bool(holds(rows, extreme).all()) for extreme in (columns.min(), columns.max())):
        return "all"
    seen = (columns.cummin(0).values, columns.cummax(0).values)
    backward = columns.flip(0)
    hidden = (backward.cummin(0).values.flip(0)[1:], backward.cummax(0).values.flip(0)[1:])
    if all(bool(holds(rows, extreme).all()) for extreme in seen) and not any(
        bool(holds(rows[:-1], extreme).any()) for extreme in hidden
    ):
        return "causal"
    return None


def _swapped(compare: Compare) -> Compare:
    return lambda left, right: compare(right, left)
