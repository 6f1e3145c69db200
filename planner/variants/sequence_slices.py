"""Slices of sequences: the graph and plan of a micro-batch for one slice.

In: the graph, its blocks, a plan, where positions are, and the slice. Out: the same with every
value cut to the slice, under the same names. Whole values (targets, tables of positions) are cut if
an op needs only the slice's part. Causal attention takes its queries from the slice and its keys
and values from all positions so far: a new input holds the keys or values of earlier slices, and
the result is kept for the next slice. Random numbers are the same as in the whole sequence. Source:
Li et al. 2021, TeraPipe (arXiv:2102.07988), section 3.2.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from ..dims.sequence_places import SeqDim, SeqDims, WrittenAttention
from ..graph.graph import Block, Blocks, Graph, Node, Ref, TensorSpec, map_refs
from ..graph.layout import INVARIANT, Layout, NodeLayout, boundary_layout, shard
from ..ops.catalog import spec_of
from ..plan import Plan, StagePlan

Layouts = dict[str, NodeLayout]


@dataclass(frozen=True, slots=True)
class Carried:
    """Keys or values of an attention op that one slice of a sequence passes to the next: node
    ``made`` has them at all positions so far, input ``earlier`` at the positions before the slice.
    Dimension ``dim`` is positions."""

    made: str
    earlier: str
    dim: int


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Graph, blocks and plan that run one slice of the sequences. ``carried[stage]`` lists the keys
    and values that later slices read."""

    graph: Graph
    blocks: Blocks
    plan: Plan
    carried: tuple[tuple[Carried, ...], ...]


def sequence_slice(
    graph: Graph, blocks: Blocks, plan: Plan, places: SeqDims, bounds: tuple[int, int]
) -> SequenceSlice:
    """Build the graph, blocks and plan of the slice of positions ``bounds`` (start, stop).
    ``graph`` has the plan's micro-batch size; ``places`` has the tensor dimensions that are
    positions."""
    stage_of = _stage_of_block(plan)
    stages = [_StageLayouts(stage, blocks) for stage in plan.stages]
    work = _Work(graph, places, bounds)
    for node in graph:
        if node.kind == "op":
            at = blocks.of_node[node.name]
            work.add(node, at, stages[stage_of[at]])
        else:
            work.nodes.append(node)
    sliced_blocks = Blocks(
        tuple(
            Block(block.name, block.name, tuple(work.members[at]), block.parameters)
            for at, block in enumerate(blocks.blocks)
        )
    )
    own = replace(
        plan,
        stages=tuple(
            replace(
                stage,
                layouts={**_leaf_layouts(graph, stages[index]), **stages[index].made},
                blocks=tuple(replace(block, kind=block.name) for block in stage.blocks),
            )
            for index, stage in enumerate(plan.stages)
        ),
    )
    return SequenceSlice(
        replace(graph, nodes=tuple(work.nodes)),
        sliced_blocks,
        own,
        tuple(tuple(stage.carried) for stage in stages),
    )


def _stage_of_block(plan: Plan) -> list[int]:
    return [index for index, stage in enumerate(plan.stages) for _ in stage.blocks]


@dataclass
class _StageLayouts:
    """Layouts of a stage's nodes: the plan's for whole sequences, and ``made`` for the slice."""

    stage: StagePlan
    blocks: Blocks
    made: Layouts = field(default_factory=dict)
    carried: list[Carried] = field(default_factory=list)

    def of(self, name: str) -> NodeLayout | None:
        return self.stage.layout_of(name, self.blocks)


def _leaf_layouts(graph: Graph, stage: _StageLayouts) -> Layouts:
    return {
        node.name: found
        for node in graph
        if node.kind != "op" and (found := stage.of(node.name)) is not None
    }


