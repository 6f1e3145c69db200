"""Rows of each micro-batch that the ranks of a plan read.

In: the graph at micro-batch size, its blocks and the plan. Out: for each stage the mesh axes that
split the rows of its inputs and the rows of each part (``StageRows``), and for each rank its rows
of every micro-batch (``HeldRows``). A rank whose stages need different parts reads all rows. Every
rank computes the same result for every other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...planner.graph.graph import Blocks, Graph
from ...planner.graph.layout import Layout, Mesh, boundary_layout
from ...planner.plan import Plan
from ...planner.variants.replicas import placed_stages
from .accumulate import counted_inputs
from .stage_cut import stage_ranges, uses_by_block


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of the batch that a rank reads: of each micro-batch of ``total`` rows, rows ``first`` to
    ``first + rows`` - 1, which are part number ``part`` of ``parts``. ``is_even``: all parts are
    equally large."""

    first: int
    rows: int
    total: int
    num_microbatches: int
    part: int = 0
    parts: int = 1
    is_even: bool = True

    @property
    def size(self) -> int:
        """Number of the rank's rows in a step, all micro-batches together."""
        return self.rows * self.num_microbatches

    @property
    def is_whole(self) -> bool:
        return self.rows == self.total

    def indices(self) -> tuple[int, ...]:
        """Return the numbers of the rank's rows in the global batch, in the order in which it holds
        them.

        >>> HeldRows(first=1, rows=1, total=2, num_microbatches=3).indices()
        (1, 3, 5)
        """
        starts = range(self.first, self.total * self.num_microbatches, self.total)
        return tuple(row for start in starts for row in range(start, start + self.rows))


@dataclass(frozen=True, slots=True)
class StageRows:
    """Division of a micro-batch's rows among a stage's ranks: the rank at position ``p`` along the
    mesh axes ``axes`` (counted as one axis, the first outermost) reads ``sizes[p]`` rows.
    ``inputs`` maps each input with rows to the dimension that counts them; every rank needs all
    rows of the inputs ``whole``."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    inputs: Mapping[str, int]
    whole: tuple[str, ...]

    def part(self, mesh: Mesh, coordinates: Sequence[int]) -> int:
        """Return the index in ``sizes`` of the part of the rows that the rank at ``coordinates``
        reads."""
        found = 0
        for axis in self.axes:
            found = found * mesh.shape[axis] + coordinates[axis]
        return found

    def held(self, part: int, num_microbatches: int) -> HeldRows:
        """Return the rows of part number ``part``. A rank without rows reads the first row of the
        batch, which does not affect the result."""
        rows = self.sizes[part]
        return HeldRows(
            sum(self.sizes[:part]) if rows else 0,
            max(rows, 1),
            sum(self.sizes),
            num_microbatches,
            part,
            len(self.sizes),
            len(set(self.sizes)) == 1,
        )


def rows_of_stages(
    graph: Graph, blocks: Blocks, plan: Plan, *, counts: bool
) -> tuple[StageRows | None, ...]:
    """Return the division of each stage's input rows among its ranks; None for stages without
    inputs. ``counts``: losses divide by counts over all micro-batches
    (``passes.local.accumulate``)."""
    stages = range(len(plan.stages))
    found = [_stage_rows(graph, blocks, plan, index, counts) for index in stages]
    most = max((each.sizes for each in found if each is not None), key=len, default=())
    return tuple(
        each if each is None else _like_others(each, most, plan.stages[index].mesh)
        for index, each in enumerate(found)
    )


def _stage_rows(
    graph: Graph, blocks: Blocks, plan: Plan, index: int, counts: bool
) -> StageRows | None:
    stage, positions = plan.stages[index], stage_ranges(plan)[index]
    nodes = [name for at in positions for name in blocks.blocks[at].nodes]
    counted = counted_inputs(graph, nodes) if counts else ()
    used = [ref.name for ref in uses_by_block(graph, blocks, positions)]
    names = dict.fromkeys((*(n for n in used if graph[n].kind == "input"), *counted))
    if not names:
        return None
    dims = {name: dim for name in names for dim in graph.batch_dims.get(name, ())}
    inputs = {name: dim for name, dim in dims.items() if dim is not None}
    if stage.shares:
        return StageRows((0,), stage.shares, inputs, tuple(n for n in counted if n in inputs))
    split = {
        name: _axes(boundary_layout(stage.leaf_layout(name, blocks)), dim, stage.mesh)
        for name, dim in inputs.items()
        if name in used
    }
    axes = max(split.values(), key=lambda each: _num_parts(each, stage.mesh), default=())
    parts = _num_parts(axes, stage.mesh)
    whole = tuple(n for n in inputs if n in counted or split[n] != axes) if parts > 1 else ()
    return StageRows(axes, (graph.batch_size // parts,) * parts, inputs, whole)


def _axes(layout: Layout, dim: int, mesh: Mesh) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, placement in enumerate(layout)
        if placement.is_shard and placement.dim == dim and mesh.shape[axis] > 1
    )


def _num_parts(axes: Sequence[int], mesh: Mesh) -> int:
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    return parts


def _like_others(rows: StageRows, sizes: tuple[int, ...], mesh: Mesh) -> StageRows:
    """Return the division of a stage's rows in which rank ``p`` reads ``sizes[p]`` rows, as in
    other stages, if all its ranks need all rows: they then receive the others' rows. If the stage's
    own layout divides the rows, its division is returned unchanged."""
    if rows.axes or len(sizes) != mesh.shape[0] or len(sizes) == 1 or not rows.inputs:
        return rows
    return replace(rows, axes=(0,), sizes=sizes, whole=tuple(rows.inputs))


def rows_of_rank(found: Sequence[StageRows | None], plan: Plan, rank: int) -> HeldRows | None:
    """Return the rows of each micro-batch that ``rank`` reads; None if none of its stages reads an
    input. ``found``: division of each stage's rows."""
    held: dict[HeldRows, None] = {}
    for index, stage in enumerate(placed_stages(plan)):
        rows = found[index % len(found)]
        if rank in stage.devices and rows is not None:
            coordinates = stage.mesh.coordinates(stage.devices.index(rank))
            held[rows.held(rows.part(stage.mesh, coordinates), plan.num_microbatches)] = None
    if not held:
        return None
    if len(held) == 1:
        return next(iter(held))
    total = plan.microbatch_size
    return HeldRows(0, total, total, plan.num_microbatches)


def data_place(found: Sequence[StageRows | None], plan: Plan, rank: int) -> tuple[int, int] | None:
    """Return the ``(rank, world)`` with which ``rank`` calls its data source; None if it reads no
    data. ``found``: division of each stage's rows. If all ranks read equal parts, a rank requests
    its part by number; otherwise it requests the global batch, ``(0, 1)``."""
    everyone = {each for stage in placed_stages(plan) for each in stage.devices}
    held = {each: rows_of_rank(found, plan, each) for each in sorted(everyone)}
    if held.get(rank) is None:
        return None
    kinds = {(rows.parts, rows.is_even) for rows in held.values() if rows is not None}
    own = held[rank]
    assert own is not None
    return (own.part, own.parts) if len(kinds) == 1 and own.is_even else (0, 1)
