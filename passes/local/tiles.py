"""A region of a block as one rank computes it: tile by tile.

In: a region (``planner.kernels.tiles``), the layouts of its ops, a rank. Out: a function object
for the block's graph. The tiles are ranks of one more mesh axis, whose coordinate is the number of
the tile: so every op computes a tile as it would compute a part, random numbers and positions
included. The axis stands inside the mesh axes that split the tiled dimension in every value, and
outside the others, which gather and scatter it: so they exchange parts of one tile. A tile then
has the same rows of each part that such an axis splits off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from ...planner.graph.graph import Graph, Ref
from ...planner.graph.layout import ROW_AXES, AxisStrategy, Layout, Mesh, NodeLayout, Placement
from ...planner.kernels.tiles import TiledRegion
from ..backward.recomputing import Recomputing
from ..ops.collectives import Communicator, Parts, Rank, Running
from ..ops.random_ops import Draws
from ..ops.torch_ops import resolve

AXIS = "tiles"
"""Name of the mesh axis of tiles."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of a local tensor into tiles: along dimension ``dim``, of each of ``parts`` equal parts.
    A value that is not cut has no dimension (-1)."""

    dim: int = -1
    parts: int = 1

    def of(self, tensor: Tensor, number: int, count: int) -> Tensor:
        """Return tile ``number`` of ``count``."""
        if self.dim < 0:
            return tensor
        if self.parts == 1:
            size = tensor.shape[self.dim] // count
            return tensor.narrow(self.dim, number * size, size)
        return self._parts(tensor, number, count).flatten(self.dim, self.dim + 1)

    def put(self, whole: Tensor, part: Tensor, number: int, count: int) -> None:
        """Write tile ``number`` of ``count``."""
        if self.parts == 1:
            self.of(whole, number, count).copy_(part)
        else:
            into = self._parts(whole, number, count)
            shape = (*part.shape[: self.dim], self.parts, -1, *part.shape[self.dim + 1 :])
            into.copy_(part.reshape(shape))

    def whole(self, part: Tensor, count: int) -> Tensor:
        """Return memory for ``count`` tiles of the shape of ``part``."""
        shape = list(part.shape)
        shape[self.dim] *= count
        return part.new_empty(shape)

    def _parts(self, tensor: Tensor, number: int, count: int) -> Tensor:
        shape = (*tensor.shape[: self.dim], self.parts, count, -1, *tensor.shape[self.dim + 1 :])
        return tensor.view(shape).select(self.dim + 1, number)


@dataclass(frozen=True)
class _TileCommunicator:
    """Communicator of a rank that computes tile ``number`` of ``count``: mesh axis ``at`` is that
    of the tiles, along which nothing is sent."""

    communicator: Communicator
    at: int
    number: int
    count: int

    def _mesh_axis(self, axis: int) -> int:
        return axis - (axis > self.at)

    def size(self, axis: int) -> int:
        return self.count if axis == self.at else self.communicator.size(self._mesh_axis(axis))

    def coordinate(self, axis: int) -> int:
        is_own = axis == self.at
        return self.number if is_own else self.communicator.coordinate(self._mesh_axis(axis))

    def all_reduce(self, tensor: Tensor, axis: int, op: Literal["sum", "max"] = "sum") -> Tensor:
        return self.communicator.all_reduce(tensor, self._mesh_axis(axis), op)

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        return self.communicator.all_gather(tensor, self._mesh_axis(axis), dim)

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        return self.communicator.reduce_scatter(tensor, self._mesh_axis(axis), dim)

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        return self.communicator.all_to_all(tensor, self._mesh_axis(axis), split_dim, concat_dim)

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        return self.communicator.swap(tensor, self._mesh_axis(axis))

    def parts(
        self, counts: Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        others = (tuple(map(self._mesh_axis, own)) for own in (axes, gathered))
        return self.communicator.parts(counts, *others)

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
        return self.communicator.exchange(rows, parts, tuple(map(self._mesh_axis, axes)))


@dataclass(frozen=True, slots=True)
class Placed:
    """Place of the axis of tiles in a rank's mesh: before mesh axis ``at``, with ``count``
    tiles. ``varying``: the axes from there on that split the tiled dimension of some values."""

    at: int
    count: int
    varying: tuple[int, ...]

    def layout(self, layout: Layout, placement: Placement) -> Layout:
        """Return a layout with the placement on the axis of tiles."""
        return (*layout[: self.at], placement, *layout[self.at :])

    def node(self, layout: NodeLayout, strategy: AxisStrategy) -> NodeLayout:
        """Return an op's layout with its strategy on the axis of tiles."""
        labels = layout.labels and (*layout.labels[: self.at], "", *layout.labels[self.at :])
        return NodeLayout(
            tuple(map(self.layout, layout.inputs, strategy.inputs)),
            tuple(map(self.layout, layout.outputs, strategy.outputs)),
            labels,
        )

    def rank(self, rank: Rank, number: int) -> Rank:
        """Return ``rank`` with an axis of tiles in its mesh, on which it is at ``number``."""
        axes, sizes, place = rank.mesh.axes, rank.mesh.shape, rank.coordinates
        at, of_tile = self.at, _TileCommunicator(rank.communicator, self.at, number, self.count)
        mesh = Mesh((*axes[:at], AXIS, *axes[at:]), (*sizes[:at], self.count, *sizes[at:]))
        coordinates = (*place[:at], number, *place[at:])
        return Rank(mesh, coordinates, of_tile, rank.draws, placements=rank.placements)

    def cut(self, layout: Layout, placement: Placement, mesh: Mesh) -> Cut:
        """Return how a value in a layout is cut into tiles."""
        if not placement.is_shard:
            return Cut()
        whole = (axis for axis in self.varying if layout[axis] != placement)
        return Cut(placement.dim, prod(mesh.shape[axis] for axis in whole))


