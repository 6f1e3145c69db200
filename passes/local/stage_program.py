"""Program of one rank: its stage's blocks on local tensors, with received and sent values.

In: the graph at micro-batch size, its blocks, the plan, and a rank's place. Out: a
``StageProgram``, complete for the executor: it slices batch inputs and constants, makes
parameters, receives values, runs the blocks in order, and sends values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ...planner import ops as rules
from ...planner.errors import PlanError
from ...planner.graph.graph import Block, Blocks, Graph, Ref, TensorSpec
from ...planner.graph.layout import INVARIANT, REPLICATE, Layout, Mesh, boundary_layout
from ...planner.graph.state_sharding import StateSharding, state_sharding
from ...planner.kernels.recompute import Storages, find_replay, has_tiles, without_offload
from ...planner.kernels.tiles import last_region
from ...planner.plan import Plan, Recompute, StagePlan
from ...planner.schedules.held import splits
from ...planner.variants.shares import RowShare, share_of, why_not
from ..backward.replayed import Replayed
from ..ops.collectives import Communicator, Rank
from ..ops.random_ops import Draws
from .accumulate import Counting, build_counting, counts_used
from .localize import BlockInterface, localize_block, parse_key, value_key
from .stage_cut import Boundary, boundaries, op_layout, stage_ranges, uses_by_block, wanted_layouts


@dataclass(frozen=True, slots=True)
class HeldValue:
    """Batch input, constant or buffer that a stage holds: global shape and dtype (``spec``), and
    layout on the stage's mesh."""

    spec: TensorSpec
    layout: Layout


@dataclass(frozen=True, slots=True)
class ParameterProgram:
    """Parameter or buffer of a stage: global shape and dtype (``spec``), and the layout in which it
    is held. ``shared``: several blocks use it, so the stage holds it and passes it to them as an
    input."""

    spec: TensorSpec
    layout: Layout
    shared: bool


def shard_axes(
    spec: TensorSpec, layout: Layout, mesh: Mesh, zero: int, degree: int = 0
) -> tuple[int, ...]:
    """Return the mesh axes over whose ranks together ZeRO stage ``zero`` shards a parameter: the
    joint axes on which it is whole. With ``degree`` it is sharded over those of them that are in a
    group of this many neighbours, and replicated in others: not at all if that is one. Frozen
    parameters are sharded only by stage 3: in lower stages every rank holds the whole parameter
    anyway, so a shard would only add memory. Scalars, complex and quantized parameters are never
    sharded.

    >>> from autoparallel.planner.graph.layout import shard
    >>> spec = TensorSpec((4, 4), "float32", requires_grad=True)
    >>> mesh = Mesh(("dp", "ep", "tp"), (2, 2, 2))
    >>> shard_axes(spec, (REPLICATE, REPLICATE, shard(0)), mesh, zero=1)
    (0, 1)
    >>> shard_axes(spec, (REPLICATE, shard(0), REPLICATE), mesh, zero=1)
    (0,)
    >>> shard_axes(spec, (REPLICATE, shard(0), REPLICATE), mesh, zero=1, degree=2)
    ()
    """
    is_whole = not spec.shape or spec.is_complex or spec.stored
    if is_whole or zero <= (0 if spec.requires_grad else 2):
        return ()
    axes = tuple(axis for axis in mesh.joint_axes if not layout[axis].is_shard)
    return axes if state_sharding(mesh, axes, degree).num_shards > 1 else ()


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dimension along which ZeRO shards a rank's part of a parameter over ``shards``
    ranks: the first, or a later one that they divide if they are more than the first is long, such
    as a few experts.

    >>> shard_dim((10, 3), 4), shard_dim((2, 3, 8), 4), shard_dim((2, 3), 4)
    (0, 2, 0)
    """
    later = (dim for dim, size in enumerate(shape) if dim and size % shards == 0)
    return next(later, 0) if shape and shape[0] < shards else 0


@dataclass(frozen=True, slots=True)
class BlockProgram:
    """Program of a block (layer) on one rank: ``module.forward(*inputs)`` returns the tuple of
    ``outputs``. ``inputs`` and ``outputs`` are keys of values (``value_key``). ``parameters`` and
    ``buffers`` are the fully qualified names of the tensors that the module itself holds (``meta``,
    of local shape)."""

    name: str
    kind: str
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Program of one rank of a pipeline stage for a training step.

    Blocks (layers) take ``inputs`` of the batch, ``constants``, shared ``buffers``, other blocks'
    outputs and received values; ``layouts`` has the layouts of values between blocks. Values are
    named by key (``value_key``). ``loss`` is the key of the loss in the stage that computes it; its
    layout is P or I, so no rank waits for its sum within a step. ``draws`` is the state of random
    ops (key and micro-batch), which the executor updates. ``updates`` maps each buffer that a
    forward changes to its new value, in the buffer's layout; with ``updates_once`` every
    micro-batch of a step reads the old value and computes the same new one. ``means`` are buffers
    whose new value is the mean over ``num_microbatches`` of a step. ``counting`` computes
    inputs of blocks that depend on all rows of a step. ``kept`` are values that leave the stage but
    go to no other: inputs of the next slice of the sequences, or outputs that the model's caller
    differentiates. ``share``: this rank's rows of a micro-batch if the batch is split unevenly;
    shapes and layouts then belong to an even split of ``share.batch_size`` rows. ``shard_degree``:
    see ``StagePlan``.
    """

    index: int
    mesh: Mesh
    coordinates: tuple[int, ...]
    blocks: tuple[BlockProgram, ...]
    parameters: Mapping[str, ParameterProgram]
    buffers: Mapping[str, ParameterProgram]
    inputs: Mapping[str, HeldValue]
    constants: Mapping[str, HeldValue]
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    layouts: Mapping[str, Layout]
    loss: str | None
    draws: Draws = field(default_factory=Draws)
    updates: Mapping[str, str] = field(default_factory=dict)
    updates_once: bool = False
    means: frozenset[str] = frozenset()
    num_microbatches: int = 1
    counting: Counting | None = None
    share: RowShare | None = None
    kept: tuple[str, ...] = ()
    shard_degree: int = 0

    def shard_axes(self, name: str, zero: int) -> tuple[int, ...]:
        """Return the mesh axes over which ZeRO stage ``zero`` shards a parameter of the stage.
        Parameters that several blocks use are gathered together, so they are sharded over the axes
        that are the same for all of them."""
        own = self.parameters[name]
        axes = self._shard_axes(own, zero)
        if not own.shared:
            return axes
        shared = [each for each in self.parameters.values() if each.shared]
        sets = [self._shard_axes(each, zero) for each in shared]
        axes = tuple(axis for axis in axes if all(axis in each for each in sets if each))
        return axes if self.sharding(axes).num_shards > 1 else ()

    def _shard_axes(self, held: ParameterProgram, zero: int) -> tuple[int, ...]:
        return shard_axes(held.spec, held.layout, self.mesh, zero, self.shard_degree)

    def sharding(self, axes: tuple[int, ...]) -> StateSharding:
        """Return how ZeRO divides the ranks along ``axes`` (``shard_axes``) of a parameter."""
        return state_sharding(self.mesh, axes, self.shard_degree)


