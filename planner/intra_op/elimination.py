"""Exact minimum of a sum of tables over few-valued variables, by variable elimination.

In: variables with a number of values each; factors, which are tables over a few variables. Out: for
every assignment of the kept variables the minimum over all others, and their values. Eliminating v
replaces the factors f_j that contain it by

    g(rest) = min_v Σ_j f_j(v, rest)

(Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket elimination",
Artificial Intelligence 113, 1999). The work is the total size of the tables g before the minimum:
it is small if the graph of the factors is nearly a chain, as a block of layers is.

Tables have two leading axes for a batch of problems that differ only in numbers; an axis has length
1 if all problems agree along it.

The best value of v is not stored for every assignment, which would take longer than the minimum
itself; it is recomputed from the factors for the few assignments that are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BATCH_AXES = 2


@dataclass(frozen=True, slots=True)
class Factor:
    """Term of the sum to minimize, over the variables ``scope``. ``table[a, b, values of the
    scope]``: a and b number the problems of a batch."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, slots=True)
class Order:
    """Order in which to eliminate variables, with the total and the largest number of elements of
    the tables that this makes."""

    variables: tuple[int, ...]
    num_cells: int
    most_cells: int


def find_order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], kept: Sequence[int]
) -> Order:
    """Return the greedy order of all variables but ``kept``: next is the variable whose elimination
    makes the smallest table, the first of equals. ``sizes``: numbers of values; ``scopes``:
    variables of each factor.

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
    """An eliminated variable, and the terms of the sum that contained it (``met``)."""

    variable: int
    met: tuple[Factor, ...]

    def best(self, rows: Ints, columns: Ints, known: Ints, size: int) -> Ints:
        """Return the variable's best value in each assignment. ``known[assignment, variable]`` has
        the values of variables eliminated later; ``rows`` and ``columns``, ``[assignment, 1]``,
        have each assignment's problem in the batch."""
        total = np.zeros((len(known), size))
        values = np.arange(size)
        for factor in self.met:
            num_rows, num_columns = factor.table.shape[:BATCH_AXES]
            index = (
                values if other == self.variable else known[:, other, None]
                for other in factor.scope
            )
            batch = (rows if num_rows > 1 else 0, columns if num_columns > 1 else 0)
            total += factor.table[(*batch, *index)]
        found: Ints = total.argmin(axis=1)
        return found


@dataclass(frozen=True, slots=True)
class Eliminated:
    """Result of an elimination: minima ``table[a, b, values of kept variables]`` in problem (a, b)
    of a batch; ``steps`` recover the values of the other variables.

    After ``in_a_row``, which flattens the batch, ``num_columns`` is the former row length.
    """

    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    table: Floats
    steps: tuple[_Step, ...]
    num_columns: int = 0
    _known: dict[tuple[int, ...], Ints] = field(default_factory=dict, init=False, compare=False)

    def in_a_row(self, num_rows: int, num_columns: int) -> Eliminated:
        """Return the same result, with the batch's ``num_rows`` × ``num_columns`` problems reshaped
        to one row."""
        rest = self.table.shape[BATCH_AXES:]
        whole = np.broadcast_to(self.table, (num_rows, num_columns, *rest))
        table = whole.reshape(1, num_rows * num_columns, *rest)
        return replace(self, table=table, num_columns=num_columns)

    def complete(self, rows: Ints, columns: Ints, values: Ints) -> Ints:
        """Return the best values of all variables, ``[assignment, variable]``, given the kept
        variables' values, ``[assignment, kept]``, in the problems (``rows``, ``columns``) of the
        batch."""
        found = np.zeros((len(rows), len(self.sizes)), dtype=np.int64)
        found[:, list(self.kept)] = values
        if self.num_columns:
            rows, columns = np.divmod(columns, self.num_columns)
        at = rows[:, None], columns[:, None]
        for step in reversed(self.steps):
            found[:, step.variable] = step.best(*at, found, self.sizes[step.variable])
        return found

    def recalled(self, columns: Ints, values: Ints) -> Ints:
        """Return the best values of all variables, ``[assignment, variable]``, given the kept
        variables' ``values``, for problems of the batch's first row. Cached."""
        keys = [tuple(each) for each in np.column_stack([columns, values]).tolist()]
        new = [number for number, key in enumerate(keys) if key not in self._known]
        if new:
            found = self.complete(np.zeros(len(new), dtype=np.int64), columns[new], values[new])
            self._known.update(zip((keys[number] for number in new), found, strict=True))
        return np.array([self._known[key] for key in keys])

    def every(self, shape: tuple[int, int]) -> Ints:
        """Return the best values of all variables in every problem of a batch of this shape, row by
        row; no variable may be kept."""
        rows, columns = (each.ravel() for each in np.indices(shape))
        return self.complete(rows, columns, np.zeros((len(rows), 0), dtype=np.int64))


