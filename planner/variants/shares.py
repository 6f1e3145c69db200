"""Unequal shares of the batch: each rank of axis "dp" takes rows in proportion to its speed.

In: the rows of a micro-batch on each coordinate of mesh axis 0 (``StagePlan.shares``), or seconds.
Out: a coordinate's rows, whether a stage allows unequal shares, its cost, and the best shares.

Coordinate r of n runs the graph at a batch of ``rows_r · n`` rows, split evenly, so that all its
local shapes are as in an even split. Averages over the batch are then weighted by ``rows_r · n /
total``. This suffices if no other coordinate's rows are needed before the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import floor

from ..graph.graph import Graph, Ref
from ..graph.layout import Layout, NodeLayout, Placement, shard
from ..stage.stage_cost import StageCost


@dataclass(frozen=True, slots=True)
class RowShare:
    """Rows ``first`` to ``first + rows`` of the ``total`` rows (samples) of a micro-batch: the
    share of one of the ``parts`` indices along mesh axis 0.

    A share without rows computes on one row of weight zero, so its partial sums are zero.
    """

    first: int
    rows: int
    total: int
    parts: int

    @property
    def batch_size(self) -> int:
        """Return the batch size that, split evenly into ``parts``, gives each part ``rows`` rows
        (at least 1)."""
        return max(self.rows, 1) * self.parts

    @property
    def weight(self) -> float:
        """Return the weight of the share's mean in the micro-batch's; 1 in an even split."""
        return self.rows * self.parts / self.total


def share_of(shares: Sequence[int], coordinate: int) -> RowShare | None:
    """Return the share of a micro-batch at index ``coordinate`` along mesh axis 0, where ``shares``
    has the rows by index; None for an even split (empty ``shares``).

    >>> share_of((3, 5), 1)
    RowShare(first=3, rows=5, total=8, parts=2)
    """
    if not shares:
        return None
    return RowShare(sum(shares[:coordinate]), shares[coordinate], sum(shares), len(shares))


def coordinate_ranks(ranks: Sequence[int], parts: int, coordinate: int) -> tuple[int, ...]:
    """Return the ranks, of the ranks of a row-major mesh, whose index along the first axis (of size
    ``parts``) is ``coordinate``.

    >>> coordinate_ranks((4, 5, 6, 7), 2, 1)
    (6, 7)
    """
    size = len(ranks) // parts
    return tuple(ranks[coordinate * size : (coordinate + 1) * size])


def why_not(
    graph: Graph, nodes: Iterable[str], layout_of: Callable[[str], NodeLayout | None]
) -> str:
    """Return the reason why a stage with the ops ``nodes`` cannot split the batch unequally along
    mesh axis 0; "" if it can.

    ``layout_of`` returns the layouts of op nodes and of inputs, None for inputs without layouts.
    """
    if not graph.batch_dims:
        return "samples are combined before the loss"
    if graph.accumulation.mixing:
        return f"samples depend on each other in {graph.accumulation.mixing[0]}"
    for name in nodes:
        layout = layout_of(name)
        if layout is None:
            continue
        node = graph[name]
        values = [*node.inputs, *(Ref(name, index) for index in range(len(node.outputs)))]
        for ref, held in zip(values, (*layout.inputs, *layout.outputs), strict=True):
            if not _is_even(graph, ref, held):
                return f"{name} does not hold exactly its own samples"
    return ""


def _is_even(graph: Graph, ref: Ref, held: Layout) -> bool:
    """Return whether mesh axis 0 shards a value by rows (samples) or not at all, and no other axis
    shards its rows."""
    dim = graph.batch_dims[ref.name][ref.index]
    rows: Placement | None = None if dim is None else shard(dim)
    if graph[ref.name].kind == "parameter":
        return not held[0].is_shard
    first = held[0] == rows if rows is not None else not held[0].is_shard
    return first and (rows is None or rows not in held[1:])


def slowest_cost(costs: Sequence[StageCost]) -> StageCost:
    """Return the cost of a stage whose ranks have unequal shares of the batch, given the cost for
    each share: the slowest share's seconds in each part of a step, and the bytes of the fullest
    share."""
    found = max(costs, key=lambda cost: cost.forward_seconds + cost.backward_seconds)
    fullest = max(costs, key=lambda cost: cost.total_bytes)
    seconds = found.seconds._replace(
        optimizer=max(cost.seconds.optimizer for cost in costs),
        parameter_gather=max(cost.seconds.parameter_gather for cost in costs),
        gradient_sync=max(cost.seconds.gradient_sync for cost in costs),
        gather_slowed=max(cost.seconds.gather_slowed for cost in costs),
        sync_slowed=max(cost.seconds.sync_slowed for cost in costs),
    )
    return replace(
        found,
        seconds=seconds,
        memory_bytes=fullest.memory_bytes,
        activation_bytes=fullest.activation_bytes,
    )


def best_shares(
    total: int, speeds: Sequence[float], seconds: Callable[[int, int], float]
) -> tuple[int, ...] | None:
    """Return the rows of each coordinate (index along mesh axis 0) for which the slowest takes the
    least seconds; None if no shares of ``total`` rows fit.

    ``seconds(coordinate, rows)`` must not decrease with the rows; it is infinite for rows that do
    not fit. The first shares are in proportion to ``speeds``, rounded by largest remainder; then
    the slowest coordinate gives rows to another as long as that one stays faster. The result is
    optimal: one row fewer on the slowest coordinate would make another at least as slow.

    >>> best_shares(8, (3.0, 5.0), lambda rank, rows: rows / (3.0, 5.0)[rank])
    (3, 5)
    """
    if total < len(speeds):
        return None
    shares = _largest_remainder(total, speeds)
    while True:
        taken = [seconds(rank, rows) for rank, rows in enumerate(shares)]
        worst = max(range(len(shares)), key=lambda rank: (taken[rank], shares[rank]))
        others = [rank for rank in range(len(shares)) if rank != worst]
        if shares[worst] == 1 or not others:
            break
        more = {rank: seconds(rank, shares[rank] + 1) for rank in others}
        taker = min(others, key=more.__getitem__)
        if not more[taker] < taken[worst]:
            break
        shares[worst] -= 1
        shares[taker] += 1
    return tuple(shares) if max(taken) < float("inf") else None


def _largest_remainder(total: int, speeds: Sequence[float]) -> list[int]:
    """Return whole numbers >= 1 in proportion to ``speeds`` that add up to ``total``."""
    free = total - len(speeds)
    exact = [max(0.0, total * speed / sum(speeds) - 1) for speed in speeds]
    scale = free / sum(exact) if sum(exact) else 0.0
    wanted = [each * scale for each in exact]
    shares = [floor(each) for each in wanted]
    order = sorted(range(len(speeds)), key=lambda rank: shares[rank] - wanted[rank])
    for rank in (order * (1 + free))[: free - sum(shares)]:
        shares[rank] += 1
    return [1 + each for each in shares]
