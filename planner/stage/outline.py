"""Decision spaces: the decisions of a kind of block as numbers, before they are priced.

In: a block, the graph, a mesh and restrictions of its axes. Out: a ``DecisionSpace``: for each
decision its members and candidates (the layouts of its members), each candidate's strategy by node
and holding by parameter, and the candidates that look equal from outside. It does not depend on
prices, so one space serves every mesh and number of rows with the same ``structure_key``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ..costs.choices import (
    NodeStrategy,
    Restriction,
    dims_on,
    expert_strategies,
    experts_on,
    held_for,
    held_layouts,
    input_specs,
    node_strategies,
    strategies_of,
)
from ..costs.kept_bytes import RECOMPUTE_MODES, replay
from ..costs.price_cache import find, number_of
from ..costs.prices import Prices
from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Block, Graph, Node, Ref
from ..graph.layout import AxisStrategy, Layout, NodeLayout, splits
from ..graph.positions import Dims
from ..requests.pins import num_broken

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a decision (nodes whose layouts are chosen together): a layout for each."""

    layouts: Mapping[str, NodeLayout]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Decision (nodes whose layouts are chosen together) with all its choices, before they are
    priced. ``members``: op nodes in order, then parameters."""

    members: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter that is stored in layout ``held`` and used in layout ``wanted``."""

    parameter: str
    held: Layout
    wanted: Layout


@dataclass(frozen=True)
class DecisionSpace:
    """All decisions (nodes whose layouts are chosen together) of a kind of block. Their candidate
    choices are numbered through.

    ``computes``: distinct computations (a node with layouts of equal splits); ``computes_as`` maps
    each strategy's number to one; ``inner``: strategies with collectives inside. ``rounds``: arrays
    by candidate of the strategy number of its first, second, … op; ``skipped_rounds``: likewise for
    ops that recomputation skips (for each of ``RECOMPUTE_MODES``); ``held_rounds``: likewise for
    holdings of its parameters. A number after the last means none. ``held``: distinct stored
    parameters; ``held_as`` maps each holding to one. ``alike``: candidates of one decision with
    equal layouts towards other decisions, ``[group, member]``, an array per group size. ``broken``
    counts violated pins.
    """

    decisions: tuple[Candidates, ...]
    computes: tuple[tuple[str, NodeLayout], ...]
    computes_as: Ints
    inner: tuple[tuple[int, str, NodeStrategy], ...]
    rounds: tuple[Ints, ...]
    skipped_rounds: tuple[tuple[Ints, ...], ...]
    holdings: tuple[Holding, ...]
    held: tuple[tuple[str, Layout], ...]
    held_as: Ints
    held_rounds: tuple[Ints, ...]
    alike: tuple[Ints, ...]
    broken: Ints
    pruned: dict[bytes, tuple[Candidates, ...]] = field(default_factory=dict, repr=False)

    @property
    def bounds(self) -> list[int]:
        """Return, for each decision, one more than its last choice's number."""
        found: list[int] = np.cumsum([len(each.choices) for each in self.decisions]).tolist()
        return found

    def kept(self, rows: Ints) -> tuple[Candidates, ...]:
        """Return the decisions with only the layout choices numbered ``rows``. Cached."""
        key = rows.tobytes()
        if key not in self.pruned:
            starts = [0, *self.bounds[:-1]]
            self.pruned[key] = tuple(
                Candidates(each.members, tuple(each.choices[row - start] for row in own.tolist()))
                for each, start, own in zip(self.decisions, starts, self.split(rows), strict=True)
            )
        return self.pruned[key]

    def split(self, rows: Ints) -> list[Ints]:
        """Split ascending numbers of layout choices into an array for each decision."""
        return np.split(rows, np.searchsorted(rows, self.bounds[:-1]))


def decision_space(
    block: Block, graph: Graph, prices: Prices, restriction: Restriction, *, merge: bool = True
) -> DecisionSpace:
    """Build the layout decisions of a block, without prices, in the order of their first nodes.
    ``merge``: views join the decision whose result they read."""
    skipped = replay(block, graph, prices).skipped
    builder = _Builder(graph, prices, restriction, tuple(skipped[mode] for mode in RECOMPUTE_MODES))
    for draft in merge_nodes(block, graph, prices, restriction, merge=merge):
        builder.add(draft)
    return builder.build()


@dataclass(slots=True)
class _Draft:
    members: list[str]
    options: list[dict[str, NodeStrategy]]


def is_own_parameter(ref: Ref, node: Node, graph: Graph) -> bool:
    """Return whether ``ref`` is a parameter that is used by ``node`` only, and once."""
    return (
        graph[ref.name].kind == "parameter"
        and graph.users[ref.name] == (node.name,)
        and sum(other.name == ref.name for other in node.inputs) == 1
    )


