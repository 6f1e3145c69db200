"""Exact minimum of a sum of tables over few-valued variables, one variable at a time.

In: variables with a number of values each; factors, tables over a few of them. Out: for
every assignment of the kept variables the least sum over all others, and what they then are.
Eliminating v replaces the factors f_j that speak of it by

    g(rest) = min_v Σ_j f_j(v, rest)

(Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket elimination",
Artificial Intelligence 113, 1999). The work is the size of the tables g before the minimum:
small where the graph of the factors is nearly a chain, as a block of layers is.

Tables have two leading axes, for equal problems that differ in their figures only: each is
as long as there are such problems, or 1 where they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BATCH_AXES = 2


@dataclass(frozen=True, slots=True)
class Factor:
    """A table over the variables of ``scope``: ``table[a, b, values of the scope]``."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, slots=True)
class Order:
    """In which order variables go, and the cells of all tables that this takes."""

    variables: tuple[int, ...]
    num_cells: int
    most_cells: int


def find_order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], kept: Sequence[int]
) -> Order:
    """Greedily the variable whose table is the smallest; of equal ones the first.

    >>> find_order((2, 3, 4), ((0, 1), (1, 2)), ()).variables
    (0, 1, 2)
    """
    neighbours: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(scope)
    for variable, near in neighbours.items():
        near.discard(variable)
    cells = {v: _cells(sizes, v, near) for v, near in neighbours.items() if v not in set(kept)}
    found, total, most = [], 0, 0
    while cells:
        variable = min(cells, key=lambda each: (cells[each], each))
        size = cells.pop(variable)
        found.append(variable)
        total, most = total + size, max(most, size)
        near = neighbours.pop(variable)
        for other in near:
            neighbours[other] |= near
            neighbours[other] -= {other, variable}
        for other in near & cells.keys():
            cells[other] = _cells(sizes, other, neighbours[other])
    last = prod(sizes[variable] for variable in kept)
    return Order(tuple(found), total + last, max(most, last))


def _cells(sizes: Sequence[int], variable: int, near: set[int]) -> int:
    return prod((sizes[other] for other in near), start=sizes[variable])


@dataclass(frozen=True, slots=True)
class _Step:
    """The best value of a variable for every value of those that it met."""

    variable: int
    scope: tuple[int, ...]
    best: Ints


@dataclass(frozen=True, slots=True)
class Eliminated:
    """``table[a, b, values of kept]``: the least sums; ``steps`` lead back."""

    num_variables: int
    kept: tuple[int, ...]
    table: Floats
    steps: tuple[_Step, ...]

    def complete(self, at: tuple[int, int], values: Mapping[int, int]) -> tuple[int, ...]:
        """The value of every variable, given those of the kept ones, in the problem ``at``."""
        known = dict(values)
        for step in reversed(self.steps):
            index = tuple(known[other] for other in step.scope)
            known[step.variable] = int(step.best[(*_at(step.best, at), *index)])
        return tuple(known[variable] for variable in range(self.num_variables))

    def every(self, shape: tuple[int, int]) -> Ints:
        """The values of all variables in every problem, ``[a, b, variable]``; none is kept."""
        found = np.zeros((*shape, self.num_variables), dtype=np.int64)
        rows, columns = np.indices(shape)
        for step in reversed(self.steps):
            batch = (
                rows if step.best.shape[0] > 1 else 0,
                columns if step.best.shape[1] > 1 else 0,
            )
            index = tuple(found[..., other] for other in step.scope)
            found[..., step.variable] = step.best[(*batch, *index)]
        return found


def _at(table: NDArray[np.generic], at: tuple[int, int]) -> tuple[int, int]:
    """The place of a problem in a table that may be shorter along equal ones."""
    return tuple(0 if table.shape[axis] == 1 else each for axis, each in enumerate(at))  # type: ignore[return-value]


def eliminate(
    sizes: Sequence[int], factors: Sequence[Factor], order: Order, kept: Sequence[int] = ()
) -> Eliminated:
    """Minimizes over every variable of ``order``.

    >>> apart = Factor((0, 1), np.array([[[[0.0, 3.0], [3.0, 0.0]]]]))
    >>> first = Factor((0,), np.array([[[1.0, 0.0]]]))
    >>> second = Factor((1,), np.array([[[0.0, 2.0]]]))
    >>> found = eliminate((2, 2), (apart, first, second), find_order((2, 2), ((0, 1),), ()))
    >>> float(found.table[0, 0]), found.complete((0, 0), {})
    (1.0, (0, 0))
    """
    left = dict(enumerate(factors))
    by_variable: dict[int, set[int]] = {variable: set() for variable in range(len(sizes))}
    for index, factor in left.items():
        for variable in factor.scope:
            by_variable[variable].add(index)
    steps = []
    for number, variable in enumerate(order.variables, start=len(left)):
        indices = sorted(by_variable.pop(variable))
        met = [left.pop(index) for index in indices]
        scope = tuple(sorted({other for factor in met for other in factor.scope} - {variable}))
        total = _sum(met, (*scope, variable), sizes)
        best = total.argmin(axis=-1)
        least = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        steps.append(_Step(variable, scope, best))
        for other in scope:
            by_variable[other] = by_variable[other].difference(indices) | {number}
        left[number] = Factor(scope, least)
    kept = tuple(kept)
    return Eliminated(len(sizes), kept, _sum(list(left.values()), kept, sizes), tuple(steps))


def _sum(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]) -> Floats:
    """The sum of factors as one table over ``scope``, whole along every variable of it."""
    shape = tuple(sizes[variable] for variable in scope)
    if not factors:
        return np.zeros((1,) * BATCH_AXES + shape)
    aligned = sorted((_aligned(factor, scope) for factor in factors), key=lambda each: each.size)
    total: Floats = reduce(np.add, aligned)
    if total.shape[BATCH_AXES:] != shape:
        total = np.broadcast_to(total, (*total.shape[:BATCH_AXES], *shape))
    return total


def _aligned(factor: Factor, scope: tuple[int, ...]) -> Floats:
    """A factor's table with its axes in the places of ``scope``, 1 long where it has none."""
    own = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
    batch = range(BATCH_AXES)
    table = factor.table.transpose((*batch, *(BATCH_AXES + axis for axis in own)))
    present = set(factor.scope)
    sizes = iter(table.shape[BATCH_AXES:])
    shape = tuple(next(sizes) if variable in present else 1 for variable in scope)
    return table.reshape((*table.shape[:BATCH_AXES], *shape))
