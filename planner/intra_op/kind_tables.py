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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..costs.price_cache import find
from ..costs.seconds import HELD, STEP, objective_weights
from ..integer_programs.program import classes_of
from ..kernels.recompute import BLOCK_MODES, ONCE
from ..plan import Recompute
from ..stage.stage_model import KindModel, StageModel
from ..stage.terms import (
    MOST_CELLS,
    Axis,
    PlacedTerm,
    Side,
    TooWideError,
    byte_weights,
    time_weights,
)
from .elimination import Eliminated, Factor, Floats, Ints, Memo, Order, eliminate, find_order

MOST_SOLVED = 12
"""Maximum weights (``Rates``) for which a kind's solutions are cached, as their tables are
large."""


STATE_BYTES = byte_weights(ONCE, 0)
"""Weights of the bytes of states among the amounts of a block."""


@dataclass(frozen=True)
class Rates:
    """Weights of seconds and bytes for a batch of problems, one per entry of ``zeros`` (ZeRO
    stages).

    ``state_prices``: seconds per byte of states; ``saved_prices``: per byte that one micro-batch
    keeps for its backward (times micro-batches in flight). All blocks use recomputation ``mode``.
    With ``any_zero`` each decision takes its own best ZeRO stage, and the problems form one row.
    """

    num_microbatches: int
    zeros: tuple[int, ...]
    mode: Recompute = "none"
    state_prices: tuple[float, ...] = ()
    saved_prices: tuple[float, ...] = ()
    any_zero: bool = False

    @property
    def seconds(self) -> Floats:
        """Return the weight of a second of each ``Resource`` in the seconds per micro-batch."""
        return objective_weights(self.num_microbatches)

    @cached_property
    def weights(self) -> Floats:
        """Return the weight of each amount of a block (``stage.terms``) in the seconds per
        micro-batch."""
        return time_weights(self.seconds, [float(mode == self.mode) for mode in BLOCK_MODES])

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


@dataclass
class KindTables:
    """Cost tables of a kind of block on a mesh. ``solve`` minimizes over all choices but the
    layouts that other blocks see."""

    model: StageModel
    kind: str
    sizes: list[int] = field(default_factory=list)
    fixed: list[Factor] = field(default_factory=list)
    terms: list[PlacedTerm] = field(default_factory=list)
    _variables: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _solved: dict[Rates, Eliminated] = field(default_factory=dict)
    _kept_bytes: dict[Recompute, Floats] = field(default_factory=dict)
    _alike: dict[tuple[int, bytes], Factor] = field(default_factory=dict)
    _of_weights: dict[bytes, list[Factor]] = field(default_factory=dict)
    _factors: dict[int, Factor] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        self.sizes = [len(decision.choices) for decision in self.tables.decisions]
        self.terms = [term.placed(self._axis) for term in self.model.terms(self.kind)]
        self.kept = tuple(self._variable(end.decision, end.classes) for end in self.ends)

    @staticmethod
    def of(model: StageModel, kind: str) -> KindTables:
        """Return the tables of a kind of block, from the cache if they are known."""
        known = model.prices.cache.kind_tables
        return model.common(known, (kind,), lambda: KindTables(model, kind))

    @cached_property
    def tables(self) -> KindModel:
        return self.model.kind(self.kind)

    def _axis(self, side: Side) -> Axis:
        """Return the variable that decides the class of a side of a term, with the class that each
        of its values means."""
        decision = self.tables.where[side.node]
        variable = self._variable(decision, side.classes)
        return variable, side.classes if variable == decision else np.arange(self.sizes[variable])

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
        scopes = [factor.scope for factor in self.fixed] + [term.scope for term in self.terms]
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
            factors = [*self.fixed, *self._linked(rates.weights), *self._own(rates)]
            found = eliminate(self.sizes, factors, order, self.kept, self._memo)
            rows, columns = rates.grid
            found = found.in_a_row(1 if rates.any_zero else rows, columns)
            while len(self._solved) >= MOST_SOLVED:
                del self._solved[next(iter(self._solved))]
            self._solved[rates] = found
        return found

    def _kept(self, mode: Recompute) -> Floats:
        """Return the bytes kept by every layout choice in the block under a recomputation mode."""
        return find(self._kept_bytes, mode, lambda: self.tables.kept_bytes(mode))

    def kept_bytes(self, of: Callable[[Floats], Any]) -> float:
        """Return the sum of ``of(bytes kept by each choice)`` over a block's decisions (nodes laid
        out together)."""
        return sum(float(of(own)) for own in self.tables.split(self._kept("none")))

    def _linked(self, weights: Floats) -> list[Factor]:
        """Return the costs of layout conversions as terms of the sum to minimize. Cached."""
        key = weights.tobytes()
        if key not in self._of_weights:
            self._of_weights[key] = [self._factor_of(term, weights) for term in self.terms]
        return self._of_weights[key]

    def _factor_of(self, term: PlacedTerm, weights: Floats) -> Factor:
        table = term.table(weights)
        return find(
            self._factors,
            id(table),
            lambda: self._memo.note(Factor(term.scope, table[None, None])),
        )

    def _own(self, rates: Rates) -> list[Factor]:
        """Return, for each decision (nodes laid out together), the cost of each choice without
        layout conversions, as a term of the sum to minimize."""
        shape, amounts = rates.grid, self.tables.amounts
        zeros = rates.zeros[:: shape[1]]
        cost = amounts.weighted(rates.weights, zeros)[:, None]
        if rates.state_prices:
            prices = rates.prices(saved=False).reshape(shape)
            cost = cost + prices[:, :, None] * amounts.weighted(STATE_BYTES, zeros)[:, None]
        keeps = np.zeros(len(cost[0, 0]))
        if rates.saved_prices:
            keeps = self._kept(rates.mode)
            cost = cost + rates.prices(saved=True).reshape(shape)[:, :, None] * keeps
        if rates.any_zero:
            cost = cost.min(axis=0, keepdims=True)
        parts = zip(self.tables.split(cost), self.tables.split(keeps), strict=True)
        return [
            self._factor(number, part, rates, keeps=bool(own.any()))
            for number, (part, own) in enumerate(parts)
        ]

    def _factor(self, number: int, part: Floats, rates: Rates, *, keeps: bool) -> Factor:
        """Return the cost ``part[row, column, choice]`` of decision ``number`` as a term of the sum
        to minimize; batch axes along which it is constant get length 1. ``keeps``: whether a choice
        keeps bytes at a price."""
        if not self._is_same[number]:
            return Factor((number,), part)
        if keeps:
            return Factor((number,), part[:1] if rates.grid[1] > 1 or len(part) == 1 else part)
        key = (number, rates.weights.tobytes())
        if key not in self._alike:
            self._alike[key] = self._memo.note(Factor((number,), part[:1, :1]))
        return self._alike[key]

    @cached_property
    def _is_same(self) -> list[bool]:
        """Return, for each decision (nodes laid out together), whether its cost is equal for all
        ZeRO stages and prices of states."""
        return [
            not own.states[:, :, HELD].any()
            and not own.seconds[:, :, STEP].any()
            and bool((own.seconds == own.seconds[:1]).all())
            for own in (decision.amounts for decision in self.tables.decisions)
        ]
