"""Tables of a stage's mesh: decisions per kind, edges, kept storages, and their costs.

In: the graph's structure, prices on a mesh, restrictions of its axes. Out: for a kind of block its
decisions and the edges inside it; for an edge the conversions between the layouts that its two ends
may have. All tables are made on first use and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from ...cost_model.cluster.cluster import Link
from ..costs.choices import Restriction
from ..costs.conversions import conversion_seconds
from ..costs.kept_bytes import (
    RECOMPUTE_MODES,
    Part,
    last_ops,
    replay,
    weight_grad_parts,
    weight_grad_seconds,
)
from ..costs.price_cache import ByIdentity, PriceCache
from ..costs.prices import Prices
from ..costs.seconds import Resource, wait_weights
from ..graph.graph import Block, Node, Ref, TensorSpec
from ..graph.layout import INVARIANT, Layout, NodeLayout, boundary_layout, splits
from ..integer_programs.program import classes_of
from ..kernels.recompute import ONCE
from .decisions import Choice, Decision, decide, parameter_decision
from .kind_model import ChoiceStorages, OpStorages, Storages
from .kind_model import Kept as Kept
from .kind_model import KindModel as KindModel
from .recompute_policy import RecomputePolicy
from .structure import Edge, Occurrences, Row, Run, Structure, Use
from .terms import (
    Floats,
    Ints,
    PlacedTerm,
    Side,
    Term,
    conversion_columns,
    kept_columns,
    merge_classes,
    received_columns,
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Boundary:
    """A value that a stage sends or receives, or the loss; ``term``: seconds of its conversion or
    transfer."""

    is_received: bool
    term: Term


CostRow = Row | Boundary
"""Row of a stage's cost: block, shared parameter, edge or boundary."""


@dataclass(frozen=True, slots=True)
class Options:
    """Distinct layouts that a value may have. ``of_choice``: index of the layout by choice."""

    layouts: tuple[Layout, ...]
    of_choice: Ints

    @staticmethod
    def of(layouts: Sequence[Layout], cache: PriceCache) -> Options:
        """Build the options from the layouts of all choices. ``cache`` shares equal tuples."""
        of_choice, firsts = classes_of(layouts)
        distinct = tuple(layouts[first] for first in firsts.tolist())
        return Options(cache.layouts.setdefault(distinct, distinct), of_choice)


@dataclass(frozen=True, slots=True)
class Targets:
    """Distinct layouts that the uses of a value in a block may need. ``columns``: for each use, the
    index of the layout by choice.

    ``alone``: all uses belong to one decision (nodes laid out together) and need equal layouts.
    """

    layouts: tuple[Layout, ...]
    columns: tuple[Ints, ...]
    alone: bool


WeightGrads = tuple[float, float, tuple[Part, ...]]
"""Weight gradients of a choice: device seconds, host seconds, tensors kept for them."""


