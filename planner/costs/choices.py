"""Strategies of a node on a whole mesh: a strategy per axis, combined and pruned.

In: a node, the rules, a mesh, and restrictions of its axes. Out: the node's layouts with the
collectives they need inside. Only combinations whose splits divide every tensor are offered; of two
with equal layouts the first in the rules' order is kept, but causal attention is offered both
balanced and not, and tokens are offered sent to experts at once and in halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TypeVar

from ..dims.batch import rows_apart
from ..graph.expert_dims import (
    FIRST_WEIGHT,
    ExpertDims,
    by_experts,
    expert_dims,
    is_expert_layer,
    router_nodes,
)
from ..graph.graph import Graph, Node, TensorSpec
from ..graph.layout import (
    BALANCED,
    HALVED,
    INVARIANT,
    REPLICATE,
    RINGS,
    SENT,
    SLICED,
    AxisStrategy,
    InnerCollective,
    Layout,
    NodeLayout,
    Placement,
    balanced_axes,
    combine,
    divides,
    is_halved,
    keeps_groups,
    shard,
)
from ..graph.positions import Dims, by_entries, features_only, position_dims, positions_where_whole
from ..ops.attention import is_attention
from ..ops.experts import group_limit, sent_strategies
from ..requests.features import Features, allowed, attention_ways
from ..requests.pins import Pins, keep_pinned
from .conversions import batch_split, batch_whole, parameters_split, positions_split
from .expert_prices import Inner
from .price_cache import ByIdentity, find, number_of
from .prices import Prices

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeStrategy:
    """Strategy of an op on a mesh: layouts of its inputs and outputs. ``strategies``: the number,
    for each mesh axis, among the op's strategies on this axis. ``num_inner``: number of collectives
    inside the op."""

    layout: NodeLayout
    strategies: tuple[int, ...] = ()
    num_inner: int = 0


@dataclass(frozen=True, slots=True)
class Restriction:
    """Permitted uses of the axes of a mesh. Fields other than ``sequence_parallel``, ``pins`` and
    ``features`` list axes by number.

    Axes of ``split_batch``: every value with a batch dimension is split along it, and parameters
    are replicated. ``split_parameters``: no value is split along the batch; every parameter of two
    or more dimensions that the axis divides is split, and used split if the op can;
    ``sequence_parallel`` says whether other values are split along positions there, as in
    Megatron-LM (None: the solver decides). ``split_positions``: every value with positions is split
    along them, and parameters are replicated (context parallelism). ``split_experts``: weights of
    experts are split by expert, all else as in ``split_batch``. ``pins``: layouts that the user
    requires, by node; ``features``: allowed features. ``tokens``: each rank has its own tokens
    in routers. ``folded``: axes other than those of ``split_experts`` on which ranks hold different
    experts and send their tokens to them (None: the solver decides); ``sliced``: on which ranks
    hold slices of the same experts.
    """

    split_batch: tuple[int, ...] = ()
    split_parameters: tuple[int, ...] = ()
    sequence_parallel: bool | None = None
    split_positions: tuple[int, ...] = ()
    pins: Pins = field(default_factory=dict)
    features: Features = field(default_factory=Features)
    split_experts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    folded: tuple[int, ...] | None = None
    sliced: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for equal restrictions."""
        return (
            self.split_batch,
            self.split_parameters,
            self.sequence_parallel,
            self.split_positions,
            tuple(self.pins.items()),
            self.features,
            self.split_experts,
            self.tokens,
            self.folded,
            self.sliced,
        )

    @property
    def given(self) -> tuple[int, ...]:
        """Return the mesh axes on which every value is split by batch, positions or experts."""
        return (*self.split_batch, *self.split_positions, *self.split_experts)


