"""Joint solution of runs of blocks of one family, from the tables of their kinds.

In: runs of one family, each kind's least cost by the layouts at its ends (``kind_tables``). Out:
for every run and every problem of a batch (ZeRO stages, prices of a byte) the least objective, and
the choices that attain it. The only variables left are the ends of the kinds and the parameters
that several blocks share; the number of times that a kind or an edge occurs is a factor of its
cost. So the work grows with kinds, not with blocks; the number of runs only makes arrays longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..kernels.recompute import BLOCK_MODES, ONCE
from ..stage.stage_model import CostRow, StageModel
from ..stage.stage_problem import Solution
from ..stage.structure import Run
from ..stage.terms import (
    MOST_CELLS,
    Axis,
    PlacedTerm,
    Side,
    TooWideError,
    byte_weights,
    time_weights,
)
from .elimination import BATCH_AXES, Eliminated, Factor, Floats, Ints, Order, eliminate, find_order
from .kind_tables import STATE_BYTES, KindTables, Rates


@dataclass
class Family:
    """Optimization problem of stages with the same kinds of blocks (planned alike) and the same
    values sent and received. Its variables are the layouts that blocks of a kind show to other
    blocks (the kind's ends), and the layouts of parameters used by several blocks."""

    model: StageModel
    kinds: dict[str, KindTables]
    sizes: list[int]
    place: dict[tuple[str, int], tuple[int, Ints]]
    first: dict[str, int]
    shared: tuple[str, ...]
    _terms: dict[CostRow, tuple[PlacedTerm, ...]] = field(default_factory=dict)
    _orders: dict[object, Order] = field(default_factory=dict)

    @staticmethod
    def of(model: StageModel, run: Run, kinds: dict[str, KindTables]) -> Family:
        """Build the optimization problem of ``run`` and all stages with its kinds of blocks."""
        sizes: list[int] = []
        place: dict[tuple[str, int], tuple[int, Ints]] = {}
        first: dict[str, int] = {}
        own = {kind: kinds[kind] for kind in run.counts}
        for kind, tables in own.items():
            first[kind] = len(sizes)
            for end in tables.ends:
                place[kind, end.decision] = (len(sizes), end.firsts)
                sizes.append(len(end.firsts))
        for name in run.shared:
            count = len(model.shared(name).choices)
            first[name] = len(sizes)
            place[name, 0] = (len(sizes), np.arange(count))
            sizes.append(count)
        return Family(model, own, sizes, place, first, run.shared)

    def _place(self, node: str) -> tuple[int, Ints]:
        """Return the variable that decides a node's layout, with the choice for each value."""
        structure = self.model.structure
        if structure.graph[node].kind == "parameter" and structure.is_shared(node):
            return self.place[node, 0]
        kind, _ = self.model.home(node)
        return self.place[kind, self.model.kind(kind).where[node]]

    def _axis(self, side: Side) -> Axis:
        """Return the variable that decides the class of a side of a term, with the class that each
        of its values means."""
        variable, choices = self._place(side.node)
        return variable, side.classes[choices]

    def _terms_of(self, row: CostRow) -> tuple[PlacedTerm, ...]:
        """Return the terms of an edge or boundary over the family's variables."""
        if row not in self._terms:
            self._terms[row] = tuple(term.placed(self._axis) for term in self.model.terms(row))
        return self._terms[row]

    def solve(self, runs: Sequence[Run], rates: Rates) -> Solved:
        """Return, for each of ``runs`` (stages of this family), the least seconds per micro-batch
        in every problem of ``rates`` (weights of seconds and bytes). Raises ``TooWideError`` if its
        tables would be too large."""
        tables = {kind: own.solve(rates) for kind, own in self.kinds.items()}
        own = {kind: found.table for kind, found in tables.items()}
        factors = self._factors(runs, rates, own)
        order = self._order(factors)
        if order.most_cells * len(runs) * len(rates.zeros) > MOST_CELLS and len(runs) > 1:
            half = len(runs) // 2
            return Solved.joined(self.solve(runs[:half], rates), self.solve(runs[half:], rates))
        if order.most_cells > MOST_CELLS:
            raise TooWideError
        found = eliminate(self.sizes, factors, order)
        shape = (len(runs), len(rates.zeros))
        least = np.broadcast_to(found.table, shape) + self.sync_seconds(runs, rates)
        return Solved(self, rates, least, ((len(runs), found, tables),))

    def bound(self, run: Run, ways: Sequence[Rates]) -> Floats:
        """Return a lower bound of the seconds per micro-batch of the stage ``run``, for each
        problem, if each block may use any recomputation mode of ``ways``. Raises ``TooWideError``.

        Values that recomputed blocks read from outside count only if all of ``ways`` recompute.
        """
        every = {
            kind: [own.solve(rates).table for rates in ways] for kind, own in self.kinds.items()
        }
        tables = {kind: np.minimum.reduce(own) for kind, own in every.items()}
        least = next((rates for rates in ways if rates.mode == "none"), ways[0])
        factors = self._factors((run,), least, tables)
        order = self._order(factors)
        if order.most_cells > MOST_CELLS:
            raise TooWideError
        found = eliminate(self.sizes, factors, order).table
        bound: Floats = np.broadcast_to(found, (1, len(least.zeros)))[0]
        whole: Floats = bound + self.sync_seconds((run,), least)[0]
        return whole

    def _factors(
        self, runs: Sequence[Run], rates: Rates, tables: Mapping[str, Floats]
    ) -> list[Factor]:
        factors = [self._weighted(kind, table, runs) for kind, table in tables.items()]
        kept = byte_weights([float(mode == rates.mode) for mode in BLOCK_MODES], 1)
        priced = ((rates.weights, np.ones(1)), (kept, rates.prices(saved=True)))
        for row, counts in self._counts(runs).items():
            for term in self._terms_of(row):
                for weights, prices in priced:
                    table = term.table(weights)
                    if table.any() and prices.any():
                        each = (table * _column(prices, table.ndim + 1))[None]
                        factors.append(Factor(term.scope, each * _column(counts, each.ndim)))
        factors += self._shared_parameters(rates)
        return factors

    def _counts(self, runs: Sequence[Run]) -> Mapping[CostRow, list[int]]:
        """Map each edge and boundary of ``runs`` to its number of occurrences in each of them."""
        every = [{**run.edges, **dict(self.model.boundaries(run))} for run in runs]
        rows = dict.fromkeys(row for own in every for row in own)
        return {row: [own.get(row, 0) for own in every] for row in rows}

    def _order(self, factors: Sequence[Factor]) -> Order:
        scopes = tuple(factor.scope for factor in factors)
        if scopes not in self._orders:
            self._orders[scopes] = find_order(self.sizes, scopes, ())
        return self._orders[scopes]

    def _weighted(self, kind: str, table: Floats, runs: Sequence[Run]) -> Factor:
        counts = _column([run.counts[kind] for run in runs], table.ndim)
        first = self.first[kind]
        return Factor(tuple(range(first, first + table.ndim - BATCH_AXES)), table * counts)

    def _shared_parameters(self, rates: Rates) -> list[Factor]:
        factors = []
        weights = time_weights(rates.seconds, ONCE)
        for name in self.shared:
            amounts = self.model.shared(name).amounts
            cost = amounts.weighted(weights, rates.zeros)
            states = amounts.weighted(STATE_BYTES, rates.zeros)
            cost = cost + rates.prices(saved=False)[:, None] * states
            factors.append(Factor((self.first[name],), cost[None]))
        return factors

    def sync_seconds(self, runs: Sequence[Run], rates: Rates) -> Floats:
        """Return, as ``[run, problem]``, seconds that no layout avoids: latencies of gradient sums,
        and waits for collectives."""
        least_wait, count = self.model.least_wait, rates.num_microbatches
        waits = [[least_wait(run, zero, count) for zero in rates.zeros] for run in runs]
        found: Floats = np.array(waits)
        for kind in self.kinds:
            counts = np.array([run.counts[kind] for run in runs], dtype=np.float64)
            constant = self.model.kind(kind).constant[list(rates.zeros)]
            found += counts[:, None] * (constant @ rates.seconds)
        return found

    def solutions(
        self, values: Ints, problems: Ints, tables: Mapping[str, Eliminated]
    ) -> Iterator[Solution]:
        """Yield the layout choices of every kind of block and shared parameter, given the values of
        the family's variables, ``values[solution, variable]``.

        ``problems``: index of each solution's problem; ``tables`` recover the choices inside each
        kind.
        """
        chosen: dict[str, list[tuple[int, ...]]] = {}
        for kind, own in tables.items():
            start = self.first[kind]
            ends = values[:, start : start + len(own.kept)]
            both, where = np.unique(np.column_stack([problems, ends]), axis=0, return_inverse=True)
            inside = own.recalled(both[:, 0], both[:, 1:])
            number = len(self.model.kind(kind).decisions)
            listed = [tuple(each) for each in inside[:, :number].tolist()]
            chosen[kind] = [listed[each] for each in where.ravel().tolist()]
        for name in self.shared:
            chosen[name] = [(each,) for each in values[:, self.first[name]].tolist()]
        for number in range(len(values)):
            yield {name: own[number] for name, own in chosen.items()}


def _column(counts: Sequence[int] | Floats, num_axes: int) -> Floats:
    """Return counts by stage as an array that multiplies tables whose first axis is the stage."""
    return np.array(counts, dtype=np.float64).reshape((-1,) + (1,) * (num_axes - 1))


Part = tuple[int, Eliminated, dict[str, Eliminated]]


@dataclass(frozen=True)
class Solved:
    """Solved stages of a family: ``least[run, problem]`` is the least objective; ``parts`` recover
    the choices that attain it."""

    family: Family
    rates: Rates
    least: Floats
    parts: tuple[Part, ...]

    def solutions(self) -> Iterator[Solution]:
        """Yield the distinct choices that attain the least objective of a stage in a problem."""
        for count, found, tables in self.parts:
            shape = (count, len(self.rates.zeros))
            problems = np.indices(shape)[1].ravel()
            distinct = np.unique(np.column_stack([problems, found.every(shape)]), axis=0)
            yield from self.family.solutions(distinct[:, 1:], distinct[:, 0], tables)

    @staticmethod
    def joined(first: Solved, second: Solved) -> Solved:
        least = np.concatenate([first.least, second.least])
        return Solved(first.family, first.rates, least, first.parts + second.parts)