@dataclass
class Memo:
    """Cache of eliminations of a variable, by the terms of the sum (factors) that contain it. Only
    terms that were registered by ``note`` are cached."""

    noted: dict[int, Factor] = field(default_factory=dict)
    steps: dict[tuple[int, ...], tuple[_Step, Factor]] = field(default_factory=dict)

    def note(self, factor: Factor) -> Factor:
        """Register a term of the sum that several problems will contain, and return it."""
        self.noted[id(factor)] = factor
        return factor

    def step(self, planned: _Planned, met: tuple[Factor, ...]) -> tuple[_Step, Factor]:
        """Eliminate a variable from the terms ``met`` that contain it; return the step and the new
        term. Cached."""
        key = (planned.variable, *map(id, met))
        found = self.steps.get(key)
        if found is None:
            found = planned.eliminate(met)
            if all(each in self.noted for each in key[1:]):
                self.steps[key] = found
                self.note(found[1])
        return found


_Places = tuple[tuple[int, ...] | None, tuple[slice | None, ...] | None]
"""Permutation that sorts the axes of a term's table as in a scope (None if sorted), and an index
that inserts axes of absent variables (None if there are none)."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """Plan of the elimination of a variable, whatever the numbers in the tables.

    ``met``: indices of the terms that contain the variable; ``scope``: variables of the new term;
    ``places``: alignment of each of the terms with the variable followed by the ``scope``.
    """

    variable: int
    met: tuple[int, ...]
    scope: tuple[int, ...]
    places: tuple[_Places, ...]

    def eliminate(self, met: tuple[Factor, ...]) -> tuple[_Step, Factor]:
        """Return the step, and the new term: the minimum of the sum of the terms ``met`` over the
        variable."""
        total = _added([_placed(each, own) for each, own in zip(met, self.places, strict=True)])
        least = np.minimum.reduce(total, axis=BATCH_AXES)
        return _Step(self.variable, met), Factor(self.scope, least)


@lru_cache(maxsize=1 << 12)
def _planned(
    variables: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], kept: tuple[int, ...]
) -> tuple[tuple[_Planned, ...], tuple[tuple[int, _Places], ...]]:
    """Plan the elimination of ``variables``, one after the other, from a sum of terms over the
    variables ``scopes``. Return a plan for each, and the terms that are left in the end: index, and
    alignment with the variables ``kept``.

    Terms are numbered: first the given ones, then each new one.
    """
    left = dict(enumerate(scopes))
    found = []
    for number, variable in enumerate(variables, start=len(scopes)):
        met = tuple(index for index, scope in left.items() if variable in scope)
        own = [left.pop(index) for index in met]
        scope = tuple(sorted({other for each in own for other in each} - {variable}))
        places = tuple(_places(each, (variable, *scope)) for each in own)
        found.append(_Planned(variable, met, scope, places))
        left[number] = scope
    return tuple(found), tuple((index, _places(scope, kept)) for index, scope in left.items())


def _places(own: tuple[int, ...], scope: tuple[int, ...]) -> _Places:
    """Return the alignment of a table over the variables ``own`` with the variables ``scope``: an
    axis for each, of length 1 if the table lacks it."""
    if own == scope:
        return None, None
    order = sorted(range(len(own)), key=lambda axis: scope.index(own[axis]))
    is_ordered = order == list(range(len(own)))
    axes = (*range(BATCH_AXES), *(BATCH_AXES + axis for axis in order))
    index = tuple(slice(None) if variable in own else None for variable in scope)
    return None if is_ordered else axes, (slice(None),) * BATCH_AXES + index


def eliminate(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    order: Order,
    kept: Sequence[int] = (),
    memo: Memo | None = None,
) -> Eliminated:
    """Minimize the sum of ``factors`` over the variables of ``order``, for all values of ``kept``.
    ``sizes``: number of values of each variable. ``memo``: cache that serves this order only.

    >>> apart = Factor((0, 1), np.array([[[[0.0, 3.0], [3.0, 0.0]]]]))
    >>> first = Factor((0,), np.array([[[1.0, 0.0]]]))
    >>> second = Factor((1,), np.array([[[0.0, 2.0]]]))
    >>> found = eliminate((2, 2), (apart, first, second), find_order((2, 2), ((0, 1),), ()))
    >>> float(found.table[0, 0]), found.every((1, 1)).tolist()
    (1.0, [[0, 0]])
    """
    kept = tuple(kept)
    scopes = tuple(factor.scope for factor in factors)
    planned, left = _planned(order.variables, scopes, kept)
    terms, steps, memo = list(factors), list[_Step](), memo or Memo()
    for each in planned:
        step, term = memo.step(each, tuple(terms[index] for index in each.met))
        steps.append(step)
        terms.append(term)
    shape = tuple(sizes[variable] for variable in kept)
    tables = [_placed(terms[index], places) for index, places in left]
    table = _added(tables) if tables else np.zeros((1,) * (BATCH_AXES + len(kept)))
    if table.shape[BATCH_AXES:] != shape:
        table = np.broadcast_to(table, (*table.shape[:BATCH_AXES], *shape))
    return Eliminated(tuple(sizes), kept, table, tuple(steps))


def _added(tables: list[Floats]) -> Floats:
    """Return the sum of aligned tables; the smallest are added first."""
    tables.sort(key=_size)
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


def _size(table: Floats) -> int:
    return table.size


def _placed(factor: Factor, places: _Places) -> Floats:
    """Return a term's table with its axes as ``places`` says."""
    axes, index = places
    table = factor.table if axes is None else factor.table.transpose(axes)
    return table if index is None else table[index]