def node_strategies(
    node: Node, graph: Graph, prices: Prices, restriction: Restriction
) -> tuple[NodeStrategy, ...]:
    """Return every permitted strategy of an op on the mesh.

    Two axes may each divide an op but not both together: of 6 samples, one axis splits off 3, which
    the other cannot split by 2. Then the restriction is lifted on the axes of positions; if this is
    not enough, on all axes.
    """
    every_axis = range(len(prices.mesh.shape))
    for free in ((), restriction.split_positions, every_axis):
        found = _matching_strategies(node, graph, prices, restriction, free)
        if found:
            break
    return _as_pinned(node, found, prices, restriction)


def _matching_strategies(
    node: Node, graph: Graph, prices: Prices, restriction: Restriction, free: Sequence[int]
) -> tuple[NodeStrategy, ...]:
    """Return the permitted strategies of an op on the mesh, with no limits on axes ``free``."""
    specs, sizes = input_specs(node, graph), prices.mesh.shape
    loose = Restriction(features=restriction.features)
    per_axis = [
        _numbered(node, graph, axis, prices, loose if axis in free else restriction)
        for axis in range(len(sizes))
    ]
    found: dict[tuple[object, ...], NodeStrategy] = {}
    for chosen in product(*per_axis):
        strategies = tuple(strategy for _, strategy in chosen)
        labels = {strategy.label for strategy in strategies}
        if not keeps_groups(strategies, sizes) or labels >= {SENT, HALVED}:
            continue
        layout = combine(strategies)
        if not specs:
            layout = NodeLayout((), layout.outputs, layout.labels)
        if not divides_all(layout, specs, node.outputs, sizes):
            continue
        num_inner = sum(len(each.collectives) for each in strategies)
        key = (layout.inputs, layout.outputs, balanced_axes(layout), is_halved(layout))
        if key not in found or num_inner < found[key].num_inner:
            found[key] = NodeStrategy(layout, tuple(number for number, _ in chosen), num_inner)
    return tuple(found.values())


def _numbered(
    node: Node, graph: Graph, axis: int, prices: Prices, restriction: Restriction
) -> list[tuple[int, AxisStrategy]]:
    """Return (number, strategy) of the permitted strategies of an op on one axis; numbers count all
    its strategies."""
    allowed_here = _axis_strategies(node, graph, axis, prices, restriction)
    if prices.mesh.shape[axis] == 1:
        return list(enumerate(allowed_here))
    every = strategies_of(node, graph, prices.mesh.shape[axis], prices)
    numbers = {id(strategy): number for number, strategy in enumerate(every)}
    return [(numbers[id(strategy)], strategy) for strategy in allowed_here]


def inner_of(node: Node, graph: Graph, prices: Prices, strategy: NodeStrategy) -> Inner:
    """Return (axis, collective) for all collectives that an op itself runs under ``strategy``."""
    return tuple(
        (axis, item)
        for axis, (number, size) in enumerate(
            zip(strategy.strategies, prices.mesh.shape, strict=True)
        )
        if size > 1
        for item in strategies_of(node, graph, size, prices)[number].collectives
    )


def _as_pinned(
    node: Node, found: tuple[NodeStrategy, ...], prices: Prices, restriction: Restriction
) -> tuple[NodeStrategy, ...]:
    """Return the strategies whose output layout the node's pins allow; all if none does."""
    pins = restriction.pins.get(node.name, ())
    if not pins:
        return found
    made = set(keep_pinned([strategy.layout.outputs[0] for strategy in found], pins, prices.mesh))
    return tuple(strategy for strategy in found if strategy.layout.outputs[0] in made)


def input_specs(node: Node, graph: Graph) -> tuple[TensorSpec, ...]:
    """Return the specs of a node's inputs, in call order."""
    return tuple(graph.spec(ref) for ref in node.inputs)


