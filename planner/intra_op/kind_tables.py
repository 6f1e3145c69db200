"""Least cost of a kind of block for every combination of layouts at its ends.

In: a kind's tables on a mesh, and the weights of seconds and bytes. Out: for every combination of
layouts at the block's ends (values that it reads from other blocks, and values that they read) the
least cost of its inside, with the choices that attain it. A run of blocks then is a small problem
over the ends alone (``families``), however many blocks and runs there are. It is exact, as only the
ends connect a block to others.

With a Lagrange multiplier λ per byte, costs include memory that adds up by decision: states, and
the storages that autograd keeps, each counted with the first decision that keeps it. This is at
most the memory of the block, so the least cost is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..costs.kept_bytes import RECOMPUTE_MODES
from ..costs.price_cache import find
from ..costs.seconds import HELD, STEP, objective_weights
from ..integer_programs.program import classes_of
from ..plan import Recompute
from ..stage.stage_model import KindModel, StageModel
from ..stage.structure import Edge
from .elimination import Eliminated, Factor, Floats, Ints, Memo, Order, eliminate, find_order

MOST_CELLS = 4_000_000
"""Maximum elements of a cost table; the integer program solves problems with larger tables."""


MOST_SOLVED = 12
"""Maximum weights (``Rates``) for which a kind's solutions are cached, as their tables are
large."""


class TooWideError(Exception):
    """Signal that cost tables would be too large; always caught inside the planner."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Weights of seconds and bytes for a batch of problems, one per entry of ``zeros`` (ZeRO
    stages).

    ``state_prices``: seconds per byte of states; ``saved_prices``: per byte that one micro-batch
    keeps for its backward (times micro-batches in flight). All blocks use recomputation ``mode``.
    ``exposed``: fraction of gathers and gradient sums that compute does not hide; ``shares_links``:
    whether they slow other collectives. With ``any_zero`` each decision takes its own best ZeRO
    stage, and the problems form one row.
    """

    num_microbatches: int
    zeros: tuple[int, ...]
    mode: Recompute = "none"
    state_prices: tuple[float, ...] = ()
    saved_prices: tuple[float, ...] = ()
    any_zero: bool = False
    exposed: float = 0.0
    shares_links: bool = True

    @property
    def weights(self) -> Floats:
        """Return the weight of a second of each ``Resource`` in the seconds per micro-batch."""
        return objective_weights(
            self.num_microbatches, exposed=self.exposed, shares_links=self.shares_links
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of rows (ZeRO stages) and columns (prices of a byte) of the batch.

        If the problems are not all pairs of a ZeRO stage and a price, every problem is a row.
        """
        rows = dict.fromkeys(self.zeros)
        columns = len(self.zeros) // len(rows)
        stages = tuple(zero for zero in rows for _ in range(columns))
        each = (self.state_prices, self.saved_prices)
        alike = all(own == own[:columns] * len(rows) for own in each if own)
        return (len(rows), columns) if alike and stages == self.zeros else (len(self.zeros), 1)

    def prices(self, saved: bool) -> Floats:
        """Return each problem's price per byte: of kept activations (``saved``) or of states."""
        given = self.saved_prices if saved else self.state_prices
        return np.array(given or (0.0,) * len(self.zeros))


@dataclass(frozen=True, slots=True)
class End:
    """Decision of a block (nodes laid out together) whose layouts other blocks see. ``classes``:
    for each choice a number, equal if these layouts are equal; ``firsts``: first choice of each
    class."""

    decision: int
    classes: Ints
    firsts: Ints


