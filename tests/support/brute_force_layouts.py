"""Every layout that a node may run in and a parameter be held in: straight from the op rules.

In: a node, its graph, the prices on a mesh, the axes that must split the batch, and the axes that
must split positions. Out: every combination of one strategy per axis whose splits divide all
tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Blocks, Graph, Node, Ref
from autoparallel.planner.graph.layout import (
    INVARIANT,
    REPLICATE,
    RINGS,
    AxisStrategy,
    InnerCollective,
    Layout,
    NodeLayout,
    balanced_axes,
    combine,
    divides,
    shard,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cuts = Mapping[int, Mapping[str, Sequence[int]]]
"""By axis that must split positions: the dimensions of each value that count as positions."""

NO_CUTS: Cuts = {}

ZEROS = (0, 1, 2, 3)
MOST_ASSIGNMENTS = 250_000


class TooManyError(Exception):
    """The product of layouts is too large to try."""


@dataclass(frozen=True)
class Option:
    """One way to run a node, with how the parameters that it alone uses are held."""

    layout: NodeLayout
    inner: tuple[tuple[int, InnerCollective], ...] = ()
    held: Mapping[str, Layout] = field(default_factory=dict)


def op_options(
    node: Node, graph: Graph, prices: Prices, batch_axes: Sequence[int], cuts: Cuts
) -> list[Option]:
    """Every combination of the rules' strategies whose splits divide all tensors."""
    specs = [*(graph.spec(ref) for ref in node.inputs), *node.outputs]
    shape = prices.mesh.shape
    per_axis = [
        _along_positions(node, cuts[axis], rules.axis_strategies(node, graph, size))
        if axis in cuts
        else _axis_strategies(node, graph, size, batch=axis in batch_axes)
        for axis, size in enumerate(shape)
    ]
    found: dict[tuple[object, ...], Option] = {}
    for strategies in product(*per_axis):
        assert not any(each.groups for each in strategies)
        made = [each.outputs for each in strategies]
        if any(each.label in RINGS and made.count(each.outputs) > 1 for each in strategies):
            continue
        layout = combine(strategies)
        if not node.inputs:
            layout = NodeLayout((), layout.outputs)
        layouts = (*layout.inputs, *layout.outputs)
        if not all(divides(s.shape, each, shape) for s, each in zip(specs, layouts, strict=True)):
            continue
        inner = tuple((axis, c) for axis, each in enumerate(strategies) for c in each.collectives)
        key = (layout.inputs, layout.outputs, balanced_axes(layout))
        if key not in found or len(inner) < len(found[key].inner):
            found[key] = Option(layout, inner)
    return list(found.values())


def _axis_strategies(node: Node, graph: Graph, size: int, *, batch: bool) -> Sequence[AxisStrategy]:
    if size == 1:
        whole = (INVARIANT,)
        return [AxisStrategy("I", whole * len(node.inputs), whole * len(node.outputs))]
    offered = [each for each in rules.axis_strategies(node, graph, size) if each.label not in RINGS]
    if not batch or not graph.batch_dims:
        return offered
    dims = [graph.batch_dims[ref.name][ref.index] for ref in node.inputs]
    dims += graph.batch_dims[node.name]
    fitting = [
        each
        for each in offered
        if all(
            placement == shard(dim) if dim is not None else not placement.is_shard
            for dim, placement in zip(dims, (*each.inputs, *each.outputs), strict=True)
        )
    ]
    return fitting or offered


def _along_positions(
    node: Node, dims: Mapping[str, Sequence[int]], offered: Sequence[AxisStrategy]
) -> Sequence[AxisStrategy]:
    """Keep the strategies that split an op's output along its positions, if it has them; else its
    inputs along theirs. Attention may split heads, its second dimension, instead."""
    own = {name: [shard(dim) for dim in each] for name, each in dims.items()}
    if node.name in own:
        heads = [shard(1)] if "scaled_dot_product_attention" in node.op else []
        return [each for each in offered if each.outputs[0] in [*own[node.name], *heads]]
    return [
        each
        for each in offered
        if all(
            placement in own[ref.name]
            for ref, placement in zip(node.inputs, each.inputs, strict=True)
            if ref.name in own
        )
    ]


def held_options(node: Node, prices: Prices, batch_axes: Sequence[int]) -> list[Layout]:
    """Every layout a parameter may be held in: on each axis split along a dimension, or R."""
    shape, sizes = node.spec.shape, prices.mesh.shape
    per_axis = [
        [REPLICATE]
        if axis in batch_axes or size == 1
        else [*(shard(dim) for dim in range(len(shape))), REPLICATE]
        for axis, size in enumerate(sizes)
    ]
    return [layout for layout in product(*per_axis) if divides(shape, layout, sizes)]


def with_held(
    options: Sequence[Option],
    position: int,
    node: Node,
    prices: Prices,
    batch_axes: Sequence[int],
    *,
    reduce: bool,
) -> list[Option]:
    """Each way of a node with each holding of the parameter that it reads at ``position``.

    With ``reduce`` without holdings that another betters or equals in every figure.
    """
    held = held_options(node, prices, batch_axes)
    found = []
    for option in options:
        wanted = option.layout.inputs[position]
        figures = np.array([_holding(node, each, wanted, prices) for each in held])
        kept = _undominated(figures) if reduce else range(len(held))
        found += [
            Option(option.layout, option.inner, {**option.held, node.name: held[i]}) for i in kept
        ]
    return found


def _holding(node: Node, held: Layout, wanted: Layout, prices: Prices) -> list[float]:
    figures = list(prices.conversion(node.spec, held, wanted))
    for sharding in shardings(prices):
        seconds, states = prices.parameter(node.spec, held, *sharding)
        figures += [*seconds, *states]
    return figures