@dataclass(frozen=True, slots=True)
class OfSlice:
    """Context of a stage program that computes one slice of the sequences: ``whole``, the graph of
    whole sequences; ``kept``, the keys of values that the next slice needs; ``draws``, the state of
    random ops, which all slices share."""

    whole: Graph
    kept: tuple[str, ...]
    draws: Draws


@dataclass(frozen=True)
class _Stage:
    """Data about a pipeline stage and one of its ranks from which the programs of its blocks
    (layers) are built."""

    graph: Graph
    blocks: Blocks
    plan: StagePlan
    rank: Rank
    num_microbatches: int
    uses: Mapping[Ref, tuple[int, ...]]
    leaves: Mapping[str, HeldValue | ParameterProgram]
    received: Mapping[str, Layout]
    sent: frozenset[str]
    most_tiles: int
    is_in_parts: bool
    """True if a step computes its rows, or their sequences, in several parts (micro-batches or
    slices)."""

    @cached_property
    def updated(self) -> dict[Ref, str]:
        """Map from each value that becomes a buffer's new value to the name of the buffer."""
        return {ref: name for name, ref in self.graph.updates.items() if name in self.leaves}

    @cached_property
    def _storages(self) -> Storages:
        return rules.storage_of(self.graph)

    def counts(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the keys of the inputs of these ops that depend on all rows of a step: divisors of
        losses and sums. There are none if one rank computes all rows of a step at once, as its ops
        then count and sum by themselves."""
        if not self.is_in_parts and len(self.plan.devices) == 1:
            return ()
        return counts_used(self.graph, nodes, totals=self.is_in_parts)

    def replayed(self, block: Block, mode: Recompute) -> Replayed | None:
        """Return an object that says which ops of a block the backward recomputes under ``mode``;
        None if it recomputes none."""
        mode = without_offload(mode)
        if mode == "none":
            return None
        found = find_replay(block, self.graph, rules, self._storages)
        last = None
        if has_tiles(mode) and self.most_tiles > 1 and self.rank.share is None:
            last = last_region(block.nodes, self.graph, rules, self.plan.mesh)
        return Replayed(mode, found, None if last is None else (last, self.most_tiles))


def build_stage(
    graph: Graph,
    blocks: Blocks,
    plan: Plan,
    *,
    stage_index: int,
    coordinates: tuple[int, ...],
    communicator: Communicator,
    of_slice: OfSlice | None = None,
    outputs: Sequence[Ref] = (),
) -> StageProgram:
    """Build the program of the rank at ``coordinates`` of a stage's mesh. ``graph`` has the size of
    one micro-batch on the whole mesh, or of a slice of its sequences (``of_slice``); counts are
    always over whole sequences. ``outputs`` are further values that leave the stage. Raises
    ``PlanError`` if the plan does not fit the graph."""
    own, positions = plan.stages[stage_index], stage_ranges(plan)[stage_index]
    whole, share = graph, _share(graph, blocks, plan, coordinates)
    if share is not None:
        graph = graph.with_batch_size(share.batch_size)
    crossing = boundaries(graph, blocks, plan)
    uses = uses_by_block(graph, blocks, positions)
    leaves = _leaves(graph, blocks, plan, stage_index=stage_index, uses=uses)
    receives = tuple(b for b in crossing if b.target_stage == stage_index)
    sends = tuple(b for b in crossing if b.source_stage == stage_index)
    kept, draws = tuple(map(value_key, outputs)), Draws()
    if of_slice is not None:
        kept, draws = (*kept, *of_slice.kept), of_slice.draws
    stage = _Stage(
        graph,
        blocks,
        own,
        Rank(
            own.mesh,
            coordinates,
            communicator,
            draws,
            share,
            {each.layer: each.pairs for each in own.placements if each.experts},
        ),
        plan.num_microbatches,
        uses,
        leaves,
        {b.key: b.target_layout for b in receives},
        frozenset((*kept, *(b.key for b in sends))),
        most_tiles=1 if splits(plan.schedule) else plan.most_tiles,
        is_in_parts=plan.num_microbatches > 1 or of_slice is not None,
    )
    made: dict[str, Layout] = {}
    programs = []
    for position, block_plan in zip(positions, own.blocks, strict=True):
        programs.append(_build_block(stage, position, block_plan.recompute, made=made))
    of_kind = {name: graph[name].kind for name in leaves}
    loss = value_key(graph.loss)
    nodes = [name for at in positions for name in blocks.blocks[at].nodes]
    return StageProgram(
        index=stage_index,
        mesh=own.mesh,
        coordinates=coordinates,
        blocks=tuple(programs),
        parameters={
            n: p
            for n, p in leaves.items()
            if isinstance(p, ParameterProgram) and of_kind[n] == "parameter"
        },
        buffers={
            n: p
            for n, p in leaves.items()
            if isinstance(p, ParameterProgram) and of_kind[n] == "buffer"
        },
        inputs={
            n: h for n, h in leaves.items() if isinstance(h, HeldValue) and of_kind[n] == "input"
        },
        constants={
            n: h for n, h in leaves.items() if isinstance(h, HeldValue) and of_kind[n] == "constant"
        },
        receives=receives,
        sends=sends,
        layouts=made,
        loss=loss if loss in made else None,
        draws=draws,
        counting=build_counting(
            whole if of_slice is None else of_slice.whole,
            stage.counts(nodes),
            plan.num_microbatches,
            draws,
        ),
        updates={name: value_key(ref) for name, ref in graph.updates.items() if name in leaves},
        kept=kept,
        share=share,
        updates_once=not graph.accumulation.mixing,
        means=frozenset(graph.accumulation.means) & leaves.keys(),
        num_microbatches=plan.num_microbatches,
        shard_degree=own.shard_degree,
    )


def _share(
    graph: Graph, blocks: Blocks, plan: Plan, coordinates: tuple[int, ...]
) -> RowShare | None:
    """Return a rank's share of the rows if the plan splits the batch unevenly, else None. Raises
    ``PlanError`` (AP526) if the batch cannot be split as the plan says."""
    if not any(stage.shares for stage in plan.stages):
        return None
    stage = plan.stages[0]
    why = ""
    if len(plan.stages) > 1:
        why = "the plan has several stages"
    elif len(stage.shares) != stage.mesh.shape[0] or min(stage.shares) < 0:
        why = f"{len(stage.shares)} shares for the mesh {stage.mesh.shape}"
    elif sum(stage.shares) != graph.batch_size:
        why = f"the shares are {sum(stage.shares)} rows, a micro-batch has {graph.batch_size}"
    names = [*graph.by_name]
    leaves = {node.name for node in graph if node.kind not in ("op", "input")}
    why = why or why_not(
        graph, names, lambda n: None if n in leaves else stage.layout_of(n, blocks)
    )
    if why:
        raise PlanError(
            "AP526", "the batch cannot be divided as the plan requires", why=why, fix="plan again"
        )
    return share_of(stage.shares, coordinates[0])


def _leaves(
    graph: Graph,
    blocks: Blocks,
    plan: Plan,
    *,
    stage_index: int,
    uses: Mapping[Ref, tuple[int, ...]],
) -> dict[str, HeldValue | ParameterProgram]:
    """Return each parameter, buffer, batch input and constant that the stage uses, with its
    layout."""
    stage = plan.stages[stage_index]
    wanted = wanted_layouts(graph, blocks, plan, stage_index)
    leaves: dict[str, HeldValue | ParameterProgram] = {}
    for ref, positions in uses.items():
        node, name = graph[ref.name], ref.name
        layout = stage.leaf_layout(name, blocks)
        if node.kind == "parameter":
            held = tuple(p if p.is_shard else REPLICATE for p in layout)
            leaves[name] = ParameterProgram(node.spec, held, len(positions) > 1)
        elif node.kind == "buffer":
            held = _agreed_layout(wanted[ref])
            is_shared = len(positions) > 1 or name in graph.updates
            leaves[name] = ParameterProgram(node.spec, held, is_shared)
        elif node.kind == "input":
            leaves[name] = HeldValue(node.spec, boundary_layout(layout))
        elif node.kind == "constant":
            leaves[name] = HeldValue(node.spec, _agreed_layout(wanted[ref]))
    return leaves


def _agreed_layout(wanted: list[Layout]) -> Layout:
    """Return the layout in which all users of a value read it, given the layouts ``wanted`` by
    each; if they differ, the layout in which every rank holds it whole. An op can write a buffer in
    place if no user converts it."""
    first = boundary_layout(wanted[0])
    if all(boundary_layout(layout) == first for layout in wanted):
        return first
    return (INVARIANT,) * len(first)


def _build_block(
    stage: _Stage, position: int, recompute: Recompute, *, made: dict[str, Layout]
) -> BlockProgram:
    """Build the program of the block at ``position``; add the layouts of its outputs to
    ``made``."""
    block = stage.blocks.blocks[position]
    layouts = {name: op_layout(stage.plan, stage.blocks, name) for name in block.nodes}
    held = {
        name: leaf.layout
        for name, leaf in stage.leaves.items()
        if isinstance(leaf, ParameterProgram)
        and not leaf.shared
        and position in stage.uses[Ref(name)]
    }
    inputs = _inputs(stage, block, held, made)
    outputs = {
        key: _output_layout(stage, key, layouts[parse_key(key).name].outputs[parse_key(key).index])
        for key in _outputs(stage, block, position)
    }
    counts = stage.counts(block.nodes)
    module = localize_block(
        stage.graph,
        BlockInterface(block.nodes, inputs, held, outputs, counts),
        layouts=layouts,
        rank=stage.rank,
        num_microbatches=stage.num_microbatches,
        replayed=stage.replayed(block, recompute),
    )
    made.update(outputs)
    return BlockProgram(
        name=block.name,
        kind=block.kind,
        module=module,
        inputs=(*inputs, *counts),
        outputs=tuple(outputs),
        parameters=tuple(n for n in held if stage.graph[n].kind == "parameter"),
        buffers=tuple(n for n in held if stage.graph[n].kind == "buffer"),
        recompute=recompute,
    )


def _inputs(
    stage: _Stage, block: Block, held: Mapping[str, Layout], made: Mapping[str, Layout]
) -> dict[str, Layout]:
    """Return the keys of the values that a block takes as inputs, in order of first use, with their
    layouts. ``held``: parameters and buffers inside the block; ``made``: outputs of earlier
    blocks."""
    own, inputs = set(block.nodes), dict[str, Layout]()
    for name in block.nodes:
        for ref in stage.graph[name].inputs:
            if ref.name in own or ref.name in held:
                continue
            key = value_key(ref)
            if ref.name in stage.leaves:
                inputs[key] = stage.leaves[ref.name].layout
            else:
                inputs[key] = stage.received[key] if key in stage.received else made[key]
    return inputs


def _outputs(stage: _Stage, block: Block, position: int) -> tuple[str, ...]:
    """Return the keys of the values of a block that later blocks, other stages, the loss or buffers
    need."""
    keys = []
    for name in block.nodes:
        for index in range(len(stage.graph[name].outputs)):
            ref = Ref(name, index)
            used_later = stage.uses.get(ref, (position,))[-1] > position
            is_kept = ref == stage.graph.loss or ref in stage.updated
            if used_later or value_key(ref) in stage.sent or is_kept:
                keys.append(value_key(ref))
    return tuple(keys)


def _output_layout(stage: _Stage, key: str, layout: Layout) -> Layout:
    if parse_key(key) == stage.graph.loss:
        return tuple(p if p.kind == "P" else INVARIANT for p in layout)
    if parse_key(key) in stage.updated:
        return stage.leaves[stage.updated[parse_key(key)]].layout
    return boundary_layout(layout) if key in stage.sent else layout
