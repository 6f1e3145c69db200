"""Costs of sequence slices, and their best lengths.

In: a plan of whole sequences, and a function that prices the stages of a graph. Out: the fraction
of a micro-batch's time that each slice takes; lengths by the dynamic program of
``planner.schedules.sliced``. The price of a slice is the price of its graph: attention costs as
much as its keys so far require, and small ops have a fixed cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..dims.sequence_places import SeqDims, find_places
from ..errors import UsageError
from ..graph.graph import Blocks, Graph, Node
from ..graph.layout import divides
from ..ops.attention import is_attention
from ..plan import Plan
from ..schedules.orders import slice_lengths
from ..stage.stage_cost import StageCost
from .sequence_slices import SequenceSlice, sequence_slice, slice_bounds

Price = Callable[[Graph, Blocks, Plan], Sequence[StageCost]]
"""Function that prices a plan's stages; the graph has the plan's micro-batch size."""

MOST_UNITS = 16
"""Maximum number of units in a sequence; slice lengths are multiples of a unit."""


class SliceShares(NamedTuple):
    """Lengths of sequence slices in positions, and each slice's fraction of the seconds that a
    micro-batch's forward and backward take unsliced."""

    lengths: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


def slice_shares(
    graph: Graph, blocks: Blocks, plan: Plan, whole: Sequence[StageCost], price: Price
) -> SliceShares | None:
    """Return each slice's fraction of a micro-batch's seconds, over all stages; None if the plan
    has no slices. ``whole``: the stages' costs of unsliced micro-batches."""
    if not plan.slices:
        return None
    places = find_places(graph)
    forward, backward = [], []
    totals = [
        sum(cost.forward_seconds for cost in whole) or 1.0,
        sum(cost.backward_seconds for cost in whole) or 1.0,
    ]
    for bounds in slice_bounds(plan.slices):
        costs = _costs(graph, blocks, plan, places, bounds, price)
        forward.append(sum(cost.forward_seconds for cost in costs) / totals[0])
        backward.append(sum(cost.backward_seconds for cost in costs) / totals[1])
    return SliceShares(plan.slices, tuple(forward), tuple(backward))


def best_lengths(graph: Graph, blocks: Blocks, plan: Plan, price: Price) -> tuple[int, ...]:
    """Return the slice lengths with the fastest step. Lengths are multiples of a unit: a sixteenth
    of a sequence, or the next longer length that the plan's layouts divide.

    A slice of n positions after b others takes f(n) + c n b seconds, as n queries see b earlier
    keys. f is priced at every length, c by pricing the second half of a sequence.
    """
    places = find_places(graph)
    length = places.length
    granularity = next(
        g
        for g in range(max(1, length // MOST_UNITS), length + 1)
        if not length % g
        and undivided_axis(sequence_slice(graph, blocks, plan, places, (0, g))) is None
    )

    def seconds(bounds: tuple[int, int]) -> float:
        costs = _costs(graph, blocks, plan, places, bounds, price)
        return max(
            cost.forward_seconds + cost.backward_seconds + sum(cost.receive_seconds)
            for cost in costs
        )

    alone = {n: seconds((0, n)) for n in range(granularity, length + 1, granularity)}
    half = length // granularity // 2 * granularity
    rate = max(0.0, seconds((half, 2 * half)) - alone[half]) / half**2 if half else 0.0
    return slice_lengths(
        lambda n, before: alone[n] + rate * n * before,
        length,
        len(plan.stages),
        granularity=granularity,
        num_sequences=plan.num_microbatches,
    )


def _costs(
    graph: Graph, blocks: Blocks, plan: Plan, places: SeqDims, bounds: tuple[int, int], price: Price
) -> Sequence[StageCost]:
    part = sequence_slice(graph, blocks, plan, places, bounds)
    axis = undivided_axis(part)
    if axis is not None:
        raise UsageError(
            "AP549",
            f"a slice from position {bounds[0]} to {bounds[1]} cannot be divided over {axis}",
            why="the plan's layouts split positions over it",
            where="--parallel",
            fix="slices whose lengths it divides, or --pin with layouts that split no positions",
        )
    return price(part.graph, part.blocks, part.plan)


def undivided_axis(part: SequenceSlice) -> str | None:
    """Return a mesh axis with its size (``tp=2``) that shards a dimension of a slice's tensor but
    does not divide it; None without any."""
    for stage in part.plan.stages:
        shape = stage.mesh.shape
        for name, own in stage.layouts.items():
            if name not in part.graph.by_name:
                continue  # a node of another stage
            node = part.graph[name]
            given = node.inputs if node.kind == "op" else ()  # a constant is held unsplit
            pairs = [
                *zip(map(part.graph.spec, given), own.inputs, strict=True),
                *zip(node.outputs, own.outputs, strict=True),
            ]
            for spec, layout in pairs:
                if not divides(spec.shape, layout, shape):
                    axes = zip(stage.mesh.axes, shape, layout, strict=True)
                    return next(
                        f"{axis}={size}"
                        for at, (axis, size, placement) in enumerate(axes)
                        if placement.is_shard
                        and not divides(spec.shape, layout[: at + 1], shape[: at + 1])
                    )
    return None


def carried_bytes(
    node: Node, pair_bytes: float, slices: tuple[int, ...], *, again: bool = False
) -> float:
    """Return the bytes per micro-batch that an attention op keeps for its backward because
    sequences are sliced, beyond the bytes that it keeps for whole sequences.

    ``pair_bytes``: keys and values of all positions, which it keeps anyway. The slice that ends at
    e keeps the keys and values of e positions and, except the first, a mask of its queries by e
    keys. If the op is rerun (``again``) in the backward, the keys and values before each slice are
    kept.
    """
    if not slices or not is_attention(node):
        return 0.0
    bounds, length = slice_bounds(slices), sum(slices)
    if again:
        return pair_bytes * sum(start for start, _ in bounds) / length
    more = sum(stop for _, stop in bounds) / length - 1
    masks = sum((stop - start) * stop for start, stop in bounds if start)
    return pair_bytes * more + masks * node.spec.itemsize


def even_lengths(length: int, count: int) -> tuple[int, ...]:
    """Return the lengths of ``count`` slices, as equal as possible, longer slices first.

    >>> even_lengths(8, 3)
    (3, 3, 2)
    """
    short, longer = divmod(length, count)
    return (short + 1,) * longer + (short,) * (count - longer)