@dataclass
class _Work:
    """Nodes of the slice built so far, all together (``nodes``) and by block (``members``)."""

    graph: Graph
    places: SeqDims
    bounds: tuple[int, int]
    nodes: list[Node] = field(default_factory=list)
    members: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def put(self, node: Node, block: int, stage: _StageLayouts, layout: NodeLayout) -> Ref:
        self.nodes.append(node)
        self.members[block].append(node.name)
        stage.made[node.name] = layout
        return Ref(node.name)

    def add(self, node: Node, block: int, stage: _StageLayouts) -> None:
        """Add the slice's version of a node in a block, with further nodes that it needs."""
        layout = stage.of(node.name)
        assert layout is not None, node.name
        refs = list(node.inputs)
        for index in range(len(refs)):
            place = self.places.cut.get((node.name, index))
            if place is not None:
                refs[index] = self._cut(node, index, place, block, stage)
        written = self.places.written.get(node.name)
        if written is not None:
            self._look_back(node, written, refs, (block, stage, layout))
        own = self._with_inputs(node, refs)
        outputs = tuple(
            self._spec(Ref(node.name, index), spec) for index, spec in enumerate(node.outputs)
        )
        own = replace(own, outputs=outputs)
        if node.name in self.places.attention:
            own, layout = self._attending(own, block, stage, layout)
        elif node.op.startswith("aten.slice."):
            own = self._slicing(node, own)
        elif spec_of(node).is_counted:
            own = self._drawing(own)
        if node.name in self.places.means:
            self._add_share(own, block, stage, layout)
        else:
            self.put(own, block, stage, layout)

    def _with_inputs(self, node: Node, refs: list[Ref]) -> Node:
        feed = iter(refs)
        args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda _: next(feed))
        return replace(node, args=args, kwargs=kwargs)

    def _spec(self, ref: Ref, spec: TensorSpec) -> TensorSpec:
        place = self.places.places.get(ref)
        written = self.places.written.get(ref.name)
        shape = spec.shape
        if place is not None and (written is None or ref.name != written.keys):
            shape = place.shape(shape, *self.bounds)
        if written is not None and ref.name in written.columns:
            shape = (*shape[:-1], self.bounds[1])
        return replace(spec, shape=shape)

    def _look_back(
        self,
        node: Node,
        written: WrittenAttention,
        refs: list[Ref],
        held: tuple[int, _StageLayouts, NodeLayout],
    ) -> None:
        """Extend an op of attention written in separate ops so that it reads the keys and values of
        all positions so far. ``refs``, the op's inputs in the slice, are changed in place."""
        block, stage, layout = held
        if node.name == written.keys:
            refs[0] = self._carry(node, "keys", refs[0], block, (stage, layout.inputs[0]))
        elif node.name == written.product:
            refs[1] = self._carry(node, "values", refs[1], block, (stage, layout.inputs[1]))
        elif node.name == written.masked:
            start, stop = self.bounds
            kept = _whole_along(_whole_along(layout.inputs[1], 0), 1)
            mask = replace(self.graph.spec(node.inputs[1]), shape=(stop - start, stop))
            made = _node(
                node, f"{node.name}_seen", "aten.slice.Tensor", (refs[1], 1, 0, stop), mask
            )
            refs[1] = self.put(made, block, stage, NodeLayout((kept,), (kept,)))

    def _add_share(self, own: Node, block: int, stage: _StageLayouts, layout: NodeLayout) -> None:
        """Add the slice's summand of a mean over all positions: the mean over the slice, times the
        slice's fraction of the positions."""
        place = self.places.means[own.name]
        low, high = place.rows(*self.bounds)
        mean = self.put(replace(own, name=f"{own.name}_of_slice"), block, stage, layout)
        share = _node(
            own, own.name, "aten.mul.Scalar", (mean, (high - low) / place.count), own.spec
        )
        self.put(share, block, stage, NodeLayout(layout.outputs, layout.outputs))

    def _slicing(self, node: Node, own: Node) -> Node:
        """Return ``own``, a slicing op along positions, limited to this slice of the sequence."""
        source = self.places.places.get(node.inputs[0])
        made = self.places.places.get(Ref(node.name))
        if source is None or made is None or source.count == made.count:
            return own
        low, high = made.rows(*self.bounds)
        shift = made.first - source.first - source.rows(*self.bounds)[0]
        return replace(own, args=(own.args[0], made.dim, low + shift, high + shift), kwargs={})

    def _drawing(self, own: Node) -> Node:
        """Return the node ``own``, a random op, so that it draws the numbers that the slice's
        positions get in the whole sequence."""
        place = self.places.places.get(Ref(own.name))
        if place is None:
            return own
        start = [0] * len(own.spec.shape)
        start[place.dim] = place.rows(*self.bounds)[0] * place.inner
        return replace(own, kwargs={**own.kwargs, "start": start})

    def _cut(self, node: Node, index: int, place: SeqDim, block: int, stage: _StageLayouts) -> Ref:
        """Add ops that cut the slice's positions from input number ``index`` of ``node``, which is
        computed for the whole sequence; return their result."""
        ref, wanted = node.inputs[index], stage.of(node.name)
        assert wanted is not None
        spec, name = self.graph.spec(ref), f"{node.name}_slice{index}"
        layout = wanted.inputs[index]
        low, high = place.rows(*self.bounds)
        if (place.outer, place.inner) == (1, 1):
            held = _whole_along(layout, place.dim)
            cut = replace(spec, shape=place.shape(spec.shape, *self.bounds))
            args = (ref, place.dim, low, high)
            made = _node(node, name, "aten.slice.Tensor", args, cut)
            return self.put(made, block, stage, NodeLayout((held,), (held,)))
        return self._cut_merged(node, name, (ref, place, layout), block, stage)

    def _cut_merged(
        self,
        node: Node,
        name: str,
        what: tuple[Ref, SeqDim, Layout],
        block: int,
        stage: _StageLayouts,
    ) -> Ref:
        """Add ops that cut the slice's positions from an input in which a reshape has merged
        positions with another dimension; return their result."""
        ref, place, layout = what
        spec = self.graph.spec(ref)
        low, high = place.rows(*self.bounds)
        parts = place.outer, place.count, place.inner
        apart = (*spec.shape[: place.dim], *parts, *spec.shape[place.dim + 1 :])
        short = (*apart[: place.dim + 1], high - low, *apart[place.dim + 2 :])
        sizes = stage.stage.mesh.shape
        num_parts = 1
        for axis, placement in enumerate(layout):
            num_parts *= sizes[axis] if placement == shard(place.dim) else 1
        held = layout if place.outer % num_parts == 0 else _whole_along(layout, place.dim)
        far = tuple(shard(p.dim + 2) if p.is_shard and p.dim > place.dim else p for p in held)
        opened = self.put(
            _node(
                node,
                f"{name}_apart",
                "aten.reshape.default",
                (ref, list(apart)),
                replace(spec, shape=apart),
            ),
            block,
            stage,
            NodeLayout((held,), (far,)),
        )
        cut = self.put(
            _node(
                node,
                f"{name}_rows",
                "aten.slice.Tensor",
                (opened, place.dim + 1, low, high),
                replace(spec, shape=short),
            ),
            block,
            stage,
            NodeLayout((far,), (far,)),
        )
        whole = place.shape(spec.shape, *self.bounds)
        return self.put(
            _node(
                node, name, "aten.reshape.default", (cut, list(whole)), replace(spec, shape=whole)
            ),
            block,
            stage,
            NodeLayout((far,), (held,)),
        )

    def _attending(
        self, own: Node, block: int, stage: _StageLayouts, layout: NodeLayout
    ) -> tuple[Node, NodeLayout]:
        """Return the node ``own``, causal attention, and its layout, so that the slice's queries
        attend to the keys of all positions so far."""
        start, stop = self.bounds
        queries, *pair = own.inputs
        made = [
            self._carry(own, what, ref, block, (stage, layout.inputs[index]))
            for index, (what, ref) in enumerate(zip(("keys", "values"), pair, strict=True), start=1)
        ]
        if start == 0:
            return replace(own, args=(queries, *made, *own.args[3:])), layout
        whole = (INVARIANT,) * len(layout.inputs[0])
        dtype, mask = own.spec.dtype, TensorSpec((stop - start, stop), "bool")
        ones = self.put(
            _node(
                own,
                f"{own.name}_ones",
                "aten.new_ones.default",
                (queries, list(mask.shape)),
                replace(mask, dtype=dtype),
            ),
            block,
            stage,
            NodeLayout((layout.inputs[0],), (whole,)),
        )
        lower = self.put(
            _node(
                own,
                f"{own.name}_lower",
                "aten.tril.default",
                (ones, start),
                replace(mask, dtype=dtype),
            ),
            block,
            stage,
            NodeLayout((whole,), (whole,)),
        )
        seen = self.put(
            _node(own, f"{own.name}_seen", "aten.gt.Scalar", (lower, 0), mask),
            block,
            stage,
            NodeLayout((whole,), (whole,)),
        )
        named = {"attn_mask", "dropout_p", "is_causal"}
        kwargs = {name: value for name, value in own.kwargs.items() if name not in named}
        attending = replace(own, args=(queries, *made, seen, 0.0, False), kwargs=kwargs)
        rows = shard(len(own.spec.shape) - 2)
        held = tuple(shard(0) if p == rows else INVARIANT for p in layout.inputs[0])
        return attending, replace(layout, inputs=(*layout.inputs[:3], held))

    def _carry(
        self, own: Node, what: str, ref: Ref, block: int, held: tuple[_StageLayouts, Layout]
    ) -> Ref:
        """Add ops that join the keys (or values) ``ref`` of this slice to those of earlier slices;
        return their result, which later slices read."""
        stage, layout = held
        whole = self.graph.spec(ref)
        dim = len(whole.shape) - 2
        start, stop = self.bounds
        name, earlier = f"{own.name}_{what}", f"{own.name}_earlier_{what}"
        stage.carried.append(Carried(name, earlier, dim))

        def upto(count: int) -> TensorSpec:
            shape = (*whole.shape[:dim], count, whole.shape[-1])
            return replace(whole, shape=shape)

        if start == 0:
            args: tuple[Any, ...] = (ref, list(upto(stop).shape))
            made = _node(own, name, "aten.view.default", args, upto(stop))
            return self.put(made, block, stage, NodeLayout((layout,), (layout,)))
        self.nodes.append(Node(earlier, "input", outputs=(upto(start),)))
        stage.made[earlier] = NodeLayout((), (boundary_layout(layout),))
        made = _node(own, name, "aten.cat.default", ([Ref(earlier), ref], dim), upto(stop))
        return self.put(made, block, stage, NodeLayout((layout, layout), (layout,)))


def _node(of: Node, name: str, op: str, args: tuple[Any, ...], spec: TensorSpec) -> Node:
    return Node(name, "op", op, args, {}, (spec,), of.module, of.source)


def _whole_along(layout: Layout, dim: int) -> Layout:
    return tuple(INVARIANT if p == shard(dim) else p for p in layout)


def slice_bounds(slices: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) positions of each slice.

    >>> slice_bounds((3, 2))
    ((0, 3), (3, 5))
    """
    bounds, start = [], 0
    for length in slices:
        bounds.append((start, start + length))
        start += length
    return tuple(bounds)