def place_tiles(
    graph: Graph,
    region: TiledRegion,
    layouts: Mapping[str, NodeLayout],
    entering: Mapping[Ref, Layout],
    mesh: Mesh,
    most: int,
) -> Placed | None:
    """Return the place of the axis of tiles for a region, and the number of tiles (at most
    ``most``); None if the region cannot be cut, or is too small to be. ``layouts``: by op;
    ``entering``: layouts in which values enter.

    If positions are cut, the axis stands inside the mesh axes that split rows: these must split
    every value that has rows and positions in one dimension, and no other axis may split rows.
    Numbers drawn by counter belong to places in the whole tensor, of which a tile has several
    parts if an axis gathers the tiled dimension; numbers of torch's generator are not drawn
    again. So regions of such ops are not cut.
    """
    nodes = [graph[name] for name in region.strategies]
    if any(torch.Tag.nondeterministic_seeded in resolve(node.op).tags for node in nodes):
        return None
    cut = _cut_values(graph, region, layouts, entering)
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    rows = [axis for axis in axes if region.num_rows == 1 and mesh.axes[axis] in ROW_AXES]
    splits = {axis: [each.layout[axis] == each.own for each in cut] for axis in axes}
    if region.num_rows == 1:
        joined = [each.own.dim == each.rows for each in cut]
        split_rows = {axis for axis in axes if any(each.splits_rows(axis) for each in cut)}
        if any(splits[axis] != joined for axis in rows) or not split_rows.issubset(rows):
            return None
    of_cut = {axis: found for axis, found in splits.items() if axis not in rows}
    always = [axis for axis, found in of_cut.items() if all(found)]
    varying = tuple(axis for axis, found in of_cut.items() if any(found) and not all(found))
    at = max((*always, *rows), default=-1) + 1
    if any(axis < at for axis in varying) or (varying and region.is_drawn):
        return None
    count = region.num_tiles(mesh, graph.batch_size, most)
    while count > 1 and any(each.length(mesh, varying) % count for each in cut):
        count //= 2
    return Placed(at, count, varying) if count > 1 else None


class _CutValue(NamedTuple):
    """Value of a region that is cut: its size in the cut dimension, its dimension of rows, its
    layout, and its placement on the axis of tiles."""

    size: int
    rows: int | None
    layout: Layout
    own: Placement

    def splits_rows(self, axis: int) -> bool:
        """Return whether a mesh axis splits the rows, where positions are another dimension."""
        held = self.layout[axis]
        return held.is_shard and held.dim == self.rows != self.own.dim

    def length(self, mesh: Mesh, varying: Sequence[int]) -> int:
        """Return the length that all tiles together have in each part of the value: each axis
        splits it, or (``varying``) splits other values. It is 1 if parts are not equal."""
        inner = (axis for axis, held in enumerate(self.layout) if held == self.own)
        length, left = divmod(self.size, mesh.num_ranks({*inner, *varying}))
        return 1 if left else length


def _cut_values(
    graph: Graph,
    region: TiledRegion,
    layouts: Mapping[str, NodeLayout],
    entering: Mapping[Ref, Layout],
) -> list[_CutValue]:
    held = [(ref, entering[ref], own) for ref, own in region.entries.items()]
    for name, strategy in region.strategies.items():
        layout = layouts[name]
        held += zip(graph[name].inputs, layout.inputs, strategy.inputs, strict=True)
        made = (Ref(name, index) for index in range(len(layout.outputs)))
        held += zip(made, layout.outputs, strategy.outputs, strict=True)
    dims = graph.batch_dims
    return [
        _CutValue(
            graph.spec(ref).shape[own.dim],
            dims[ref.name][ref.index] if dims else None,
            layout,
            own,
        )
        for ref, layout, own in held
        if own.is_shard
    ]


