"""Parts of a block that are computed tile by tile, as their ops treat rows one by one.

In: a block's ops and their strategies on an axis. Out: regions, in each of which a dimension of
rows or positions may be cut into tiles. A tile is computed as a rank of an axis would compute its
part: a value that is split there is narrowed, other values are whole, partial sums are added up
over the tiles. No op of a region exchanges anything along that axis, so one device can compute the
tiles one after the other.

Values inside a region are never whole in memory: not in the forward, and not in the backward, which
computes each tile again. So the logits of a large vocabulary, or the inner values of an MLP over
many positions, take the memory of one tile (Luo et al. 2024, "MiniSequence Transformer",
arXiv:2407.15892; Bekman et al. 2025, "Arctic Long Sequence Training", arXiv:2506.13996).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from ..graph.graph import Graph, Node, Ref
from ..graph.layout import AxisStrategy, Mesh, Placement
from ..graph.positions import Strategies
from ..ops import Rules
from ..ops.catalog import spec_of

LEAST_TOKENS = 1024
"""Tokens of a tile at the least: products of fewer rows use a GPU badly."""

MOST_TILES = 1 << 16
"""Number of tiles that no op has: as many as are worthwhile."""

LEAST_BYTES = 256 << 20
"""Bytes of the values of a tile at the least: kernels on fewer bytes take no longer than their
launch, and nobody lacks that memory."""

LEAST_RATIO = 1.0
"""Bytes that tiles save at the least for each byte of the sums of gradients of the weights that all
tiles read: one device adds them up in float32, where it would else make each of them once."""


@dataclass(frozen=True, slots=True)
class TiledRegion:
    """Ops of a block that run tile by tile. ``strategies``: by op, in the block's order, its
    strategy on the axis of tiles. ``entries``: the values that the ops read, each with its
    placement on that axis. ``cut``: shape and cut dimension of each value that is cut;
    ``num_bytes``: bytes of the cut values that the ops make; both of one row, cut by positions, or
    of two rows, cut by rows (``num_rows``). ``is_drawn``: an op draws random numbers.
    ``sum_bytes``: sums over the tiles of gradients of weights."""

    strategies: Mapping[str, AxisStrategy]
    entries: Mapping[Ref, Placement]
    cut: tuple[tuple[tuple[int, ...], int], ...]
    num_bytes: int
    num_rows: int
    is_drawn: bool = False
    sum_bytes: int = 0

    def num_tiles(self, mesh: Mesh, batch_size: int, most: int) -> int:
        """Return the number of tiles on a rank of a mesh that computes ``batch_size`` rows: the
        largest power of two, ``most`` at the most, that divides every value and leaves a tile
        ``LEAST_TOKENS`` and ``LEAST_BYTES``. It is 1 if the ops are not worth cutting, if the rows
        do not divide evenly, or if an op draws numbers and an axis may gather parts of its values:
        a tile would have several parts, but numbers are drawn for consecutive places."""
        num_rows, left = divmod(batch_size, mesh.row_parts)
        of_positions = dict(zip(mesh.axes, mesh.shape, strict=True)).get("cp", 1)
        gathering = mesh.size // (mesh.row_parts * of_positions)
        if left or (self.is_drawn and gathering > 1):
            return 1
        length, share = num_rows, num_rows / self.num_rows
        if num_rows == 1:
            whole = gcd(*(shape[dim] for shape, dim in self.cut))
            length, left = divmod(whole, of_positions * gathering)
            length, share = 1 if left else length, share / of_positions
        num_dims = min(3, max(len(shape) for shape, _ in self.cut))
        tokens = min(prod(shape[:-1]) for shape, _ in self.cut if len(shape) >= num_dims)
        worthwhile = share * min(tokens / LEAST_TOKENS, self.num_bytes / LEAST_BYTES)
        count = 1
        while 2 * count <= min(most, worthwhile) and length % (2 * count) == 0:
            count *= 2
        saved = share * self.num_bytes * (1 - 1 / count)
        return count if saved >= LEAST_RATIO * self.sum_bytes else 1


def last_region(nodes: Sequence[str], graph: Graph, rules: Rules, mesh: Mesh) -> TiledRegion | None:
    """Return the largest region at the end of a block; None without any. No op of the block outside
    the region reads its values. It is cut by positions if a rank of the mesh computes one row, else
    by rows. ``nodes``: the block's ops in order."""
    size = min(graph.batch_size // mesh.row_parts, 2)
    if size and graph.batch_size != size:
        if not graph.batch_dims:
            return None
        graph = graph.with_batch_size(size)
    if any(graph[name].fused is not None for name in nodes):
        return None  # of a compiler, which decides what it keeps

    def strategies(node: Node) -> tuple[AxisStrategy, ...]:
        return rules.axis_strategies(node, graph, 2)

    grown = (each for each in _grown(nodes, graph, strategies) if not each.after)
    best = max(grown, key=lambda each: each.num_bytes, default=None)
    return None if best is None else best.finished()


def _grown(nodes: Sequence[str], graph: Graph, strategies: Strategies) -> Iterator[_Region]:
    """Yield every region with a costly op or a loss that can be grown from a first op."""
    weights = _of_weights(nodes, graph)
    seen = set[tuple[str, AxisStrategy]]()
    for start, name in enumerate(nodes):
        for strategy in strategies(graph[name]):
            if (name, strategy) in seen:
                continue
            region = _Region(graph, strategies, weights)
            if region.takes(graph[name], strategy) and region.entries:
                for other in nodes[start:]:
                    region.look(graph[other])
                seen.update(region.chosen.items())
                if region.is_worthwhile:
                    yield region


def _of_weights(nodes: Sequence[str], graph: Graph) -> frozenset[str]:
    """Return the parameters and buffers that ops read, and the ops that compute of them alone."""
    leaves = {ref.name for name in nodes for ref in graph[name].inputs}
    found = {name for name in leaves if graph[name].kind in ("parameter", "buffer")}
    for name in nodes:
        inputs = graph[name].inputs
        if inputs and found.issuperset(ref.name for ref in inputs):
            found.add(name)
    return frozenset(found)


@dataclass
class _Region:
    """Region that grows. ``chosen``: by op, its strategy; ``made``: values that its ops make;
    ``entries``: values from outside, of which ``weights`` are not cut; ``after``: ops outside that
    read values of the region, directly or not."""

    graph: Graph
    strategies: Strategies
    weights: frozenset[str]
    chosen: dict[str, AxisStrategy] = field(default_factory=dict)
    made: dict[Ref, Placement] = field(default_factory=dict)
    entries: dict[Ref, Placement] = field(default_factory=dict)
    after: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values that the region makes tile by tile."""
        return sum(self.graph.spec(ref).num_bytes for ref, own in self.made.items() if own.is_shard)

    @property
    def is_worthwhile(self) -> bool:
        nodes = (self.graph[name] for name in self.chosen)
        return any(spec.is_costly or spec.loss is not None for spec in map(spec_of, nodes))

    def look(self, node: Node) -> None:
        """Add an op, the next in the block's order, if it can be computed tile by tile."""
        if node.name in self.chosen:
            return
        follows = any(ref.name in self.after for ref in node.inputs)
        if not follows and self._is_next(node):
            for strategy in self.strategies(node):
                if self.takes(node, strategy):
                    return
        if follows or any(ref.name in self.chosen for ref in node.inputs):
            self.after.add(node.name)

    def _is_next(self, node: Node) -> bool:
        """Return whether an op reads values that are cut, or sums over them. Ops that read nothing
        with a gradient, such as those on targets, are left out."""
        reads = [self.made[ref] for ref in node.inputs if ref in self.made]
        if not reads and any(self.graph.spec(ref).requires_grad for ref in node.inputs):
            reads = [self.entries[ref] for ref in node.inputs if ref in self.entries]
        return any(map(_varies, reads))

    def takes(self, node: Node, strategy: AxisStrategy) -> bool:
        """Add an op with a strategy if that fits; return whether it does."""
        fits = not _exchanges(node, strategy) and all(map(_varies, strategy.outputs))
        # an op on parts of a sum, such as its scaling, is repeated in every tile: scalars alone
        is_scalar = all(spec.numel == 1 for spec in node.outputs)
        if not fits or not any(each.is_shard or is_scalar for each in strategy.inputs):
            return False
        entering: dict[Ref, Placement] = {}
        for ref, placement in zip(node.inputs, strategy.inputs, strict=True):
            known = self.made.get(ref, self.entries.get(ref, entering.get(ref)))
            if known is None:
                if placement.kind == "P" or (placement.is_shard and ref.name in self.weights):
                    return False
                entering[ref] = placement
            elif known != placement and (ref in self.made or known.is_shard or placement.is_shard):
                return False
        self.chosen[node.name] = strategy
        self.entries |= entering
        self.made |= {Ref(node.name, at): own for at, own in enumerate(strategy.outputs)}
        return True

    def finished(self) -> TiledRegion:
        """Return the region with the figures of the values that it cuts."""
        placed = (*self.entries.items(), *self.made.items())
        cut = {(self.graph.spec(ref).shape, own.dim): None for ref, own in placed if own.is_shard}
        is_drawn = any(spec_of(self.graph[name]).is_counted for name in self.chosen)
        num_rows = self.graph.batch_size
        whole = (self.graph.spec(ref) for ref, own in self.entries.items() if not own.is_shard)
        sum_bytes = sum(max(4, each.itemsize) * each.numel for each in whole if each.requires_grad)
        return TiledRegion(
            self.chosen, self.entries, tuple(cut), self.num_bytes, num_rows, is_drawn, sum_bytes
        )


def _varies(placement: Placement) -> bool:
    """Return whether each tile has its own value: a cut of the whole, or a part of a sum."""
    return placement.is_shard or placement.kind == "P"


def _exchanges(node: Node, strategy: AxisStrategy) -> bool:
    """Return whether an op may not be computed tile by tile: it exchanges something along the axis
    of tiles, other than the divisor of a mean loss, which is known before; it is attention, which
    would be computed once more; or it draws from a generator, which draws other numbers again."""
    spec = spec_of(node)
    if spec.family == "attention" or ("dropout" in spec.name and not spec.is_counted):
        return True
    is_counted = spec.loss is not None and all(each.is_shard for each in strategy.inputs)
    return bool(strategy.collectives) and not is_counted