@dataclass(frozen=True)
class StageModel:
    """Decisions (nodes whose layouts are chosen together) and their costs on a stage's mesh, by
    kind of block. ``link`` connects the stage to the stage before it."""

    structure: Structure
    prices: Prices
    restriction: Restriction
    link: Link
    merge: bool = True
    _kinds: dict[str, KindModel] = field(default_factory=dict, repr=False)
    _shared: dict[str, Decision] = field(default_factory=dict, repr=False)
    _options: dict[object, Options] = field(default_factory=dict, repr=False)
    _boundaries: dict[object, Boundary] = field(default_factory=dict, repr=False)
    _targets_of: dict[Edge, Targets] = field(default_factory=dict, repr=False)
    _terms: dict[Row, tuple[Term, ...]] = field(default_factory=dict, repr=False)
    _weight_grads: dict[object, WeightGrads] = field(default_factory=dict, repr=False)
    _repeats: dict[Edge, tuple[bool, ...]] = field(default_factory=dict, repr=False)
    _least_waits: dict[object, float] = field(default_factory=dict, repr=False)

    def kind(self, kind: str) -> KindModel:
        found = self._kinds.get(kind)
        if found is None:
            found = self.common(self.prices.cache.kinds, (kind,), lambda: self._make_kind(kind))
            self._kinds[kind] = found
        return found

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.merge, self.restriction.key, self.prices.key

    def common(self, table: ByIdentity[T], key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the result of ``make``, cached for all models that are equal but for ``link``."""
        given = self.structure.graph, self.structure.blocks
        return table.find((*key, *self._key), given, make)

    def weight_grads(self, kind: str, number: int, choice: int) -> WeightGrads:
        """Return the seconds and bytes of the weight gradients that a split backward defers, for
        one choice of decision ``number`` of a kind of block."""
        key = (kind, number, choice)
        if key not in self._weight_grads:
            decision = self.kind(kind).decisions[number]
            layouts, graph = decision.choices[choice].layouts, self.structure.graph
            nodes = [graph[name] for name in decision.members if graph[name].kind == "op"]
            asked = [(node, layouts[node.name], graph, self.prices) for node in nodes]
            parts = [part for each in asked for part in weight_grad_parts(*each)]
            seconds = [weight_grad_seconds(*each) for each in asked]
            computed, issued = (sum(own) for own in zip((0.0, 0.0), *seconds, strict=True))
            self._weight_grads[key] = computed, issued, tuple(parts)
        return self._weight_grads[key]

    def shared(self, parameter: str) -> Decision:
        """Return the decision of the layout of a parameter that several blocks use."""
        found = self._shared.get(parameter)
        if found is None:
            found = self._parameter(parameter)
            self._shared[parameter] = found
        return found

    def _parameter(self, name: str) -> Decision:
        graph = self.structure.graph
        return parameter_decision(graph[name], graph, self.prices, self.restriction)

    def _make_kind(self, kind: str) -> KindModel:
        graph, structure = self.structure.graph, self.structure
        block = structure.blocks.kinds[kind]
        decisions, amounts = decide(
            block,
            graph,
            self.prices,
            self.restriction,
            merge=self.merge,
            parameters=structure.own_parameters(block),
        )
        where = {name: i for i, decision in enumerate(decisions) for name in decision.members}
        return KindModel(
            kind,
            decisions,
            amounts,
            where,
            self._edges_inside(kind, where),
            self._block_sync(block),
            self._holder(kind, decisions),
        )

    def _block_sync(self, block: Block) -> Floats:
        """Return ``[zero, Resource]``: the latencies of a block's parameter gathers and gradient
        sums; 0 without parameters."""
        if not block.parameters:
            return np.zeros((len(self.prices.shardings), len(Resource)))
        return np.array([self.prices.block_sync(*each) for each in self.prices.shardings])

    def _edges_inside(self, kind: str, where: Mapping[str, int]) -> tuple[Edge, ...]:
        """Return the values of a decision of the block that another decision of the block reads."""
        graph = self.structure.graph
        uses: dict[Ref, list[Use]] = {}
        for name in self.structure.blocks.kinds[kind].nodes:
            for position, ref in enumerate(graph[name].inputs):
                if where.get(ref.name, where[name]) != where[name]:
                    uses.setdefault(ref, []).append(Use(kind, name, position))
        return tuple(
            Edge(
                "parameter" if graph[ref.name].kind == "parameter" else "block",
                ref.name,
                ref.index,
                tuple(own),
            )
            for ref, own in uses.items()
        )

    def _holder(self, kind: str, decisions: Sequence[Decision]) -> Callable[[int, int], Storages]:
        """Return a cached function (decision, choice) → ``Storages`` for a kind of block."""
        graph, prices = self.structure.graph, self.prices
        block = self.structure.blocks.kinds[kind]
        again, last = replay(block, graph, prices), last_ops(block, graph, prices)
        by_choice: dict[tuple[int, int], Storages] = {}
        by_layout: dict[tuple[str, int], OpStorages] = {}
        by_split = prices.cache.held.setdefault((graph.batch_size, prices.mesh.shape, last), {})

        def of_layout(node: Node, layout: NodeLayout) -> OpStorages:
            key = (node.name, id(layout))  # by identity: hashing a layout takes longer
            found = by_layout.get(key)
            if found is None:
                own = (node.name, splits(layout))
                if own not in by_split:
                    by_split[own] = OpStorages(node, layout, graph, prices, again, last)
                found = by_layout[key] = by_split[own]
            return found

        def held(number: int, choice: int) -> Storages:
            if (number, choice) not in by_choice:
                layouts = decisions[number].choices[choice].layouts
                nodes = [graph[name] for name in decisions[number].members]
                ops = tuple(of_layout(n, layouts[n.name]) for n in nodes if n.kind == "op")
                by_choice[number, choice] = ops[0] if len(ops) == 1 else ChoiceStorages(ops)
            return by_choice[number, choice]

        return held

    def made(self, name: str, index: int) -> Options:
        """Return the layouts in which node ``name`` may compute its output number ``index``."""
        key = ("made", name, index)
        return self._options_of(key, name, lambda own: own.layouts[name].outputs[index])

    def wanted(self, use: Use) -> Options:
        """Return the layouts in which an op may need its input (``use``)."""
        node, at = use.node, use.position
        key = ("wanted", node, at)
        return self._options_of(key, node, lambda own: own.layouts[node].inputs[at])

    def _options_of(
        self, key: tuple[object, ...], member: str, layout: Callable[[Choice], Layout]
    ) -> Options:
        """Return the distinct layouts of a node's input or output (``layout``) in all choices of
        the decision that has node ``member``."""
        if key not in self._options:
            choices, cache = self.home(member)[1].choices, self.prices.cache
            self._options[key] = cache.options.find(
                key, (choices,), lambda: Options.of(list(map(layout, choices)), cache)
            )
        return self._options[key]

    def received(self, first: Use) -> Options:
        """Return the layouts in which a stage may receive a value whose first use is ``first``."""
        wanted, cache = self.wanted(first), self.prices.cache

        def make() -> Options:
            at_boundary = Options.of([boundary_layout(each) for each in wanted.layouts], cache)
            return Options(at_boundary.layouts, at_boundary.of_choice[wanted.of_choice])

        return cache.options.find(("received",), (wanted,), make)

    @cached_property
    def _kind_of(self) -> dict[str, str]:
        return {
            name: block.kind
            for block in self.structure.blocks.kinds.values()
            for name in (*block.nodes, *block.parameters)
        }

    def home(self, name: str) -> tuple[str, Decision]:
        """Return the kind of block (or shared parameter) and the decision that has a node."""
        is_parameter = self.structure.graph[name].kind == "parameter"
        if is_parameter and self.structure.is_shared(name):
            return name, self.shared(name)
        kind = self._kind_of[name]
        model = self.kind(kind)
        return kind, model.decisions[model.where[name]]

    def source(self, edge: Edge) -> Options:
        """Return the layouts that a value read by a block may have before its conversion."""
        if edge.first is not None:
            return self.received(edge.first)
        return self.made(edge.name, edge.index)

    def repeats(self, edge: Edge) -> tuple[bool, ...]:
        """Return, by ``RECOMPUTE_MODES``, whether recomputation repeats the value's conversion."""
        if edge not in self._repeats:
            block = self.structure.blocks.kinds[edge.uses[0].kind]
            own = replay(block, self.structure.graph, self.prices)
            self._repeats[edge] = own.repeats((use.node, use.position) for use in edge.uses)
        return self._repeats[edge]

    def spec(self, edge: Edge) -> TensorSpec:
        return self.structure.graph[edge.name].outputs[edge.index]

    def targets(self, edge: Edge) -> Targets:
        """Return the distinct layouts that a value's uses in a block may need."""
        found = self._targets_of.get(edge)
        if found is None:
            found = self._targets_of[edge] = self._make_targets(edge)
        return found

    def _make_targets(self, edge: Edge) -> Targets:
        wanted, cache = tuple(map(self.wanted, edge.uses)), self.prices.cache

        def make() -> Targets:
            distinct: dict[Layout, int] = {}
            columns = []
            for own in wanted:
                numbers = np.array([distinct.setdefault(w, len(distinct)) for w in own.layouts])
                columns.append(numbers[own.of_choice])
            alike = all(np.array_equal(column, columns[0]) for column in columns)
            deciding = {self.home(use.node)[1].name for use in edge.uses}
            layouts = cache.layouts.setdefault(tuple(distinct), tuple(distinct))
            return Targets(layouts, tuple(columns), alike and len(deciding) == 1)

        return cache.targets.find((), wanted, make)

    def decisions(self, row: CostRow) -> tuple[Decision, ...]:
        """Return the decisions of a block, or of a parameter that several blocks use."""
        if not isinstance(row, str):
            return ()
        return self.kind(row).decisions if self.is_block(row) else (self.shared(row),)

    def is_block(self, row: CostRow) -> bool:
        """Return whether a row of a stage's cost is a kind of block."""
        return row in self.structure.blocks.kinds

    def rows(self, run: Run, policy: RecomputePolicy) -> list[tuple[CostRow, Occurrences]]:
        """Return the rows of the cost of the stage ``run``, each with its occurrences in blocks
        of each of ``BLOCK_MODES``."""
        boundaries = [
            (each, tuple(count * own for own in ONCE)) for each, count in self.boundaries(run)
        ]
        return [*run.occurrences(policy).items(), *boundaries]

    def terms(self, row: CostRow) -> tuple[Term, ...]:
        """Return the terms of a row of a stage's cost beside its decisions' own amounts: layout
        conversions, transfers, and bytes of another block's value that a recomputed reader
        keeps."""
        if isinstance(row, Boundary):
            return (row.term,)
        if row not in self._terms:
            self._terms[row] = self._make_terms(row)
        return self._terms[row]

    def placed_terms(self, kind: str) -> tuple[PlacedTerm, ...]:
        """Return the terms of a kind of block for the indices of its decisions."""
        where = self.kind(kind).where
        return self.common(
            self.prices.cache.placed_terms,
            (kind,),
            lambda: tuple(
                term.placed(lambda side: (where[side.node], side.classes))
                for term in self.terms(kind)
            ),
        )

    def _make_terms(self, row: Row) -> tuple[Term, ...]:
        if isinstance(row, Edge):
            held = (self._held_bytes(row),) if row.is_held else ()
            return (*self._conversion(row), *held)
        if not self.is_block(row):
            return ()
        edges = self.kind(row).edges
        return self.common(
            self.prices.cache.terms,
            (row,),
            lambda: tuple(term for edge in edges for term in self._conversion(edge)),
        )

    def _conversion(self, edge: Edge) -> tuple[Term, ...]:
        """Return the seconds of converting a value that a block reads, with layouts that cost the
        same merged to classes; nothing if it is free."""
        source, targets = self.source(edge), self.targets(edge)
        spec, prices = self.spec(edge), self.prices
        given = source.layouts, targets.layouts
        rows, columns, entries = prices.converted.merged.find(
            (spec, targets.alone),
            given,
            lambda: merge_classes(
                conversion_seconds(prices, spec, *given), merge_columns=targets.alone
            ),
        )
        if not entries.any():
            return ()
        uses: dict[tuple[str, bytes], Side] = {}
        for use, own in zip(edge.uses, targets.columns, strict=True):
            side = Side(use.node, columns[own])
            uses.setdefault((self.home(use.node)[1].name, side.classes.tobytes()), side)
        maker = Side(maker_of(edge), rows[source.of_choice])
        columns_of = conversion_columns(self.repeats(edge))
        return (Term(maker, tuple(uses.values()), entries, columns_of),)

    def _held_bytes(self, edge: Edge) -> Term:
        """Return the bytes of a value of another block, which a recomputed reader keeps."""
        options, spec = self.source(edge), self.spec(edge)
        sizes = [[self.prices.local_bytes(spec, layout)] for layout in options.layouts]
        return _of_layouts(maker_of(edge), options, sizes, kept_columns())

    def boundaries(self, run: Run) -> list[tuple[Boundary, int]]:
        """Return (boundary, how often it occurs) for values that a stage of the blocks ``run``
        sends and receives, and for the loss. A boundary has the seconds of one value."""
        found = [(self._outgoing(name, index), count) for (name, index), count in run.sent.items()]
        if run.has_loss:
            loss = self.structure.graph.loss
            template = self.structure.blocks.template[loss.name]
            found.append((self._outgoing(template, loss.index, is_loss=True), 1))
        return found + [(self._incoming(ref, first), 1) for ref, first in run.received]

    def _outgoing(self, name: str, index: int, *, is_loss: bool = False) -> Boundary:
        """Return the conversion seconds of a sent value, or of the loss, which is made whole."""
        key = (name, index, is_loss)
        if key not in self._boundaries:
            spec, made = self.structure.graph[name].outputs[index], self.made(name, index)
            target = loss_layout if is_loss else boundary_layout
            seconds = [self.prices.conversion(spec, own, target(own)) for own in made.layouts]
            columns = conversion_columns((False,) * len(RECOMPUTE_MODES))
            self._boundaries[key] = Boundary(False, _of_layouts(name, made, seconds, columns))
        return self._boundaries[key]

    def _incoming(self, ref: Ref, first: Use) -> Boundary:
        """Return the transfer seconds of a value received in the layout its first use needs."""
        spec = self.structure.graph.spec(ref)
        key = (spec, first)
        if key not in self._boundaries:
            options = self.received(first)
            seconds = [self.prices.transfer(spec, each, self.link) for each in options.layouts]
            term = _of_layouts(first.node, options, seconds, received_columns())
            self._boundaries[key] = Boundary(True, term)
        return self._boundaries[key]

    def least_wait(self, run: Run, zero: int, num_microbatches: int) -> float:
        """Return a lower bound of the seconds per micro-batch that a stage waits for the parameter
        gathers of its first block and the gradient sums of its last, which no compute hides."""
        key = run.kinds[0], run.kinds[-1], run.shared, zero, num_microbatches
        if key not in self._least_waits:
            self._least_waits[key] = self._least_wait(run, zero, num_microbatches)
        return self._least_waits[key]

    def _least_wait(self, run: Run, zero: int, num_microbatches: int) -> float:
        total, shared = 0.0, [self.shared(name) for name in run.shared]
        ends: Sequence[tuple[str, Sequence[Decision]]]
        ends = ((run.kinds[0], shared), (run.kinds[-1], ()))
        for (kind, others), weights in zip(ends, wait_weights(num_microbatches), strict=True):
            own = self.kind(kind)
            costs = own.split(own.amounts.seconds[zero] @ weights)
            costs += [each.amounts.seconds[zero] @ weights for each in others]
            total += sum(float(cost.min()) for cost in costs)
            total += float(own.constant[zero] @ weights)
        return total


def _of_layouts(
    node: str, options: Options, entries: Sequence[Sequence[float]], columns: Floats
) -> Term:
    """Return a term of one value, with an entry for each of its layouts."""
    numbers = np.array(entries, dtype=np.float64)[None]
    return Term(None, (Side(node, options.of_choice),), numbers, columns)


def maker_of(edge: Edge) -> str:
    """Return the node whose layouts decide how an edge's value arrives: the node that makes it, or
    the first use of a value that the stage receives."""
    return edge.name if edge.first is None else edge.first.node


def loss_layout(layout: Layout) -> Layout:
    """Return the layout of the loss: whole on every axis."""
    return (INVARIANT,) * len(layout)
