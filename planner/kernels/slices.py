"""Parts of a block that are computed slice by slice, as their ops treat rows one by one.

In: a block's ops and their strategies on an axis. Out: regions, in each of which a dimension of
rows or positions may be cut into slices. A slice is computed as a rank of an axis would compute its
part: a value that is split there is narrowed, other values are whole, partial sums are added up
over the slices. No op of a region exchanges anything along that axis, so one device can compute the
slices one after the other.

Values inside a region are never whole in memory: not in the forward, and not in the backward, which
computes each slice again. So the logits of a large vocabulary, or the inner values of an MLP over
many positions, take the memory of one slice (Luo et al. 2024, "MiniSequence Transformer",
arXiv:2407.15892; Bekman et al. 2025, "Arctic Long Sequence Training", arXiv:2506.13996).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from ..graph.graph import Graph, Node, Ref
from ..graph.layout import AxisStrategy, Placement
from ..graph.positions import NONE, Dims, Strategies
from ..ops.case import packet
from ..ops.catalog import spec_of
from .recompute import is_costly


LEAST_ROWS = 1024
"""Rows (tokens) of a slice at the least: products of fewer rows use a GPU badly."""


def num_slices(cut: Sequence[tuple[tuple[int, ...], int]], split: int) -> int:
    """Return the number of slices into which a rank cuts a region: the largest power of two that
    divides every value and leaves a slice ``LEAST_ROWS`` rows. ``cut``: shape and cut dimension of
    each value; ``split``: the number of parts into which mesh axes split that dimension.

    >>> num_slices([((1, 65536, 4096), 1), ((65536, 128256), 0)], 8)
    8
    >>> num_slices([((8, 2048, 4096), 0), ((16384, 128256), 0)], 1)
    8
    """
    length = gcd(*(shape[dim] for shape, dim in cut))
    if length % split:
        return 1
    most_dims = max(len(shape) for shape, _ in cut)
    rows = min(prod(shape[:-1]) for shape, _ in cut if len(shape) >= min(most_dims, 3)) // split
    most = min(length // split, max(1, rows // LEAST_ROWS))
    count = 1
    while 2 * count <= most and length // split % (2 * count) == 0:
        count *= 2
    return count


@dataclass(frozen=True, slots=True)
class SlicedRegion:
    """Ops of a block that run slice by slice. ``strategies``: by op, in the block's order, its
    strategy on the axis of slices. ``entries``: the values that the ops read, each with its
    placement on that axis; ``exits``: the values that others read."""

    strategies: Mapping[str, AxisStrategy]
    entries: Mapping[Ref, Placement]
    exits: Mapping[Ref, Placement]


def last_region(
    nodes: Sequence[str],
    graph: Graph,
    strategies: Strategies,
    dims: Dims,
    leaving: Collection[Ref],
) -> SlicedRegion | None:
    """Return the largest region at the end of a block: no op outside reads what it makes. None
    without any.

    ``nodes``: the block's ops in order; ``strategies``: function that returns an op's strategies on
    the axis of slices; ``dims``: dimensions of values that count rows or positions; ``leaving``:
    the values that leave the block.
    """
    grown = (each for each in _grown(nodes, graph, strategies, dims) if not each.after)
    best = max(grown, key=lambda each: each.num_bytes, default=None)
    return None if best is None else best.finished(leaving)


def _grown(
    nodes: Sequence[str],
    graph: Graph,
    strategies: Strategies,
    dims: Dims,
) -> Iterator[_Region]:
    """Yield every region with a costly op or a loss that can be grown from a first op."""
    seen = set[tuple[str, AxisStrategy]]()
    for start, name in enumerate(nodes):
        for strategy in strategies(graph[name]):
            if (name, strategy) in seen:
                continue
            region = _Region(graph, strategies, dims)
            if region.takes(graph[name], strategy) and region.entries:
                for other in nodes[start:]:
                    region.look(graph[other])
                seen.update(region.chosen.items())
                if region.is_worthwhile:
                    yield region


@dataclass
class _Region:
    """Region that grows. ``chosen``: by op, its strategy; ``made``: values that its ops make;
    ``entries``: values from outside; ``after``: ops outside that read them, directly or not."""

    graph: Graph
    strategies: Strategies
    dims: Dims
    chosen: dict[str, AxisStrategy] = field(default_factory=dict)
    made: dict[Ref, Placement] = field(default_factory=dict)
    entries: dict[Ref, Placement] = field(default_factory=dict)
    after: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values that the region makes slice by slice."""
        return sum(self.graph.spec(ref).num_bytes for ref, own in self.made.items() if own.is_shard)

    @property
    def is_worthwhile(self) -> bool:
        nodes = (self.graph[name] for name in self.chosen)
        return any(is_costly(node) or spec_of(node).loss is not None for node in nodes)

    def look(self, node: Node) -> None:
        """Add an op, the next in the block's order, if it can be computed slice by slice."""
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
        """Return whether an op reads values that are cut. What it computes of data alone, such as
        targets, it computes before."""
        reads = [self.made[ref] for ref in node.inputs if ref in self.made]
        if not reads and any(spec.requires_grad for spec in node.outputs):
            reads = [self.entries[ref] for ref in node.inputs if ref in self.entries]
        return any(each.is_shard for each in reads)

    def takes(self, node: Node, strategy: AxisStrategy) -> bool:
        """Add an op with a strategy if that fits; return whether it does."""
        fits = not _exchanges(node, strategy) and any(each.is_shard for each in strategy.inputs)
        if not fits or not all(each.is_shard or each.kind == "P" for each in strategy.outputs):
            return False
        entering: dict[Ref, Placement] = {}
        for ref, placement in zip(node.inputs, strategy.inputs, strict=True):
            known = self.made.get(ref, self.entries.get(ref, entering.get(ref)))
            if known is None:
                if placement.kind == "P" or (placement.is_shard and not self._counts(ref, placement)):
                    return False
                entering[ref] = placement
            elif known != placement and (ref in self.made or known.is_shard or placement.is_shard):
                return False
        self.chosen[node.name] = strategy
        self.entries |= entering
        self.made |= {Ref(node.name, at): own for at, own in enumerate(strategy.outputs)}
        return True

    def _counts(self, ref: Ref, placement: Placement) -> bool:
        """Return whether the split dimension of a value from outside counts rows or positions, or
        is that of a constant that is read along with them."""
        if self.graph[ref.name].kind in ("parameter", "buffer"):
            return False
        return placement.dim in self.dims.get(ref, NONE) or bool(self.entries)

    def finished(self, leaving: Collection[Ref]) -> SlicedRegion:
        """Return the region; ``leaving``: the values that leave the block."""
        exits = {ref: own for ref, own in self.made.items() if ref in leaving}
        return SlicedRegion(self.chosen, self.entries, exits)


def _exchanges(node: Node, strategy: AxisStrategy) -> bool:
    """Return whether an op may not be computed slice by slice: it exchanges something along the axis
    of slices, other than the divisor of a mean loss, which is known before; or it is attention,
    which would be computed once more."""
    spec = spec_of(node)
    if spec.family == "attention":
        return True
    is_counted = spec.loss is not None and all(each.is_shard for each in strategy.inputs)
    return bool(strategy.collectives) and not is_counted
