"""One kind of block solved for itself: its least cost for every layout at its ends.

In: a kind's tables on a mesh, and what seconds and bytes count. Out: for every combination
of layouts at the block's ends (what it reads from elsewhere and what others read of it) the
least cost of the inside, with the choices that reach it. A run of blocks then is a small
problem over the ends alone (``families``), however many blocks and runs there are: exact, as
nothing but the ends joins a block to the rest.

Costs are priced with a Lagrange multiplier λ per byte, in which memory adds up decision by
decision: states, and what autograd keeps, each storage counted with the first decision that
keeps it. That is at most what the block really holds, so the least cost is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..classes import classes_of
from ..plan import Recompute
from ..pricing.stage_model import KindModel, StageModel
from ..pricing.structure import Edge
from .assignments import assignments
from .elimination import Eliminated, Factor, Floats, Ints, Order, eliminate, find_order

MOST_CELLS = 4_000_000
"""The largest table that is worth making; wider problems go to the integer program."""


MOST_SOLVED = 12
"""Solutions of a kind under different rates that are kept, the last ones: tables are large."""


class TooWideError(Exception):
    """Tables would be larger than they are worth; caught inside the planner."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What counts how much, in a batch of problems that differ in ZeRO stage and λ.

    ``state_prices`` are seconds per byte of states, ``saved_prices`` per byte that one
    micro-batch keeps (λ times the micro-batches in flight). All blocks run as ``mode`` says.
    """

    num_microbatches: int
    zeros: tuple[int, ...]
    mode: Recompute = "none"
    state_prices: tuple[float, ...] = ()
    saved_prices: tuple[float, ...] = ()

    @property
    def again(self) -> float:
        """How often the collectives of the forward run once more."""
        return float(self.mode != "none")

    @property
    def weights(self) -> Floats:
        """What a step's fields of ``Seconds`` count per micro-batch."""
        share = 1 / self.num_microbatches
        return np.array((1.0,) * 6 + (share,) * 2 + (0.0,) * 2)

    def prices(self, saved: bool) -> Floats:
        """λ of states or of saved bytes by problem."""
        given = self.saved_prices if saved else self.state_prices
        return np.array(given or (0.0,) * len(self.zeros))


@dataclass(frozen=True, slots=True)
class End:
    """A decision that others see: the class of each choice, and a choice of each class."""

    decision: int
    classes: Ints
    firsts: Ints


def shared_cost(matrix: Floats, num_uses: int) -> Floats:
    """``cost[s, w_1, …, w_n]``: the conversions from s to each distinct one of the targets.

    >>> shared_cost(np.array([[1.0, 4.0]]), 2).tolist()
    [[[1.0, 5.0], [5.0, 4.0]]]
    """
    num_rows, num_targets = matrix.shape
    if num_rows * num_targets**num_uses > MOST_CELLS:
        raise TooWideError
    wanted = assignments((num_targets,) * num_uses)
    total = matrix[:, wanted[0]]
    for use in range(1, num_uses):
        is_new = (wanted[:use] != wanted[use]).all(axis=0)
        total = total + matrix[:, wanted[use]] * is_new
    cost: Floats = total.reshape((num_rows,) + (num_targets,) * num_uses)
    return cost


@dataclass(frozen=True, slots=True)
class EdgeTables:
    """An edge over the distinct sides of it: where each is, its classes, seconds per class."""

    nodes: tuple[str, ...]
    classes: tuple[Ints, ...]
    forward: Floats
    backward: Floats


def edge_tables(model: StageModel, edge: Edge) -> EdgeTables | None:
    """The conversions of an edge; None where they cost nothing."""
    merged = model.merged(edge)
    if not merged.forward.any() and not merged.backward.any():
        return None
    maker = edge.name if edge.first is None else edge.first.node
    distinct: dict[tuple[str, bytes], tuple[str, Ints]] = {}
    for use, classes in zip(edge.uses, merged.uses, strict=True):
        owner, decision = model.home(use.node)
        distinct.setdefault((f"{owner}/{decision.name}", classes.tobytes()), (use.node, classes))
    sides = list(distinct.values())
    return EdgeTables(
        (maker, *(node for node, _ in sides)),
        (merged.source, *(classes for _, classes in sides)),
        shared_cost(merged.forward, len(sides)),
        shared_cost(merged.backward, len(sides)),
    )


def lifted(table: Floats, axes: Sequence[tuple[int, Ints]]) -> tuple[tuple[int, ...], Floats]:
    """A table over classes as one over variables: ``axes`` say which, and each value's class.

    A variable that stands for several axes gets one.
    """
    scope = tuple(dict.fromkeys(variable for variable, _ in axes))
    index = []
    for variable, classes in axes:
        shape = [1] * len(scope)
        shape[scope.index(variable)] = len(classes)
        index.append(classes.reshape(shape))
    return scope, table[tuple(index)]


