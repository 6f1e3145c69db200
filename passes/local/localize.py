"""A block of the graph as one rank runs it: local tensors, explicit collectives.

In: the graph, a block's nodes with the layouts they arrive and leave in, the layout chosen for each
node, and a rank. Out: an ``fx.GraphModule`` whose ``forward`` takes the block's inputs and returns
the tuple of its outputs. Each node's inputs are converted from their producer's layout to the
wanted layout; a value that several nodes want in one layout is converted once.

Ops that do not depend on a layer of experts run while its tokens are sent (``ops_beside``). In a
recomputed block, ops that do not simply run again are marked (``replayed``).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import fx, nn

from ...planner.dims.batch import is_mean
from ...planner.errors import PlanError
from ...planner.graph.beside import ops_beside
from ...planner.graph.graph import Graph, Node, Ref, TensorSpec
from ...planner.graph.layout import (
    INVARIANT,
    Layout,
    NodeLayout,
    conversion_steps,
    format_layout,
    local_shape,
    sent_axes,
)
from ...planner.kernels.tiles import TiledRegion
from ...planner.ops.catalog import has_classes, ignored_class
from ..backward.compiled_runs import WAITS
from ..backward.replayed import MARK, TILED, Replayed
from ..ops.collectives import Rank, apply_steps, format_steps, local_tensor
from ..ops.local_loss import divisor
from ..ops.torch_ops import returns_several
from .local_ops import local_call
from .tiles import AXIS, Cut, Placed, TiledCall, place_tiles

MADE_BY = "made by"
"""Key in the ``meta`` of a local op's fx node for the graph's node that the op implements."""


@dataclass(frozen=True, slots=True)
class BlockInterface:
    """Ops, inputs and outputs of a block (layer), with the layouts of values that enter and leave
    it.

    ``nodes`` are op nodes in order; ``inputs`` and ``outputs`` are by value key (``value_key``);
    ``parameters``, by full name, are the parameters and buffers that the block's module holds.
    ``counts`` are keys of further inputs that every rank gets whole: counts over the step
    (``passes.local.accumulate``).
    """

    nodes: tuple[str, ...]
    inputs: Mapping[str, Layout]
    parameters: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    counts: tuple[str, ...] = ()


def value_key(ref: Ref) -> str:
    """Return the key (text) of a node's output: ``"n"`` for output 0 of node ``n``, ``"n:1"`` for
    output 1.

    >>> value_key(Ref("split", 1))
    'split:1'
    """
    return ref.name if ref.index == 0 else f"{ref.name}:{ref.index}"


def parse_key(key: str) -> Ref:
    """Return the node's output whose key (text) ``value_key`` made."""
    name, colon, index = key.rpartition(":")
    return Ref(name, int(index)) if colon and index.isdigit() else Ref(key)


def count_key(loss: str) -> str:
    """Return the key of the divisor of the classification loss that node ``loss`` computes."""
    return f"count of {loss}"


def total_key(ref: Ref) -> str:
    """Return the key of the sum of the value ``ref`` over all micro-batches of a step."""
    return f"total of {value_key(ref)}"


def reference_layouts(graph: Graph, num_axes: int) -> dict[str, NodeLayout]:
    """Return layouts, by node, for a mesh with ``num_axes`` axes on which every rank holds every
    tensor whole (placement I, invariant)."""
    whole = (INVARIANT,) * num_axes
    return {
        node.name: NodeLayout((whole,) * len(node.inputs), (whole,) * len(node.outputs))
        for node in graph
    }


def held_layout(layout: Layout, spec: TensorSpec) -> Layout:
    """Return ``layout`` with placement R (replicated) replaced by I (invariant) if the value has no
    gradient: R and I differ only in how gradients are combined."""
    if spec.requires_grad:
        return layout
    return tuple(INVARIANT if placement.kind == "R" else placement for placement in layout)


@dataclass(slots=True)
class _Values:
    """Values in the fx graph of a block under construction: ``made`` by ops or inputs, and
    ``converted`` to other layouts, by value of the planner's graph."""

    made: dict[Ref, tuple[fx.Node, Layout]] = field(default_factory=dict)
    counts: dict[str, fx.Node] = field(default_factory=dict)
    converted: dict[tuple[Ref, Layout], fx.Node] = field(default_factory=dict)
    uses: dict[fx.Node, list[tuple[str, int]]] = field(default_factory=dict)