def merge_nodes(
    block: Block, graph: Graph, prices: Prices, restriction: Restriction, *, merge: bool
) -> list[_Draft]:
    """Return groups of op nodes whose strategies are chosen together, each with the possible
    choices. With ``merge`` views join the group whose result they read."""
    found: list[_Draft] = []
    home: dict[str, int] = {}
    own = [
        name
        for name in block.nodes
        for ref in graph[name].inputs
        if is_own_parameter(ref, graph[name], graph)
    ]
    for name in block.nodes:
        node = graph[name]
        options = node_strategies(node, graph, prices, restriction)
        leader = _followed(node, graph, home, prices) if merge and name not in own else None
        if leader is not None and _follow(found[leader], node, options, home, leader):
            continue
        home[name] = len(found)
        found.append(_Draft([name], [{name: strategy} for strategy in options]))
    return found


def _followed(node: Node, graph: Graph, home: Mapping[str, int], prices: Prices) -> int | None:
    """Return the number of the group that ``node``, a view of results of one group, may join; else
    None. ``home`` maps nodes to groups."""
    read = [ref for ref in node.inputs if graph[ref.name].kind not in ("constant", "buffer")]
    if not read or any(ref.name not in home or not _read_once(ref, graph) for ref in read):
        return None
    leaders = {home[ref.name] for ref in read}
    if len(leaders) != 1 or not is_light(node, graph, prices):
        return None
    return leaders.pop()


def _read_once(ref: Ref, graph: Graph) -> bool:
    """Return whether a single node reads a value, so that no other shares its conversion."""
    return sum(ref in graph[user].inputs for user in graph.users[ref.name]) == 1


def _follow(
    draft: _Draft, node: Node, options: Sequence[NodeStrategy], home: dict[str, int], leader: int
) -> bool:
    """Add ``node`` to the group number ``leader`` and return True, if one of the node's strategies
    (``options``) matches each choice of the group; else return False."""
    extended: list[dict[str, NodeStrategy]] = []
    refs = node.inputs
    for option in draft.options:
        matching = [
            strategy
            for strategy in options
            if all(
                home.get(ref.name) != leader or option[ref.name].layout.outputs[ref.index] == layout
                for ref, layout in zip(refs, strategy.layout.inputs, strict=True)
            )
        ]
        if not matching:
            return False
        extended += [{**option, node.name: strategy} for strategy in matching]
    if len(extended) > 2 * len(draft.options) + 8:
        return False
    home[node.name] = leader
    draft.members.append(node.name)
    draft.options = extended
    return True