def inner_collectives(node: Node, graph: Graph, prices: Prices, layout: NodeLayout) -> Inner:
    """Return (axis, collective) for all collectives that an op runs itself with this layout."""
    found: list[tuple[int, InnerCollective]] = []
    balanced = balanced_axes(layout)
    for axis, size in enumerate(prices.mesh.shape):
        inputs = tuple(each[axis] for each in layout.inputs)
        outputs = tuple(each[axis] for each in layout.outputs)
        matching = [
            strategy
            for strategy in strategies_of(node, graph, size, prices)
            if (strategy.inputs, strategy.outputs) == (inputs, outputs)
            and (strategy.label == BALANCED) == (axis in balanced)
        ]
        if matching:
            best = min(matching, key=lambda strategy: len(strategy.collectives))
            found += [(axis, item) for item in best.collectives]
    return tuple(found)


def strategies_of(node: Node, graph: Graph, size: int, prices: Prices) -> tuple[AxisStrategy, ...]:
    """Return every strategy of an op on an axis of ``size`` ranks. Cached for equal ops."""
    form, own = _form(node, graph, prices), prices.assumptions
    hides, limit = own.hides_exchanges, group_limit(node, graph) if own.sends_tokens else (1, 1)

    def make() -> tuple[AxisStrategy, ...]:
        specs, found = input_specs(node, graph), prices.rules.axis_strategies(node, graph, size)
        sent = (
            sent_strategies(node, specs, size, limit, in_halves=hides) if own.sends_tokens else ()
        )
        return (*sent, *found)

    return find(prices.cache.strategies, (form, size, limit, hides), make)


def _form(node: Node, graph: Graph, prices: Prices) -> int:
    """Return a number (from 1) that is equal for ops with equal strategies."""
    return find(
        prices.cache.forms,
        (_class(node, graph, prices), graph.batch_size),
        lambda: number_of(prices.cache.numbers, prices.rules.strategies_form(node, graph)),
    )


def _class(node: Node, graph: Graph, prices: Prices) -> int:
    """Return a number (from 1) that is equal for nodes with equal strategies at every batch size,
    such as the same op in two layers."""

    def make() -> int:
        read = [(graph.batch_dims.get(ref.name), ref.index) for ref in node.inputs]
        form = prices.rules.strategies_form(node, graph)
        return number_of(prices.cache.numbers, (form, graph.batch_dims.get(node.name), *read))

    return find(prices.cache.classes, node.name, make)


def _axis_strategies(
    node: Node, graph: Graph, axis: int, prices: Prices, restriction: Restriction
) -> tuple[AxisStrategy, ...]:
    size = prices.mesh.shape[axis]
    if size == 1:
        num_inputs, num_outputs = len(node.inputs), len(node.outputs)
        return (AxisStrategy("I", (INVARIANT,) * num_inputs, (INVARIANT,) * num_outputs),)
    strategies = strategies_of(node, graph, size, prices)
    if is_attention(node) and axis not in restriction.split_positions:
        strategies = tuple(each for each in strategies if each.label not in RINGS)
    if is_expert_layer(node):
        strategies = expert_strategies(node, graph, axis, prices, restriction)
    if axis in restriction.tokens and node.name in routers_of(graph, prices):
        return positions_split(
            node, batch_whole(node, graph, strategies), dims_on(graph, size, prices)
        )
    if axis not in restriction.given:
        dims = partial(dims_on, graph, size, prices)
        strategies = allowed(node, graph, strategies, dims, restriction.features)
    if axis in restriction.split_batch and (graph.batch_dims or graph.batch_size % size == 0):
        return batch_split(node, batch_dims(graph, prices), strategies)
    if axis in restriction.split_experts:
        by_rows = batch_split(node, batch_dims(graph, prices), strategies)
        found = by_experts(node, strategies, by_rows, experts_on(graph, size, prices))
        return tuple(each for each in found if each.label in (SENT, HALVED)) or found
    if axis in restriction.split_parameters:
        fitting = batch_whole(node, graph, strategies)
        if restriction.sequence_parallel is None:
            return parameters_split(node, graph, fitting)
        return _as_megatron(node, graph, fitting, dims_on(graph, size, prices), restriction)
    if axis in restriction.split_positions:
        return _by_positions(node, graph, strategies, dims_on(graph, size, prices), restriction)
    return strategies