def localize_block(
    graph: Graph,
    interface: BlockInterface,
    *,
    layouts: Mapping[str, NodeLayout],
    rank: Rank,
    num_microbatches: int = 1,
    replayed: Replayed | None = None,
) -> fx.GraphModule:
    """Build the module that computes a block (layer) on one rank. Sums over rows
    (``Graph.accumulation``) are multiplied by ``num_microbatches``, as a step's loss is the mean
    over micro-batches. ``replayed`` marks ops for recomputation, of which the last may be computed
    tile by tile. Raises ``PlanError`` if a layout does not fit its op."""
    body, values = fx.Graph(), _Values()
    for key, layout in interface.inputs.items():
        ref = parse_key(key)
        values.made[ref] = (_placeholder(body, key), layout)
    for name, layout in interface.parameters.items():
        held = body.get_attr(held_path(name))
        part = body.create_node("call_function", local_tensor, (held,), name=_identifier(name))
        values.made[Ref(name)] = (part, layout)
    for key in interface.counts:
        values.counts[key] = _placeholder(body, key)
    ops = _Ops(body, values, graph, layouts, rank, num_microbatches, replayed)
    tiles = _Tiles.of(ops, interface)
    inside = frozenset[str]() if tiles is None else tiles.region.strategies.keys()
    ops.add_all([name for name in interface.nodes if name not in inside])
    if tiles is not None:
        tiles.add()
    if replayed is not None:
        replayed.mark_unread(values.uses)
    results = [
        _in_layout(body, values, graph, parse_key(key), wanted=layout, rank=rank)
        for key, layout in interface.outputs.items()
    ]
    body.output(tuple(results))
    body.lint()
    return fx.GraphModule(_holder(graph, interface, rank), body, class_name="Block")


@dataclass(frozen=True, slots=True)
class _Ops:
    """Ops of a block, which are added one by one to its fx graph ``body``."""

    body: fx.Graph
    values: _Values
    graph: Graph
    layouts: Mapping[str, NodeLayout]
    rank: Rank
    num_microbatches: int
    replayed: Replayed | None

    def add_all(self, names: Sequence[str]) -> None:
        """Add the ops in order, but those that run beside an exchange of tokens while its layer is
        added."""
        beside = {
            name: others
            for name, others in ops_beside(names, self.graph).items()
            if sent_axes(self.layouts[name])
        }
        moved = {other for others in beside.values() for other in others}
        for name in names:
            if name not in moved:
                self._add(name, beside.get(name, ()))

    def _add(self, name: str, beside: Sequence[str] = ()) -> None:
        values, node = self.values, self.graph[name]
        made = _localize_node(
            self.body,
            values,
            self.graph,
            node,
            layout=self.layouts[name],
            rank=self.rank,
            add_beside=partial(self._add_each, beside) if beside else None,
        )
        if self.num_microbatches > 1 and name in self.graph.accumulation.sums:
            summed, layout = values.made[Ref(name)]
            count = self.num_microbatches
            scaled = self.body.call_function(torch.ops.aten.mul.Scalar, (summed, count))
            values.made[Ref(name)] = (scaled, layout)
            made.append(scaled)
        if self.replayed is not None:
            self.replayed.mark(node, made)

    def _add_each(self, names: Sequence[str]) -> None:
        for name in names:
            self._add(name)

    def in_layout(self, ref: Ref, wanted: Layout) -> fx.Node:
        """Return the fx node of value ``ref`` in the ``wanted`` layout."""
        return _in_layout(self.body, self.values, self.graph, ref, wanted=wanted, rank=self.rank)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Last ops of a block as a rank computes them tile by tile (``region``). ``entries``: layouts
    in which values enter; ``leaving``: values that leave the block."""

    ops: _Ops
    region: TiledRegion
    placed: Placed
    entries: Mapping[Ref, Layout]
    leaving: tuple[Ref, ...]

    @staticmethod
    def of(ops: _Ops, block: BlockInterface) -> _Tiles | None:
        """Return the last ops of a block as tiles; None if they run whole. A value that is cut
        enters as it is made, others as they are first read."""
        if ops.replayed is None or ops.replayed.last is None:
            return None
        region, most = ops.replayed.last
        graph, layouts = ops.graph, ops.layouts
        first = {
            ref: held
            for name in reversed(tuple(region.strategies))
            for ref, held in zip(graph[name].inputs, layouts[name].inputs, strict=True)
        }
        given = {parse_key(key): layout for key, layout in block.inputs.items()}
        for ref, own in region.entries.items():
            if own.is_shard:
                inside = ref.name in layouts and ref not in given
                first[ref] = layouts[ref.name].outputs[ref.index] if inside else given[ref]
        entries = {ref: first[ref] for ref in region.entries}
        placed = place_tiles(graph, region, layouts, entries, ops.rank.mesh, most)
        if placed is None:
            return None
        leaving = (parse_key(key) for key in block.outputs)
        return _Tiles(
            ops,
            region,
            placed,
            entries,
            tuple(ref for ref in leaving if ref.name in region.strategies),
        )

    def add(self) -> None:
        """Add a call that computes the ops tile by tile to the block's fx graph."""
        ops, placed, mesh = self.ops, self.placed, self.ops.rank.mesh
        body, values, own = ops.body, ops.values, self.region
        given = [ops.in_layout(ref, wanted) for ref, wanted in self.entries.items()]
        for each in given:  # the backward reads them
            values.uses.pop(each, None)
        counts = values.counts | self._divisors()
        exits = {ref: ops.layouts[ref.name].outputs[ref.index] for ref in self.leaving}
        made = {ref: own.strategies[ref.name].outputs[ref.index] for ref in self.leaving}
        interface = BlockInterface(
            tuple(own.strategies),
            {value_key(r): placed.layout(self.entries[r], p) for r, p in own.entries.items()},
            {},
            {value_key(r): placed.layout(exits[r], p) for r, p in made.items()},
            tuple(counts),
        )
        cuts = [placed.cut(self.entries[ref], p, mesh) for ref, p in own.entries.items()]
        cuts += [Cut()] * len(counts)
        written = [placed.cut(exits[ref], p, mesh) for ref, p in made.items()]
        call = TiledCall(self._programs(interface), cuts, written, ops.rank.draws)
        inputs = (*given, *counts.values())
        result = body.create_node("call_function", call, inputs, {}, name=AXIS)
        result.meta[MARK] = TILED
        for index, (ref, layout) in enumerate(exits.items()):
            part = body.call_function(operator.getitem, (result, index))
            values.made[ref] = (part, layout)

    def _programs(self, interface: BlockInterface) -> list[fx.GraphModule]:
        """Return the module that computes each tile."""
        ops, placed, strategies = self.ops, self.placed, self.region.strategies
        assert ops.replayed is not None
        again = replace(ops.replayed, last=None, is_recorded=True)
        layouts = {name: placed.node(ops.layouts[name], own) for name, own in strategies.items()}
        return [
            localize_block(
                ops.graph,
                interface,
                layouts=layouts,
                rank=placed.rank(ops.rank, number),
                num_microbatches=ops.num_microbatches,
                replayed=again,
            )
            for number in range(placed.count)
        ]

    def _divisors(self) -> dict[str, fx.Node]:
        """Add to the block's fx graph the divisors of its classification losses that are means;
        return them by key. They depend on targets alone."""
        ops = self.ops
        nodes = (ops.graph[name] for name in self.region.strategies)
        losses = [node for node in nodes if has_classes(node) and is_mean(node)]
        keys = {count_key(node.name): node for node in losses}
        return {k: self._divisor(node) for k, node in keys.items() if k not in ops.values.counts}

    def _divisor(self, loss: Node) -> fx.Node:
        ops, held = self.ops, self.ops.layouts[loss.name].inputs
        scores, *others = loss.inputs
        given = [ops.in_layout(*each) for each in zip(others, held[1:], strict=True)]
        spec = ops.graph.spec(scores)
        classes = min(1, len(spec.shape) - 1)
        rows = (at for at, own in enumerate(held[0]) if own.is_shard and own.dim != classes)
        options = {
            "ignore_index": ignored_class(loss),
            "row_axes": tuple(rows),
            "dtype": getattr(torch, spec.dtype),
        }
        target = ops.rank.bound(divisor)
        return ops.body.create_node("call_function", target, tuple(given), options)