@dataclass(frozen=True, slots=True)
class EdgeTables:
    """Seconds of converting a value that a block reads, ``[class, class]``: by the class of layouts
    in which it is made and in which it is used.

    ``nodes`` and ``classes`` (class by choice) are of the maker first, then of each use.
    ``repeats``: for each of ``RECOMPUTE_MODES``, whether a recomputed block repeats the conversion.
    """

    nodes: tuple[str, ...]
    classes: tuple[Ints, ...]
    forward: Floats
    backward: Floats
    repeats: tuple[bool, bool]

    def is_repeated(self, mode: Recompute) -> bool:
        """Return whether blocks recomputed by ``mode`` run the forward conversion again."""
        return mode in RECOMPUTE_MODES and self.repeats[RECOMPUTE_MODES.index(mode)]

    def seconds(self, *, twice: bool) -> Floats:
        """Return the forward seconds (two times with ``twice``) plus the backward seconds."""
        both: Floats = self.forward * (1.0 + twice) + self.backward
        return both


def edge_tables(model: StageModel, edge: Edge) -> EdgeTables | None:
    """Return the seconds of converting a value that a block reads; None if it costs nothing.

    Raises ``TooWideError`` if a table over the maker and all uses would be too large.
    """
    merged = model.merged(edge)
    if not merged.forward.any() and not merged.backward.any():
        return None
    maker = edge.name if edge.first is None else edge.first.node
    distinct: dict[tuple[str, bytes], tuple[str, Ints]] = {}
    for use, classes in zip(edge.uses, merged.uses, strict=True):
        owner, decision = model.home(use.node)
        distinct.setdefault((f"{owner}/{decision.name}", classes.tobytes()), (use.node, classes))
    sides = list(distinct.values())
    num_rows, num_targets = merged.forward.shape
    if num_rows * num_targets ** len(sides) > MOST_CELLS:
        raise TooWideError
    return EdgeTables(
        (maker, *(node for node, _ in sides)),
        (merged.source, *(classes for _, classes in sides)),
        merged.forward,
        merged.backward,
        model.repeats(edge),
    )


def conversion_table(
    matrix: Floats, axes: Sequence[tuple[int, Ints]]
) -> tuple[tuple[int, ...], Floats]:
    """Return (variables, table over them): the cost of converting a value for all of its uses.

    ``matrix[source class, use class]`` has the costs. ``axes``: first for the source, then for each
    use, its variable and the class that each value of the variable means. Equal conversions count
    once; a variable that occurs several times has one axis.

    >>> one, both = np.array([0]), np.arange(2)
    >>> conversion_table(np.array([[1.0, 4.0]]), ((0, one), (1, both), (2, both)))[1].tolist()
    [[[1.0, 5.0], [5.0, 4.0]]]
    """
    scope = tuple(dict.fromkeys(variable for variable, _ in axes))
    source, *uses = (
        _along(scope.index(variable), classes, len(scope)) for variable, classes in axes
    )
    total = matrix[source, uses[0]]
    for number, use in enumerate(uses[1:], start=1):
        own = matrix[source, use]
        for earlier in uses[:number]:
            own = own * (earlier != use)
        total = total + own
    return scope, total


def _along(axis: int, classes: Ints, num_axes: int) -> Ints:
    shape = [1] * num_axes
    shape[axis] = len(classes)
    return classes.reshape(shape)


@dataclass(frozen=True)
class Link:
    """Cost of converting a value that a block reads, as a table over variables of an elimination.
    ``axes``: see ``conversion_table``."""

    tables: EdgeTables
    axes: tuple[tuple[int, Ints], ...]
    _factors: dict[bool, Factor] = field(default_factory=dict, repr=False)

    @property
    def scope(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(variable for variable, _ in self.axes))

    def factor(self, mode: Recompute) -> Factor:
        """Return the seconds of the conversion, in blocks recomputed by ``mode``, as a term of the
        sum to minimize."""
        twice = self.tables.is_repeated(mode)
        if twice not in self._factors:
            scope, table = conversion_table(self.tables.seconds(twice=twice), self.axes)
            self._factors[twice] = Factor(scope, table[None, None])
        return self._factors[twice]