def _by_positions(
    node: Node,
    graph: Graph,
    strategies: tuple[AxisStrategy, ...],
    dims: Dims,
    restriction: Restriction,
) -> tuple[AxisStrategy, ...]:
    """Return the strategies on an axis of context parallelism: they split positions; attention may
    split heads instead, after an all-to-all."""
    whole = batch_whole(node, graph, strategies)
    found = positions_split(node, whole, dims)
    if not is_attention(node):
        return found
    heads = features_only(node, whole, dims)
    by_heads = tuple(each for each in heads if each.inputs[0].is_shard and each.outputs[0].is_shard)
    return attention_ways(found, by_heads, restriction.features)


def expert_strategies(
    node: Node, graph: Graph, axis: int, prices: Prices, restriction: Restriction
) -> tuple[AxisStrategy, ...]:
    """Return the permitted strategies of an expert layer. If the solver decides, it slices experts
    only where they are too few for the ranks: else tokens sent to whole experts are fewer bytes."""
    strategies = strategies_of(node, graph, prices.mesh.shape[axis], prices)
    if restriction.folded is None or axis in restriction.split_experts:
        ranks = prices.mesh.num_ranks([*{axis, *restriction.split_experts}])
        is_few = graph.spec(node.inputs[FIRST_WEIGHT]).shape[0] % ranks > 0
        slices = is_few and axis not in restriction.given
        return tuple(each for each in strategies if slices or each.label != SLICED)
    sliced = (SLICED,) if axis in restriction.sliced else ()
    labels = (SENT, HALVED) if axis in restriction.folded else sliced
    own = tuple(each for each in strategies if each.label in labels)
    if sliced and restriction.sequence_parallel:
        own = tuple(each for each in own if each.inputs[0].is_shard)
    return own or tuple(each for each in strategies if each.label not in (SENT, HALVED, SLICED))


def routers_of(graph: Graph, prices: Prices) -> frozenset[str]:
    """Return the names of the ops and parameters of routers (``router_nodes``). Cached."""
    return find(prices.cache.routers, graph.batch_size, lambda: router_nodes(graph))


def batch_dims(graph: Graph, prices: Prices) -> Mapping[str, tuple[int | None, ...]]:
    """Return, by node, each output's batch dimension, as far as rows are not mixed."""
    if graph.batch_dims:
        return graph.batch_dims
    return find(prices.cache.rows_apart, graph.batch_size, lambda: rows_apart(graph))


def dims_on(graph: Graph, size: int, prices: Prices) -> Dims:
    """Return, for each value, its dimensions of rows and positions, found with the strategies on an
    axis of ``size`` ranks. Cached."""

    def make() -> Dims:
        return position_dims(graph, lambda node: strategies_of(node, graph, size, prices))

    return _by_strategies(prices.cache.position_dims, graph, size, prices, make)


def _by_strategies(
    cache: ByIdentity[T], graph: Graph, size: int, prices: Prices, make: Callable[[], T]
) -> T:
    """Return the result of ``make``, cached for all axis sizes and batch sizes at which every op of
    the graph has the same strategies."""
    lines = (graph.users,)  # the same for all batch sizes of a graph

    def find_classes() -> list[str]:
        return list({_class(node, graph, prices): node.name for node in graph}.values())

    def find_number() -> int:
        names = prices.cache.classes_of.find((), lines, find_classes)
        offered = tuple(
            tuple((each.label, each.inputs, each.outputs) for each in found)
            for found in (strategies_of(graph[name], graph, size, prices) for name in names)
        )
        return number_of(prices.cache.numbers, offered)

    number = prices.cache.offers.find((size,), (graph,), find_number)
    return cache.find((number,), lines, make)


def experts_on(graph: Graph, size: int, prices: Prices) -> ExpertDims:
    """Return the dimensions that index experts, found with strategies on ``size`` ranks. Cached."""

    def make() -> ExpertDims:
        return expert_dims(graph, lambda node: strategies_of(node, graph, size, prices))

    return _by_strategies(prices.cache.expert_dims, graph, size, prices, make)


