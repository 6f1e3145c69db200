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

from ..costs.seconds import HELD
from ..stage.assembly import Solution
from ..stage.stage_model import StageModel
from ..stage.structure import Edge, Run
from .elimination import BATCH_AXES, Eliminated, Factor, Floats, Ints, Order, eliminate, find_order
from .kind_tables import MOST_CELLS, KindTables, Link, Rates, TooWideError, edge_tables


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Cost of a value that one block makes and another reads. ``source``: the variable that decides
    its layout; ``held_bytes``: bytes that a recomputed reader keeps, by the variable's value."""

    link: Link | None
    source: int
    held_bytes: Floats


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
    _crossings: dict[Edge, _Crossing] = field(default_factory=dict)
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

    def crossing(self, edge: Edge) -> _Crossing:
        """Return the cost of a value that a block reads from another, by variables (layouts)."""
        if edge not in self._crossings:
            self._crossings[edge] = self._crossing(edge)
        return self._crossings[edge]

    def _crossing(self, edge: Edge) -> _Crossing:
        model = self.model
        maker = edge.name if edge.first is None else edge.first.node
        source, firsts = self._place(maker)
        options = model.source(edge)
        held = np.zeros(len(firsts))
        if edge.is_held:
            spec = model.spec(edge)
            sizes = [model.prices.local_bytes(spec, layout) for layout in options.layouts]
            held = np.array(sizes, dtype=np.float64)[options.of_choice[firsts]]
        tables = edge_tables(model, edge)
        if tables is None:
            return _Crossing(None, source, held)
        axes = []
        for node, classes in zip(tables.nodes, tables.classes, strict=True):
            variable, choices = self._place(node)
            axes.append((variable, classes[choices]))
        return _Crossing(Link(tables, tuple(axes)), source, held)

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
        factors += self._crossings_of(runs, rates)
        factors += self._boundaries_of(runs)
        factors += self._shared_parameters(rates)
        return factors

    def _order(self, factors: Sequence[Factor]) -> Order:
        scopes = tuple(factor.scope for factor in factors)
        if scopes not in self._orders:
            self._orders[scopes] = find_order(self.sizes, scopes, ())
        return self._orders[scopes]

    def _weighted(self, kind: str, table: Floats, runs: Sequence[Run]) -> Factor:
        counts = _column([run.counts[kind] for run in runs], table.ndim)
        first = self.first[kind]
        return Factor(tuple(range(first, first + table.ndim - BATCH_AXES)), table * counts)

    def _crossings_of(self, runs: Sequence[Run], rates: Rates) -> list[Factor]:
        factors = []
        saved = rates.prices(saved=True)
        for edge in dict.fromkeys(edge for run in runs for edge in run.edges):
            if edge.origin == "parameter" and edge.name not in self.first:
                continue
            own = self.crossing(edge)
            counts = [run.edges.get(edge, 0) for run in runs]
            if own.link is not None:
                factor = own.link.factor(rates.mode)
                table = factor.table * _column(counts, factor.table.ndim)
                factors.append(Factor(factor.scope, table))
            if rates.mode != "none" and edge.is_held and saved.any():
                held = saved[None, :, None] * own.held_bytes
                factors.append(Factor((own.source,), held * _column(counts, 3)))
        return factors

    def _boundaries_of(self, runs: Sequence[Run]) -> list[Factor]:
        """Return, as terms of the sum to minimize, the costs of values that each stage sends or
        receives, and of the loss."""
        counts = [dict(self.model.boundaries(run)) for run in runs]
        factors = []
        for boundary in dict.fromkeys(boundary for own in counts for boundary in own):
            variable, choices = self._place(boundary.node)
            seconds = boundary.seconds.sum(axis=1)[choices]
            column = _column([own.get(boundary, 0) for own in counts], 3)
            factors.append(Factor((variable,), seconds[None, None] * column))
        return factors

    def _shared_parameters(self, rates: Rates) -> list[Factor]:
        factors = []
        zeros = list(rates.zeros)
        for name in self.shared:
            decision = self.model.shared(name)
            cost = decision.seconds[zeros] @ rates.weights
            states = decision.states[zeros, :, HELD].sum(axis=2)
            cost = cost + rates.prices(saved=False)[:, None] * states
            factors.append(Factor((self.first[name],), cost[None]))
        return factors

    def sync_seconds(self, runs: Sequence[Run], rates: Rates) -> Floats:
        """Return, as ``[run, problem]``, seconds that no layout avoids: latencies of gradient sums,
        and waits for collectives."""
        least_wait, count = self.model.least_wait, rates.num_microbatches
        waits = [[least_wait(run, zero, count) for zero in rates.zeros] for run in runs]
        found: Floats = np.array(waits) * (1 - rates.exposed)
        for kind in self.kinds:
            counts = np.array([run.counts[kind] for run in runs], dtype=np.float64)
            own = [np.array(self.model.block_sync(kind, zero)) for zero in rates.zeros]
            found += counts[:, None] * (np.array(own) @ rates.weights)
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


def _column(counts: Sequence[int], num_axes: int) -> Floats:
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