def _localize_node(
    body: fx.Graph,
    values: _Values,
    graph: Graph,
    node: Node,
    *,
    layout: NodeLayout,
    rank: Rank,
    add_beside: Callable[[], None] | None,
) -> list[fx.Node]:
    """Add the layout conversions of a node's inputs, and the rank's call of its op, to the fx graph
    ``body``; return the fx nodes of the call and of its scaling. ``add_beside`` adds the ops that
    run between the two calls of an op that exchanges tokens."""
    _check(graph, node, layout, rank)
    refs = node.inputs
    inputs = [
        _in_layout(body, values, graph, ref, wanted=wanted, rank=rank)
        for ref, wanted in zip(refs, layout.inputs, strict=True)
    ]
    for position, value in enumerate(inputs):
        if value in values.uses:
            values.uses[value].append((node.name, position))
    specs = tuple(graph.spec(ref) for ref in refs)
    batch_dims = graph.batch_dims.get(node.name, ())
    call = local_call(
        node,
        layout,
        specs,
        rank=rank,
        values=inputs,
        batch_dim=next(iter(batch_dims), None),
        count=values.counts.get(count_key(node.name)),
        has_others_beside=add_beside is not None,
    )
    args, start = call.args, call.start
    if start is not None and add_beside is not None:
        name = _identifier(f"{node.name}_sent")
        given = start.args, dict(start.kwargs)
        args = (body.create_node("call_function", start.target, *given, name=name), *args)
        add_beside()
    result = body.create_node(
        "call_function", call.target, args, dict(call.kwargs), name=_identifier(node.name)
    )
    result.meta |= {MADE_BY: node, WAITS: start is not None}
    results = [result]
    scale = 0 if _sums_no_rows(layout, rank) else call.scale
    if scale != 1.0:
        result = body.call_function(torch.ops.aten.mul.Scalar, (result, scale))
        results.append(result)
    if not returns_several(node.op):
        values.made[Ref(node.name)] = (result, layout.outputs[0])
        return results
    for index, made in enumerate(layout.outputs):
        part = body.call_function(operator.getitem, (result, index))
        values.made[Ref(node.name, index)] = (part, made)
    return results


