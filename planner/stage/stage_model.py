"""Tables of a stage's mesh: decisions per kind, edges, kept storages, and their costs.

In: the graph's structure, prices on a mesh, restrictions of its axes. Out: for a kind of block its
decisions and the edges inside it; for an edge the conversions between the layouts that its two ends
may have. All tables are made on first use and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from ...cost_model.cluster.cluster import Link
from ..costs.choices import Restriction
from ..costs.conversions import conversion_seconds
from ..costs.kept_bytes import (
    Part,
    kept_parts,
    read_parts,
    replay,
    saved_parts,
    weight_grad_parts,
    weight_grad_seconds,
    working_bytes,
)
from ..costs.price_cache import ByIdentity, PriceCache
from ..costs.prices import Prices, Seconds
from ..costs.seconds import wait_weights
from ..graph.graph import Node, Ref, TensorSpec
from ..graph.layout import INVARIANT, Layout, NodeLayout, boundary_layout, splits
from ..integer_programs.ilp import merge_classes
from ..integer_programs.program import Ints, classes_of
from .decisions import Choice, Decision, Floats, decide, parameter_decision
from .kind_model import Kept as Kept
from .kind_model import KindModel as KindModel
from .kind_model import SavedTensors
from .structure import Edge, Run, Structure, Use

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Boundary:
    """A value that a stage sends or receives, or the loss. ``seconds[choice, direction]`` (forward,
    backward) of its conversion or transfer, by the layout choice of ``node``."""

    node: str
    is_received: bool
    seconds: Floats


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


@dataclass(frozen=True, slots=True)
class Merged:
    """Conversions of a value read by a block, where layouts that cost the same form a class: the
    class of each choice of the value (``source``) and of each use, and the seconds between
    classes."""

    source: Ints
    uses: tuple[Ints, ...]
    forward: Floats
    backward: Floats


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
    _merged: dict[object, Merged] = field(default_factory=dict, repr=False)
    _weight_grads: dict[object, WeightGrads] = field(default_factory=dict, repr=False)
    _repeats: dict[Edge, tuple[bool, bool]] = field(default_factory=dict, repr=False)
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
        graph = self.structure.graph
        block = self.structure.blocks.kinds[kind]
        decisions = decide(block, graph, self.prices, self.restriction, merge=self.merge)
        decisions += tuple(self._parameter(name) for name in self.structure.own_parameters(block))
        where = {name: i for i, decision in enumerate(decisions) for name in decision.members}
        return KindModel(
            kind,
            decisions,
            where,
            self._edges_inside(kind, where),
            bool(block.parameters),
            self._holder(kind, decisions),
        )

    def _edges_inside(self, kind: str, where: Mapping[str, int]) -> tuple[Edge, ...]:
        graph = self.structure.graph
        block = self.structure.blocks.kinds[kind]
        own = set(block.nodes)
        uses: dict[Ref, list[Use]] = {}
        for name in block.nodes:
            for position, ref in enumerate(graph[name].inputs):
                if ref.name in own and where[ref.name] != where[name]:
                    uses.setdefault(ref, []).append(Use(kind, name, position))
        return tuple(Edge("block", ref.name, ref.index, tuple(u)) for ref, u in uses.items())

    def _holder(self, kind: str, decisions: Sequence[Decision]) -> Callable[..., SavedTensors]:
        """Return a cached function (decision, choice) → ``SavedTensors`` for a kind of block."""
        graph, prices = self.structure.graph, self.prices
        again = replay(self.structure.blocks.kinds[kind], graph, prices)
        by_choice: dict[tuple[int, int], SavedTensors] = {}
        by_layout: dict[tuple[str, int], SavedTensors] = {}
        by_split = prices.cache.held.setdefault((graph.batch_size, prices.mesh.shape), {})

        def of_layout(node: Node, layout: NodeLayout) -> SavedTensors:
            key = (node.name, id(layout))  # by identity: hashing a layout takes longer
            found = by_layout.get(key)
            if found is None:
                own = (node.name, splits(layout))
                if own not in by_split:
                    by_split[own] = SavedTensors(
                        saved_parts(node, layout, graph, prices),
                        working_bytes(node, layout, graph, prices),
                        kept_parts(node, layout, graph, prices, of=again),
                        read_parts(node, layout, graph, prices),
                    )
                found = by_layout[key] = by_split[own]
            return found

        def held(number: int, choice: int) -> SavedTensors:
            if (number, choice) not in by_choice:
                decision = decisions[number]
                layouts = decision.choices[choice].layouts
                nodes = [graph[name] for name in decision.members if graph[name].kind == "op"]
                own = [of_layout(node, layouts[node.name]) for node in nodes]
                by_choice[number, choice] = SavedTensors(
                    _distinct(held.saved for held in own),
                    max((held.working_bytes for held in own), default=0),
                    _distinct(held.selected for held in own),
                    _distinct(held.read for held in own),
                )
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

    def repeats(self, edge: Edge) -> tuple[bool, bool]:
        """Return, by ``RECOMPUTE_MODES``, whether recomputation repeats the value's conversion."""
        if edge not in self._repeats:
            block = self.structure.blocks.kinds[edge.uses[0].kind]
            own = replay(block, self.structure.graph, self.prices)
            self._repeats[edge] = own.repeats((use.node, use.position) for use in edge.uses)
        return self._repeats[edge]

    def spec(self, edge: Edge) -> TensorSpec:
        return self.structure.graph[edge.name].outputs[edge.index]

    def targets(self, edge: Edge) -> tuple[tuple[Layout, ...], tuple[Ints, ...]]:
        """Return the distinct layouts that a value's uses in a block may need, and for each use the
        index of the layout by choice."""
        found = self._targets(edge)
        return found.layouts, found.columns

    def _targets(self, edge: Edge) -> Targets:
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

    def conversions(self, edge: Edge) -> tuple[Floats, Floats]:
        """Return two matrices of seconds, forward and backward, to convert a value that a block
        reads from each layout of ``source`` to each of ``targets``."""
        sources, targets = self.source(edge).layouts, self._targets(edge).layouts
        spec, prices = self.spec(edge), self.prices
        return prices.converted.matrices.find(
            (spec,),
            (sources, targets),
            lambda: conversion_seconds(prices, spec, sources, targets),
        )

    def merged(self, edge: Edge) -> Merged:
        """Return the seconds of converting a value that a block reads, with layouts that cost the
        same merged to classes."""
        found = self._merged.get(edge)
        if found is None:
            source, targets = self.source(edge), self._targets(edge)
            rows, columns, reduced = self.prices.converted.merged.find(
                (self.spec(edge), targets.alone),
                (source.layouts, targets.layouts),
                lambda: merge_classes(
                    np.stack(self.conversions(edge)), merge_columns=targets.alone
                ),
            )
            found = Merged(
                rows[source.of_choice],
                tuple(columns[own] for own in targets.columns),
                reduced[0],
                reduced[1],
            )
            self._merged[edge] = found
        return found

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
            rows = [self.prices.conversion(spec, own, target(own)) for own in made.layouts]
            self._boundaries[key] = Boundary(name, False, np.array(rows)[made.of_choice])
        return self._boundaries[key]

    def _incoming(self, ref: Ref, first: Use) -> Boundary:
        """Return the transfer seconds of a value received in the layout its first use needs."""
        spec = self.structure.graph.spec(ref)
        key = (spec, first)
        if key not in self._boundaries:
            received = self.received(first)
            rows = [self.prices.transfer(spec, each, self.link) for each in received.layouts]
            self._boundaries[key] = Boundary(first.node, True, np.array(rows)[received.of_choice])
        return self._boundaries[key]

    def block_sync(self, kind: str, zero: int) -> Seconds:
        """Return the latencies of a block's parameter gathers and gradient sums; 0 without any."""
        if not self.kind(kind).has_parameters:
            return Seconds()
        return self.prices.block_sync(zero)

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
            decisions = [*self.kind(kind).decisions, *others]
            total += sum(float((each.seconds[zero] @ weights).min()) for each in decisions)
            total += float(np.array(self.block_sync(kind, zero)) @ weights)
        return total


def _distinct(parts: Iterable[tuple[Part, ...]]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(part for own in parts for part in own))


def loss_layout(layout: Layout) -> Layout:
    """Return the layout of the loss: whole on every axis."""
    return (INVARIANT,) * len(layout)
