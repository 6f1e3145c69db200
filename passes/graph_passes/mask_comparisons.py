"""The band of a mask that is a conjunction of comparisons, without computing the mask.

A mask over long sequences has too many elements to evaluate: 65,536 positions make 4.3e9 of
them. Hugging Face models write it as ``mask[i, j] = a & b & ...`` where each term is a value
that holds everywhere or a comparison of a vector over rows with a vector over columns. Each
term then follows from its vectors: ``columns[j] <= rows[i]`` is causal if and only if, for
every row ``i``, the largest of ``columns[:i + 1]`` satisfies it and the smallest of
``columns[i + 1:]`` does not. If both vectors count positions, any comparison is a band.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref
from ...planner.ops.case import argument, packet
from ...planner.ops.catalog import spec_of
from ..programs.constants import evaluate_constants


class Band(NamedTuple):
    """Positions that an attention mask lets position i see: from i - ``before`` to i + ``after``.
    None sets no limit."""

    before: int | None = None
    after: int | None = None


ALL, CAUSAL = Band(), Band(after=0)

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


def conjunction_band(
    graph: Graph, name: str, buffers: Mapping[str, Tensor], can_evaluate: Callable[[str], bool]
) -> Band | None:
    """Return the band of the boolean attention mask ``name``, a constant of shape (..., rows,
    columns); None if it is no band, or not a conjunction of known comparisons. Only constants for
    which ``can_evaluate`` is true are computed."""
    if graph[name].spec.shape[-2] != graph[name].spec.shape[-1]:
        return None

    def value(ref: Ref) -> Tensor:
        return evaluate_constants(graph, [ref.name], device="cpu", buffers=buffers)[ref.name]

    bands: list[Band] = []
    for term in terms(graph, name):
        operands = [arg for arg in term.args if isinstance(arg, Ref)]
        if term.op in COMPARISONS and all(can_evaluate(ref.name) for ref in operands):
            left, right = map(value, operands)
            found = comparison_band(COMPARISONS[term.op], left, right)
        else:
            is_all = can_evaluate(term.name) and bool(value(Ref(term.name)).all())
            is_whole = term.spec.shape[-2:] == graph[name].spec.shape[-2:]
            found = ALL if is_all else _triangle_band(graph, term) if is_whole else None
        if found is None:
            return None
        bands.append(found)
    return Band(least(band.before for band in bands), least(band.after for band in bands))


def _triangle_band(graph: Graph, node: Node) -> Band | None:
    """Return the band of a square of ones of which ``tril`` and ``triu`` keep parts with the
    diagonal; None for another node."""
    name, shape = packet(node.op), node.spec.shape
    if name == "ones" or (name == "full" and argument(node, 1, "fill_value") == 1):
        return ALL if shape[-1:] == shape[-2:-1] else None
    if not (name == "tril" or name == "triu"):
        return None
    whole = _triangle_band(graph, graph[node.inputs[0].name])
    diagonal = argument(node, 1, "diagonal", 0)
    after, before = (diagonal, None) if name == "tril" else (None, -diagonal)
    if whole is None or min(after or 0, before or 0) < 0:
        return None
    return Band(least((whole.before, before)), least((whole.after, after)))


def least(limits: Iterable[int | None]) -> int | None:
    """Return the least of the limits that are set; None if none is."""
    return min((limit for limit in limits if limit is not None), default=None)


def terms(graph: Graph, name: str) -> Iterator[Node]:
    """Yield the nodes whose logical conjunction (broadcast) is the boolean mask ``name``."""
    node = graph[name]
    if node.op == "aten.expand.default" or node.op in CONJUNCTIONS or _adds_dims(graph, node):
        for ref in node.inputs:
            yield from terms(graph, ref.name)
    else:
        yield node


def _adds_dims(graph: Graph, node: Node) -> bool:
    """Return whether a node adds dimensions of size 1 before the rows and columns of a mask."""
    if not node.inputs or spec_of(node).form != "reshape":
        return False
    shapes = [graph.spec(node.inputs[0]).shape, node.spec.shape]
    sizes = [[size for size in shape[:-2] if size != 1] for shape in shapes]
    return shapes[0][-2:] == shapes[1][-2:] and len(shapes[0]) > 1 and sizes[0] == sizes[1]


def comparison_band(compare: Compare, left: Tensor, right: Tensor) -> Band | None:
    """Return the band of the mask ``compare(left, right)``, where ``left`` and ``right`` are a
    vector over rows and a vector over columns; None if it is no band.

    >>> positions = torch.arange(4)
    >>> comparison_band(operator.ge, positions[:, None], positions[None, :]) == CAUSAL
    True
    >>> comparison_band(operator.gt, positions[:, None] + 4, positions[None, :]) == ALL
    True
    >>> comparison_band(operator.gt, positions[None, :], positions[:, None] - 2)
    Band(before=1, after=None)
    """
    matrices = [value.reshape(-1, *((1, *value.shape)[-2:])) for value in (left, right)]
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
        return ALL
    earlier = (columns.cummin(0).values, columns.cummax(0).values)
    backward = columns.flip(0)
    hidden = (backward.cummin(0).values.flip(0)[1:], backward.cummax(0).values.flip(0)[1:])
    if all(bool(holds(rows, extreme).all()) for extreme in earlier) and not any(
        bool(holds(rows[:-1], extreme).any()) for extreme in hidden
    ):
        return CAUSAL
    places = torch.arange(len(rows))
    if not all(torch.equal(each - each[0], places) for each in (rows, columns)):
        return None
    ahead = torch.arange(1 - len(rows), len(rows))  # j - i says whether j is seen from i
    seen = ahead[holds(rows[0], columns[0] + ahead)]
    if not len(seen) or int(seen[-1] - seen[0]) + 1 != len(seen) or seen[0] > 0 or seen[-1] < 0:
        return None
    is_open = seen[0] == ahead[0], seen[-1] == ahead[-1]
    return Band(None if is_open[0] else -int(seen[0]), None if is_open[1] else int(seen[-1]))


def _swapped(compare: Compare) -> Compare:
    return lambda left, right: compare(right, left)