@dataclass
class _Builder:
    """Builder of a block's layout decisions (``DecisionSpace``), added one by one."""

    graph: Graph
    prices: Prices
    restriction: Restriction
    skipped: tuple[frozenset[str], ...]
    decisions: list[Candidates] = field(default_factory=list)
    computes: dict[object, int] = field(default_factory=dict)
    first: list[tuple[str, NodeLayout]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    computes_as: list[int] = field(default_factory=list)
    inner: list[tuple[int, str, NodeStrategy]] = field(default_factory=list)
    holdings: dict[Holding, int] = field(default_factory=dict)
    rows: list[tuple[list[int], list[list[int]], list[int]]] = field(default_factory=list)
    alike: list[list[int]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)

    def add(self, draft: _Draft) -> None:
        graph = self.graph
        parameters = [
            (name, position, ref)
            for name in draft.members
            for position, ref in enumerate(graph[name].inputs)
            if is_own_parameter(ref, graph[name], graph)
        ]
        layouts = {
            ref.name: held_layouts(graph[ref.name], graph, self.prices, self.restriction)
            for _, _, ref in parameters
        }
        choices: list[Choice] = []
        for option in draft.options:
            partial: list[tuple[dict[str, NodeLayout], list[int]]] = [
                ({name: strategy.layout for name, strategy in option.items()}, [])
            ]
            for name, position, ref in parameters:
                wanted = option[name].layout.inputs[position]
                partial = [
                    (
                        {**own, ref.name: NodeLayout((), (held,))},
                        [*numbers, self._holding(Holding(ref.name, held, wanted))],
                    )
                    for own, numbers in partial
                    for held in held_for(wanted, layouts[ref.name])
                ]
            ops = [self._number(name, strategy) for name, strategy in option.items()]
            skipped = [
                [self._number(name, strategy) for name, strategy in option.items() if name in own]
                for own in self.skipped
            ]
            for own, numbers in partial:
                choices.append(Choice(own))
                self.rows.append((ops, skipped, numbers))
                self.broken.append(self._broken(own))
        members = (*draft.members, *(ref.name for _, _, ref in parameters))
        self._compare(members, choices)
        self.decisions.append(Candidates(members, tuple(choices)))

    def _number(self, name: str, strategy: NodeStrategy) -> int:
        """Return the number of a node's strategy; new strategies are recorded. Strategies of a node
        with equal splits share a computation."""
        number = self.numbers.get(id(strategy))
        if number is None:
            number = self.numbers[id(strategy)] = len(self.computes_as)
            key = (name, splits(strategy.layout))
            as_number = self.computes.setdefault(key, len(self.first))
            if as_number == len(self.first):
                self.first.append((name, strategy.layout))
            self.computes_as.append(as_number)
            if strategy.num_inner:
                self.inner.append((number, name, strategy))
        return number

    def _holding(self, holding: Holding) -> int:
        return self.holdings.setdefault(holding, len(self.holdings))

    def _broken(self, layouts: Mapping[str, NodeLayout]) -> int:
        pins = self.restriction.pins
        return sum(
            num_broken(layout.outputs[0], pins[name], self.prices.mesh)
            for name, layout in layouts.items()
            if name in pins
        )

    def _compare(self, members: Sequence[str], choices: Sequence[Choice]) -> None:
        """Record the groups of a decision's choices with equal layouts towards other decisions."""
        start, groups = len(self.rows) - len(choices), dict[object, list[int]]()
        exposed = _exposed(members, self.graph)
        for number, choice in enumerate(choices, start):
            own = [choice.layouts[name] for name in exposed]
            key = tuple((layout.inputs, layout.outputs) for layout in own)
            groups.setdefault(key, []).append(number)
        self.alike += [group for group in groups.values() if len(group) > 1]

    def build(self) -> DecisionSpace:
        sizes = sorted({len(group) for group in self.alike})
        ops, skipped, holdings = zip(*self.rows, strict=True)
        pairs = [(each.parameter, each.held) for each in self.holdings]
        held = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        return DecisionSpace(
            tuple(self.decisions),
            tuple(self.first),
            np.array(self.computes_as),
            tuple(self.inner),
            _rounds(ops, len(self.computes_as)),
            tuple(_rounds(own, len(self.computes_as)) for own in zip(*skipped, strict=True)),
            tuple(self.holdings),
            tuple(held),
            np.array([held[pair] for pair in pairs], dtype=np.int64),
            _rounds(holdings, len(self.holdings)),
            tuple(np.array([g for g in self.alike if len(g) == size]) for size in sizes),
            np.array(self.broken),
        )


def _rounds(rows: Sequence[Sequence[int]], none: int) -> tuple[Ints, ...]:
    """Transpose rows of different lengths into arrays of their first, second, … entries; ``none``
    where a row has no such entry."""
    return tuple(np.array(column) for column in zip_longest(*rows, fillvalue=none))


def _exposed(members: Sequence[str], graph: Graph) -> tuple[str, ...]:
    """Return the nodes among ``members`` that read from, or are read by, nodes outside."""
    inside = set(members)
    found = []
    for name in members:
        node = graph[name]
        read_outside = any(user not in inside for user in graph.users[name])
        reads_outside = any(ref.name not in inside for ref in node.inputs)
        if read_outside or reads_outside or name == graph.loss.name:
            found.append(name)
    return tuple(found)


def structure_key(
    block: Block, graph: Graph, prices: Prices, restriction: Restriction
) -> tuple[object, ...]:
    """Return a key that is equal if the layout decisions of a block (``DecisionSpace``) are equal.

    It is equal for all meshes and numbers of rows for which the block's nodes have the same
    strategies on every axis (ignoring bytes of collectives) and the same products of axes divide
    their dimensions. ``prices.cache`` belongs to one graph and its batch sizes.
    """
    sizes = prices.mesh.shape
    axes = tuple(_axis_key(block, graph, axis, prices, restriction) for axis in range(len(sizes)))
    pins = (prices.mesh, tuple(restriction.pins.items())) if restriction.pins else None
    rows = None if graph.batch_dims else graph.batch_size
    return (
        block.nodes,
        axes,
        _divided(block, graph, prices),
        _light(block, graph, prices),
        restriction.sequence_parallel,
        restriction.features.denied,
        pins,
        rows,
    )


def _axis_key(
    block: Block, graph: Graph, axis: int, prices: Prices, restriction: Restriction
) -> tuple[object, ...]:
    """Return a key of a mesh axis: its permitted uses, and the strategies of the block's nodes."""
    size = prices.mesh.shape[axis]
    given = (
        restriction.split_batch,
        restriction.split_parameters,
        restriction.split_positions,
        restriction.split_experts,
        restriction.folded or (),
    )
    roles = tuple(axis in each for each in given)
    if size == 1:
        return (1, roles)
    layers = (graph[name] for name in block.nodes if is_expert_layer(graph[name]))
    ways = tuple(
        frozenset(each.label for each in expert_strategies(layer, graph, axis, prices, restriction))
        for layer in layers
    )
    rows_fit = bool(graph.batch_dims) or graph.batch_size % size == 0
    denied = restriction.features.denied
    by_positions = bool(denied) or (roles[1] or roles[2])
    return (
        roles,
        ways,
        restriction.folded is None,
        rows_fit,
        _strategies_key(block, graph, size, prices),
        _dims_key(block, graph, size, prices) if by_positions else None,
        _experts_key(block, graph, size, prices) if roles[2] or roles[3] else None,
    )


def _trait_number(prices: Prices, key: tuple[object, ...], make: Callable[[], object]) -> int:
    """Return a number that is equal for equal results of ``make``; cached by ``key``."""
    numbers = prices.cache.numbers
    number: int = find(prices.cache.traits, key, lambda: number_of(numbers, (*key[:2], make())))
    return number


def _strategies_key(block: Block, graph: Graph, size: int, prices: Prices) -> int:
    def make() -> object:
        return tuple(
            tuple(map(_form, strategies_of(graph[name], graph, size, prices)))
            for name in block.nodes
        )

    return _trait_number(prices, ("strategies of", block.nodes, size, graph.batch_size), make)


def _form(strategy: AxisStrategy) -> tuple[object, ...]:
    """Return a key of a strategy: everything except the bytes of its collectives."""
    inner = tuple((each.kind, each.backward) for each in strategy.collectives)
    return strategy.label, strategy.inputs, strategy.outputs, inner, strategy.groups


def _dims_key(block: Block, graph: Graph, size: int, prices: Prices) -> int:
    def make() -> object:
        dims: Dims = dims_on(graph, size, prices)
        return tuple(dims.get(ref) for ref in _refs(block, graph))

    return _trait_number(prices, ("dims of", block.nodes, size, graph.batch_size), make)


def _experts_key(block: Block, graph: Graph, size: int, prices: Prices) -> int:
    def make() -> object:
        found = experts_on(graph, size, prices)
        return tuple((found.dims.get(ref), ref in found.views) for ref in _refs(block, graph))

    return _trait_number(prices, ("experts of", block.nodes, size, graph.batch_size), make)


def _refs(block: Block, graph: Graph) -> list[Ref]:
    found: list[Ref] = []
    for name in block.nodes:
        node = graph[name]
        found += [*node.inputs, *(Ref(name, index) for index in range(len(node.outputs)))]
    return found


def _divided(block: Block, graph: Graph, prices: Prices) -> bytes:
    """Return, as packed bits, whether each product of sizes of mesh axes divides each dimension of
    the block's tensors."""

    def make() -> Ints:
        nodes = [graph[name] for name in block.nodes]
        specs = [spec for node in nodes for spec in (*input_specs(node, graph), *node.outputs)]
        return np.array([size for spec in specs for size in spec.shape], dtype=np.int64)

    dims: Ints = find(prices.cache.traits, ("sizes", block.nodes, graph.batch_size), make)
    products = [1]
    for size in prices.mesh.shape:
        products += [size * each for each in products]
    divides = dims[:, None] % np.array(products[1:])[None, :] == 0
    return np.packbits(np.column_stack([divides, dims == 0])).tobytes()


def _light(block: Block, graph: Graph, prices: Prices) -> tuple[bool, ...]:
    """Return, for each node of a block, whether it is a view (``is_light``)."""
    light: tuple[bool, ...] = find(
        prices.cache.traits,
        ("light", block.nodes, graph.batch_size),
        lambda: tuple(is_light(graph[name], graph, prices) for name in block.nodes),
    )
    return light


def is_light(node: Node, graph: Graph, prices: Prices) -> bool:
    """Return whether an op does no forward work and writes no more than it reads: a view."""
    read = [ref for ref in node.inputs if graph[ref.name].kind not in ("constant", "buffer")]
    if not read or any(graph[ref.name].kind != "op" for ref in read):
        return False
    num_bytes = sum(spec.num_bytes for spec in node.outputs)
    if num_bytes > max(graph.spec(ref).num_bytes for ref in read):
        return False
    work = prices.rules.work(node, input_specs(node, graph), node.outputs)
    return not work.flops_forward and not work.bytes_forward