def shardings(prices: Prices) -> list[tuple[int, int]]:
    """Every ZeRO stage over all ranks (degree 0); where data-parallel ranks lie on several hosts,
    equally many and several on each, also ZeRO 1 to 3 within a host."""
    joint, hosts = prices.mesh.joint_axes, prices.cluster.host_of
    found = [(zero, 0) for zero in ZEROS]
    groups = prices.mesh.groups(*joint) if joint else ()
    counts = [Counter(hosts[prices.ranks[index]] for index in group) for group in groups]
    sizes = {size for own in counts for size in own.values()}
    if counts and min(map(len, counts)) > 1 and len(sizes) == 1 and min(sizes) > 1:
        found += [(zero, min(sizes)) for zero in ZEROS[1:]]
    return found


def _undominated(figures: Floats) -> list[int]:
    kept: list[int] = []
    for i, row in enumerate(figures):
        if not any(
            (figures[j] <= row).all() and ((figures[j] < row).any() or j < i)
            for j in range(len(figures))
            if j != i
        ):
            kept.append(i)
    return kept


class Choices:
    """Every assignment of layouts to the blocks ``start`` to ``stop`` on a mesh.

    Nodes of equal blocks are alike. What an assignment chooses is in arrays over all of them.
    """

    def __init__(
        self,
        graph: Graph,
        blocks: Blocks,
        prices: Prices,
        span: tuple[int, int],
        *,
        batch_axes: Sequence[int] = (),
        cuts: Cuts = NO_CUTS,
        reduce: bool = True,
    ) -> None:
        self.graph, self.all_blocks, self.prices = graph, blocks, prices
        self.start, self.stop = span
        self.blocks = blocks.blocks[self.start : self.stop]
        self.options: dict[str, list[Option]] = {}
        self.own: dict[str, str] = {}
        self._find_options(batch_axes, cuts, reduce=reduce)
        sizes = [len(each) for each in self.options.values()]
        self.num_assignments = prod(sizes)
        if self.num_assignments > MOST_ASSIGNMENTS:
            raise TooManyError(self.num_assignments)
        grid = np.indices(sizes).reshape(len(sizes), -1)
        self.index: dict[str, Ints] = dict(zip(self.options, grid, strict=True))

    def _find_options(self, batch_axes: Sequence[int], cuts: Cuts, *, reduce: bool) -> None:
        graph = self.graph
        for block in self.blocks:
            for name in block.nodes:
                key = self.all_blocks.template[name]
                if key in self.options:
                    continue
                node = graph[key]
                options = op_options(node, graph, self.prices, batch_axes, cuts)
                for position, ref in enumerate(node.inputs):
                    if self._is_own(ref, node):
                        self.own[ref.name] = key
                        options = with_held(
                            options,
                            position,
                            graph[ref.name],
                            self.prices,
                            batch_axes,
                            reduce=reduce,
                        )
                self.options[key] = options
        for block in self.blocks:
            for name in block.nodes:
                for ref in graph[name].inputs:
                    key = self.key(ref.name)
                    if graph[ref.name].kind == "parameter" and key not in self.own:
                        held = held_options(graph[ref.name], self.prices, batch_axes)
                        self.options.setdefault(
                            key, [Option(NodeLayout((), (each,))) for each in held]
                        )

    def key(self, name: str) -> str:
        """By what name a node's layout goes: its template's, or a shared parameter's own."""
        node = self.graph[name]
        if node.kind == "parameter" and self.num_blocks(name) > 1:
            return name
        return self.all_blocks.template.get(name, name)

    def num_blocks(self, parameter: str) -> int:
        position = self.all_blocks.of_node
        return len({position[user] for user in self.graph.users[parameter]})

    def _is_own(self, ref: Ref, node: Node) -> bool:
        """Whether a parameter is used by this node alone, and once."""
        return self.graph[ref.name].kind == "parameter" and (
            self.graph.users[ref.name] == (node.name,) and node.inputs.count(ref) == 1
        )

    def ring_seconds(self, name: str) -> Floats:
        """The messages of ring attention, which a kept result has behind it."""
        key, found = self.key(name), []
        node = self.graph[key]
        specs = [self.graph.spec(ref) for ref in node.inputs]
        for option in self.options[key]:
            rest = [(axis, item) for axis, item in option.inner if item.kind != "ring"]
            both = [
                self.prices.op(node, specs, option.layout, each) for each in (option.inner, rest)
            ]
            found.append(both[0].forward_communication - both[1].forward_communication)
        messages: Floats = np.array(found)[self.index[key]]
        return messages

    def made(self, ref: Ref) -> tuple[list[Layout], Ints]:
        key = self.key(ref.name)
        if key in self.own:
            layouts = [option.held[key] for option in self.options[self.own[key]]]
            return _distinct(layouts, self.index[self.own[key]])
        layouts = [option.layout.outputs[ref.index] for option in self.options[key]]
        return _distinct(layouts, self.index[key])

    def wanted(self, node: str, position: int) -> tuple[list[Layout], Ints]:
        key = self.key(node)
        layouts = [option.layout.inputs[position] for option in self.options[key]]
        return _distinct(layouts, self.index[key])

    def layouts(self, which: int) -> dict[str, NodeLayout]:
        """An assignment as a plan holds it."""
        found: dict[str, NodeLayout] = {}
        for key, options in self.options.items():
            option = options[int(self.index[key][which])]
            found[key] = option.layout
            found.update({name: NodeLayout((), (held,)) for name, held in option.held.items()})
        return found


def _distinct(layouts: Sequence[Layout], index: Ints) -> tuple[list[Layout], Ints]:
    distinct = list(dict.fromkeys(layouts))
    return distinct, np.array([distinct.index(each) for each in layouts])[index]