@dataclass
class KindTables:
    """Cost tables of a kind of block on a mesh. ``solve`` minimizes over all choices but the
    layouts that other blocks see."""

    model: StageModel
    kind: str
    sizes: list[int] = field(default_factory=list)
    fixed: list[Factor] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    _variables: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _solved: dict[Rates, Eliminated] = field(default_factory=dict)
    _alike: dict[tuple[int, Recompute], Factor] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        self.sizes = [len(decision.choices) for decision in self.tables.decisions]
        for edge in (*self.tables.edges, *self.model.structure.own_parameter_edges(self.kind)):
            tables = edge_tables(self.model, edge)
            if tables is not None:
                self._add_link(tables)
        self.kept = tuple(self._variable(end.decision, end.classes) for end in self.ends)

    @staticmethod
    def of(model: StageModel, kind: str) -> KindTables:
        """Return the tables of a kind of block, from the cache if they are known."""
        known = model.prices.cache.kind_tables
        return model.common(known, (kind,), lambda: KindTables(model, kind))

    @cached_property
    def tables(self) -> KindModel:
        return self.model.kind(self.kind)

    def _add_link(self, tables: EdgeTables) -> None:
        where = self.tables.where
        axes = []
        for node, classes in zip(tables.nodes, tables.classes, strict=True):
            decision = where[node]
            variable = self._variable(decision, classes)
            if variable != decision:
                classes = np.arange(self.sizes[variable])  # the variable's values are the classes
            axes.append((variable, classes))
        self.links.append(Link(tables, tuple(axes)))

    def _variable(self, decision: int, classes: Ints) -> int:
        """Return the variable that decides the class (in ``classes``) of a decision's choice."""
        size = int(classes.max()) + 1
        if size == len(classes):
            return decision
        key = (decision, classes.tobytes())
        if key not in self._variables:
            tie = np.full((1, 1, len(classes), size), np.inf)
            tie[0, 0, np.arange(len(classes)), classes] = 0.0
            self._variables[key] = len(self.sizes)
            self.fixed.append(self._memo.note(Factor((decision, len(self.sizes)), tie)))
            self.sizes.append(size)
        return self._variables[key]

    @cached_property
    def ends(self) -> tuple[End, ...]:
        """Return the decisions (nodes laid out together) whose layouts other blocks see."""
        seen: dict[int, list[tuple[object, ...]]] = {}
        made, wanted = self.model.structure.ends(self.kind)
        tables = self.tables
        for name, index in made:
            choices = tables.decisions[tables.where[name]].choices
            seen.setdefault(tables.where[name], []).append(
                tuple(choice.layouts[name].outputs[index] for choice in choices)
            )
        for use in wanted:
            choices = tables.decisions[tables.where[use.node]].choices
            seen.setdefault(tables.where[use.node], []).append(
                tuple(choice.layouts[use.node].inputs[use.position] for choice in choices)
            )
        return tuple(
            End(number, *classes_of(list(zip(*columns, strict=True))))
            for number, columns in sorted(seen.items())
        )

    @cached_property
    def order(self) -> Order:
        """Return the order in which to eliminate the block's variables. Raises ``TooWideError`` if
        this makes too large tables."""
        scopes = [factor.scope for factor in self.fixed] + [link.scope for link in self.links]
        scopes += [(number,) for number in range(len(self.tables.decisions))]
        key = (tuple(self.sizes), tuple(scopes), self.kept)
        found = find(
            self.model.prices.cache.orders, key, lambda: find_order(self.sizes, scopes, self.kept)
        )
        if found.most_cells > MOST_CELLS:
            raise TooWideError
        return found

    def check(self) -> None:
        """Raise ``TooWideError`` if the tables that ``solve`` makes would be too large."""
        assert self.order

    def solve(self, rates: Rates) -> Eliminated:
        """Return a block's least cost for each combination of layouts that other blocks see, in
        each problem of ``rates``. Cached."""
        found = self._solved.get(rates)
        if found is None:
            order = self.order
            links = [self._memo.note(link.factor(rates.mode)) for link in self.links]
            factors = [*self.fixed, *links, *self._own(rates)]
            found = eliminate(self.sizes, factors, order, self.kept, self._memo)
            rows, columns = rates.grid
            found = found.in_a_row(1 if rates.any_zero else rows, columns)
            while len(self._solved) >= MOST_SOLVED:
                del self._solved[next(iter(self._solved))]
            self._solved[rates] = found
        return found

    @cached_property
    def _stacked(self) -> tuple[Floats, Floats, Floats]:
        """Return seconds, recomputation seconds and bytes of states of all layout choices in the
        block, concatenated along the choices."""
        own = self.tables.decisions
        return (
            np.concatenate([decision.seconds for decision in own], axis=1),
            np.concatenate([decision.recompute_seconds for decision in own], axis=1),
            np.concatenate([decision.states[:, :, HELD].sum(axis=2) for decision in own], axis=1),
        )

    @cached_property
    def _kept_bytes(self) -> dict[Recompute, Floats]:
        """Map each recomputation mode to the bytes kept by every layout choice in the block."""
        modes: tuple[Recompute, ...] = ("none", "selective", "full")
        return {mode: self.tables.kept_bytes(mode) for mode in modes}

    def kept_bytes(self, of: Callable[[Floats], Any]) -> float:
        """Return the sum of ``of(bytes kept by each choice)`` over a block's decisions (nodes laid
        out together)."""
        ends = np.cumsum([len(decision.choices) for decision in self.tables.decisions])[:-1]
        return sum(float(of(own)) for own in np.split(self._kept_bytes["none"], ends))

    def _own(self, rates: Rates) -> list[Factor]:
        """Return, for each decision (nodes laid out together), the cost of each choice without
        layout conversions, as a term of the sum to minimize."""
        seconds, recompute_seconds, states = self._stacked
        shape = rates.grid
        zeros = list(rates.zeros[:: shape[1]])
        own = seconds[zeros] @ rates.weights
        if rates.mode != "none":
            own = own + recompute_seconds[RECOMPUTE_MODES.index(rates.mode)]
        cost = own[:, None]
        if rates.state_prices:
            prices = rates.prices(saved=False).reshape(shape)
            cost = cost + prices[:, :, None] * states[zeros][:, None]
        if rates.saved_prices and any(self._keeps[rates.mode]):
            prices = rates.prices(saved=True).reshape(shape)
            cost = cost + prices[:, :, None] * self._kept_bytes[rates.mode]
        if rates.any_zero:
            cost = cost.min(axis=0, keepdims=True)
        ends = np.cumsum([len(decision.choices) for decision in self.tables.decisions])[:-1]
        parts = np.split(cost, ends, axis=2)
        return [self._factor(number, part, rates) for number, part in enumerate(parts)]

    def _factor(self, number: int, part: Floats, rates: Rates) -> Factor:
        """Return the cost ``part[row, column, choice]`` of decision ``number`` as a term of the sum
        to minimize; batch axes along which it is constant get length 1."""
        if not self._is_same[number]:
            return Factor((number,), part)
        if rates.saved_prices and self._keeps[rates.mode][number]:
            return Factor((number,), part[:1] if rates.grid[1] > 1 or len(part) == 1 else part)
        key = (number, rates.mode)
        if key not in self._alike:
            self._alike[key] = self._memo.note(Factor((number,), part[:1, :1]))
        return self._alike[key]

    @cached_property
    def _keeps(self) -> dict[Recompute, list[bool]]:
        """Map each recomputation mode to, for each decision, whether a choice keeps any bytes."""
        ends = np.cumsum([len(decision.choices) for decision in self.tables.decisions])[:-1]
        found: dict[Recompute, list[bool]] = {}
        for mode, sizes in self._kept_bytes.items():
            found[mode] = [bool(own.any()) for own in np.split(sizes, ends)]
        return found

    @cached_property
    def _is_same(self) -> list[bool]:
        """Return, for each decision (nodes laid out together), whether its cost is equal for all
        ZeRO stages and prices of states."""
        return [
            not own.states[:, :, HELD].any()
            and not own.seconds[:, :, STEP].any()
            and bool((own.seconds == own.seconds[:1]).all())
            for own in self.tables.decisions
        ]