@dataclass(eq=False)
class TiledCall:
    """Function object that computes a region tile by tile, and each tile again in the backward.
    ``programs`` has a graph for each tile; ``cuts`` and ``made`` say how inputs and outputs are
    cut, and outputs that are not cut are sums over the tiles."""

    programs: Sequence[fx.GraphModule]
    cuts: Sequence[Cut]
    made: Sequence[Cut]
    draws: Draws
    replays: Sequence[Recomputing] = field(init=False)
    __name__: str = field(default=AXIS, init=False)

    def __post_init__(self) -> None:
        self.replays = [Recomputing(keeps_costly=False) for _ in self.programs]
        for replay, program in zip(self.replays, self.programs, strict=True):
            replay.mark(program)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
            return self.recorded(None, *inputs)
        return self.forward(inputs)

    def recorded(self, known: Sequence[Tensor] | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the region's outputs, recorded for a backward. ``known``: stand-ins for outputs
        that nothing reads, as the call only repeats the inputs of its backward."""
        results: tuple[Tensor, ...] = _ByTiles.apply(self, known, *inputs)  # type: ignore[no-untyped-call]
        return results

    def tiles(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return tile ``number`` of the inputs."""
        count = len(self.programs)
        return [cut.of(each, number, count) for cut, each in zip(self.cuts, tensors, strict=True)]

    def forward(
        self, inputs: Sequence[Tensor], contexts: Sequence[AbstractContextManager[Any]] = ()
    ) -> tuple[Tensor, ...]:
        """Return the region's outputs, without recording them for a backward. ``contexts``: of the
        forward of each tile."""
        count, results = len(self.programs), list[Tensor]()
        for number, program in enumerate(self.programs):
            with torch.no_grad(), contexts[number] if contexts else nullcontext():
                parts = program(*self.tiles(inputs, number))
            pairs = [*zip(self.made, parts, strict=True)]
            results = results or [_start(cut, part, count) for cut, part in pairs]
            for (cut, part), whole in zip(pairs, results, strict=True):
                if cut.dim < 0:
                    whole.add_(part)
                else:
                    cut.put(whole, part, number, count)
        return tuple(results)


def _start(cut: Cut, part: Tensor, count: int) -> Tensor:
    return torch.zeros_like(part) if cut.dim < 0 else cut.whole(part, count)


class _ByTiles(torch.autograd.Function):
    """Autograd function of a region. Its backward computes each tile again, with its gradients;
    gradients of inputs that are not cut are added up in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, call: TiledCall, known: Sequence[Tensor] | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        if known is not None:
            return tuple(known)
        contexts = [each.contexts() for each in call.replays]
        results = call.forward(inputs, [first for first, _ in contexts])
        ctx.call, ctx.place = call, (call.draws.key, call.draws.microbatch)
        ctx.again = [again for _, again in contexts]
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, inputs = ctx.call, ctx.saved_tensors
        found: list[Tensor | None] = [None] * len(inputs)
        needed = [at for at, is_needed in enumerate(ctx.needs_input_grad[2:]) if is_needed]
        for number, again in enumerate(ctx.again):
            given = [each.detach() for each in call.tiles(inputs, number)]
            wanted = [given[at].requires_grad_() for at in needed]
            with torch.enable_grad(), call.draws.repeated(*ctx.place), again:
                parts = call.programs[number](*given)
            own = _gradients(call, parts, gradients, wanted, number)
            for at, gradient in zip(needed, own, strict=True):
                if gradient is not None:
                    found[at] = _added(call, at, found[at], gradient, number)
        pairs = zip(found, inputs, strict=True)
        return None, None, *(g if g is None else g.to(each.dtype) for g, each in pairs)


def _gradients(
    call: TiledCall,
    parts: Sequence[Tensor],
    gradients: Sequence[Tensor],
    wanted: Sequence[Tensor],
    number: int,
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs ``wanted`` of tile ``number``, of outputs ``parts``."""
    count = len(call.programs)
    pairs = [
        (part, cut.of(gradient, number, count))
        for part, cut, gradient in zip(parts, call.made, gradients, strict=True)
        if part.requires_grad
    ]
    ends, given = [part for part, _ in pairs], [gradient for _, gradient in pairs]
    found: Sequence[Tensor | None] = torch.autograd.grad(ends, wanted, given, allow_unused=True)
    return found


def _added(
    call: TiledCall, at: int, before: Tensor | None, gradient: Tensor, number: int
) -> Tensor:
    """Return the gradient of input ``at`` with that of tile ``number``."""
    cut, count = call.cuts[at], len(call.programs)
    if cut.dim < 0:
        exact = gradient if gradient.dtype == torch.float64 else gradient.float()
        return exact if before is None else before.add_(exact)
    if before is None:
        before = cut.whole(gradient, count).zero_()
    cut.put(before, gradient, number, count)
    return before