def _as_megatron(
    node: Node,
    graph: Graph,
    strategies: tuple[AxisStrategy, ...],
    dims: Dims,
    restriction: Restriction,
) -> tuple[AxisStrategy, ...]:
    """Return the strategies of Megatron-LM's tensor parallelism: ops compute with split parameters,
    embedding tables are split by entries, and other values along positions if
    ``restriction.sequence_parallel``."""
    if restriction.sequence_parallel:
        fitting = positions_where_whole(node, strategies, dims)
    else:
        fitting = features_only(node, strategies, dims)
    return by_entries(node, parameters_split(node, graph, fitting), dims)


def divides_all(
    layout: NodeLayout,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    mesh_shape: Sequence[int],
) -> bool:
    """Return whether a layout splits all inputs and outputs of an op evenly."""
    return all(
        divides(spec.shape, each, mesh_shape)
        for spec, each in zip((*inputs, *outputs), (*layout.inputs, *layout.outputs), strict=True)
    )


def held_layouts(
    node: Node, graph: Graph, prices: Prices, restriction: Restriction
) -> tuple[Layout, ...]:
    """Return the layouts in which a parameter may be stored: split or replicated on each axis.

    If positions stay whole (``sequence_parallel`` False) its gradient is the same on all ranks of
    the axis, so it may be ``I`` (replicated with equal gradients).
    """
    shape = node.spec.shape
    same = INVARIANT if restriction.sequence_parallel is False else REPLICATE
    options: list[list[Placement]] = []
    own = restriction.folded
    must_split = (*restriction.split_experts, *(own or ()))
    may_split = restriction.split_positions if own is None else ()
    for axis, size in enumerate(prices.mesh.shape):
        splits = [
            shard(dim)
            for dim, length in enumerate(shape)
            if length and length % size == 0 and not node.spec.stored
        ]
        if node.name in _expert_weights(graph, axis, prices, must_split):
            options.append([shard(0)])
        elif axis in restriction.tokens and node.name in routers_of(graph, prices):
            options.append([REPLICATE])
        elif node.name in _expert_weights(graph, axis, prices, may_split):
            options.append([*(each for each in splits if each.dim == 0), REPLICATE])
        elif axis in restriction.given or size == 1:
            options.append([REPLICATE])
        elif axis in restriction.split_parameters and len(shape) >= 2 and splits:
            options.append(list(splits))
        elif axis in restriction.split_parameters:
            options.append([*splits, same])
        else:
            options.append([*splits, REPLICATE])
    found = [each for each in product(*options) if divides(shape, each, prices.mesh.shape)]
    return keep_pinned(found, restriction.pins.get(node.name, ()), prices.mesh)


def _expert_weights(
    graph: Graph, axis: int, prices: Prices, axes: Sequence[int]
) -> Mapping[str, int]:
    """Return the weights of experts, with numbers of experts, if the axis is among ``axes`` and has
    several ranks."""
    size = prices.mesh.shape[axis]
    return experts_on(graph, size, prices).weights if axis in axes and size > 1 else {}


def held_for(wanted: Layout, held: Sequence[Layout]) -> tuple[Layout, ...]:
    """Return the layouts of ``held`` that are worth storing a parameter in that is used as
    ``wanted``.

    A parameter used split is stored split. A parameter used whole is stored whole or, on any axis,
    split along the first possible dimension and gathered. Other layouts cost more time and bytes.
    """
    serving = [layout for layout in held if _serves(wanted, layout)]
    if not serving:
        return tuple(held)
    first: dict[tuple[bool, ...], Layout] = {}
    for layout in serving:
        first.setdefault(tuple(placement.is_shard for placement in layout), layout)
    return tuple(first.values())


def _serves(wanted: Layout, held: Layout) -> bool:
    """Return whether layout ``held`` equals ``wanted`` on every axis that ``wanted`` splits."""
    return all(own == want for want, own in zip(wanted, held, strict=True) if want.is_shard)