def _sums_no_rows(layout: NodeLayout, rank: Rank) -> bool:
    """Return whether an op computes a partial sum over rows although this rank has no rows."""
    if rank.share is None or rank.share.rows or layout.outputs[0][0].kind != "P":
        return False
    return any(held[0].is_shard for held in layout.inputs)


def _in_layout(
    body: fx.Graph, values: _Values, graph: Graph, ref: Ref, *, wanted: Layout, rank: Rank
) -> fx.Node:
    """Return the fx node of value ``ref`` in the ``wanted`` layout, with a conversion added if
    necessary."""
    value, layout = values.made[ref]
    if total_key(ref) in values.counts:
        value, layout = values.counts[total_key(ref)], (INVARIANT,) * len(layout)
    spec = graph.spec(ref)
    wanted = held_layout(wanted, spec)
    steps = conversion_steps(held_layout(layout, spec), wanted)
    if not steps:
        return value
    if (ref, wanted) not in values.converted:
        name = f"{value.name}_{format_layout(wanted)}"
        values.converted[ref, wanted] = body.create_node(
            "call_function",
            rank.bound(apply_steps),
            (value, format_steps(steps, rank.mesh.axes)),
            name=_identifier(name),
        )
        values.uses[values.converted[ref, wanted]] = []
    return values.converted[ref, wanted]


def _check(graph: Graph, node: Node, layout: NodeLayout, rank: Rank) -> None:
    """Raise ``PlanError`` unless a node's ``layout`` has one entry per input and output of the node
    and divides their shapes evenly."""
    refs = node.inputs
    if len(layout.inputs) != len(refs) or len(layout.outputs) != len(node.outputs):
        raise PlanError(
            "AP522",
            f"the plan's layout of {node.name} belongs to another op",
            why=f"{node.op} has {len(refs)} inputs, the plan's layout {len(layout.inputs)}",
            where=node.source or node.module,
            fix="plan again",
        )
    keys = (*map(value_key, refs), *(node.name for _ in node.outputs))
    specs = (*map(graph.spec, refs), *node.outputs)
    for key, spec, held in zip(keys, specs, layout.inputs + layout.outputs, strict=True):
        try:
            local_shape(spec.shape, held, rank.mesh.shape)
        except ValueError as error:
            raise PlanError(
                "AP523",
                f"{key} cannot be sharded as {node.name} requires",
                why=str(error),
                where=node.source or node.module,
                fix="plan again",
            ) from error


def _placeholder(body: fx.Graph, key: str) -> fx.Node:
    """Add a placeholder for the value with key ``key`` under a valid Python name; keys such as
    ``add`` and ``add_`` get different names."""
    node = body.placeholder(_identifier(key))
    node.target = node.name
    return node


def _identifier(name: str) -> str:
    """Return ``name`` as a valid Python identifier: letters, digits and underscores, no digit
    first.

    >>> _identifier("1.running_mean"), _identifier("a.weight")
    ('_1_running_mean', 'a_weight')
    """
    found = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
    return found if found.isidentifier() else f"_{found}"


def held_path(name: str) -> str:
    """Return the path at which a block's module holds the model's parameter or buffer ``name``.
    Characters that attributes cannot have are written as numbers.

    >>> held_path("layers.0.weight"), held_path('a"b.weight')
    ('layers.0.weight', 'a_34_b.weight')
    """
    return re.sub(r"[^\w.]", lambda found: f"_{ord(found[0])}_", name, flags=re.ASCII)


def _holder(graph: Graph, interface: BlockInterface, rank: Rank) -> nn.Module:
    """Return a module that holds the block's parameters and buffers as ``meta`` tensors of this
    rank's local shapes."""
    root = nn.Module()
    for name, layout in interface.parameters.items():
        node = graph[name]
        shape = local_shape(node.spec.shape, layout, rank.mesh.shape)
        tensor = torch.empty(shape, dtype=getattr(torch, node.spec.dtype), device="meta")
        if node.spec.stored:
            tensor = torch.empty(node.spec.stored_bytes, dtype=torch.uint8, device="meta")
        *path, leaf = held_path(name).split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if node.kind == "parameter":
            owner.register_parameter(
                leaf, nn.Parameter(tensor, requires_grad=node.spec.requires_grad)
            )
        else:
            owner.register_buffer(leaf, tensor)
    return root