@dataclass(frozen=True, slots=True)
class _Link:
    """An edge as a factor: its scope and its seconds forward and backward."""

    scope: tuple[int, ...]
    forward: Floats
    backward: Floats


@dataclass
class KindTables:
    """A kind on a mesh as variables and tables; ``solve`` eliminates all but its ends."""

    model: StageModel
    kind: str
    sizes: list[int] = field(default_factory=list)
    fixed: list[Factor] = field(default_factory=list)
    links: list[_Link] = field(default_factory=list)
    _variables: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _solved: dict[Rates, Eliminated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = [len(decision.choices) for decision in self.tables.decisions]
        for edge in (*self.tables.edges, *self.model.structure.own_parameter_edges(self.kind)):
            tables = edge_tables(self.model, edge)
            if tables is not None:
                self._add_link(tables)
        self.kept = tuple(self._variable(end.decision, end.classes) for end in self.ends)

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
                classes = np.arange(self.sizes[variable])  # its values are the classes
            axes.append((variable, classes))
        scope, forward = lifted(tables.forward, axes)
        self.links.append(_Link(scope, forward, lifted(tables.backward, axes)[1]))

    def _variable(self, decision: int, classes: Ints) -> int:
        """A variable for the classes of a decision, tied to it, or the decision itself."""
        size = int(classes.max()) + 1
        if size == len(classes):
            return decision
        key = (decision, classes.tobytes())
        if key not in self._variables:
            tie = np.full((1, 1, len(classes), size), np.inf)
            tie[0, 0, np.arange(len(classes)), classes] = 0.0
            self._variables[key] = len(self.sizes)
            self.fixed.append(Factor((decision, len(self.sizes)), tie))
            self.sizes.append(size)
        return self._variables[key]

    @cached_property
    def ends(self) -> tuple[End, ...]:
        """The decisions that other blocks see, by what these see of them."""
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
        """In which order to eliminate. Raises ``TooWideError`` where tables would be too large."""
        scopes = [factor.scope for factor in self.fixed] + [link.scope for link in self.links]
        scopes += [(number,) for number in range(len(self.tables.decisions))]
        key = ("order", tuple(self.sizes), tuple(scopes), self.kept)
        found: Order | None = self.model.prices.cache.get(key)
        if found is None:
            found = find_order(self.sizes, scopes, self.kept)
            self.model.prices.cache[key] = found
        if found.most_cells > MOST_CELLS:
            raise TooWideError
        return found

    def check(self) -> None:
        """Raises ``TooWideError`` where tables would be too large."""
        assert self.order

    def solve(self, rates: Rates) -> Eliminated:
        """The least cost of a block by the classes of its ends, kept."""
        found = self._solved.get(rates)
        if found is None:
            order = self.order
            links = [
                Factor(link.scope, (link.forward * (1 + rates.again) + link.backward)[None, None])
                for link in self.links
            ]
            factors = [*self.fixed, *links, *self._own(rates)]
            found = eliminate(self.sizes, factors, order, self.kept)
            while len(self._solved) >= MOST_SOLVED:
                del self._solved[next(iter(self._solved))]
            self._solved[rates] = found
        return found

    @cached_property
    def _stacked(self) -> tuple[Floats, Floats, Floats]:
        """Of all decisions' choices: seconds, kept ops' forward, bytes of states."""
        own = self.tables.decisions
        return (
            np.concatenate([decision.seconds for decision in own], axis=1),
            np.concatenate([decision.kept_seconds[:, 0] for decision in own]),
            np.concatenate([decision.states[:, :, :3].sum(axis=2) for decision in own], axis=1),
        )

    @cached_property
    def _kept_bytes(self) -> dict[Recompute, Floats]:
        """Of all decisions' choices the bytes kept, where blocks are recomputed in a mode."""
        modes: tuple[Recompute, ...] = ("none", "selective")
        return {mode: self.tables.kept_bytes(mode) for mode in modes}

    def _own(self, rates: Rates) -> list[Factor]:
        """What each choice costs by itself."""
        seconds, kept_seconds, states = self._stacked
        zeros = list(rates.zeros)
        cost = seconds[zeros] @ rates.weights
        if rates.mode != "none":
            cost = cost + seconds[0, :, :2].sum(axis=1)
        if rates.mode == "selective":
            cost = cost - kept_seconds
        if rates.state_prices:
            cost = cost + rates.prices(saved=False)[:, None] * states[zeros]
        if rates.saved_prices and rates.mode != "full":
            cost = cost + rates.prices(saved=True)[:, None] * self._kept_bytes[rates.mode]
        ends = np.cumsum([len(decision.choices) for decision in self.tables.decisions])[:-1]
        parts = np.split(cost, ends, axis=1)
        return [Factor((number,), part[None]) for number, part in enumerate(parts)]
