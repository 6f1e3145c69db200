"""Lower bound of the step time over the whole search space.

In: a search context. Out: a lower bound of the step seconds of every plan, over all micro-batch
sizes, cuts, meshes, layouts, ZeRO stages, recomputation policies, schedules and numbers of stages
per rank.

The busiest of D devices works at least as long as the mean device. A block on a mesh of n devices
takes n times its seconds of device time. A price of λ seconds per byte includes the memory limit of
the devices (Lagrangian relaxation):

    step >= max over λ of  N · (Σ over blocks of  min over meshes of  n/D · (C + λ·B)  -  λ·M)

N is the number of micro-batches. C is the compute and communication of the block per micro-batch,
with its share of the step's end; B are the bytes of its states and of its saved values for one
micro-batch; M is the memory limit minus the bytes that hold no tensor. Each block chooses its
layouts, ZeRO stage and recomputation independently, by eliminating its ops (``kind_tables``).

The bound ignores conversions between blocks, waits between stages, their messages, all but one of
the micro-batches in flight, and that blocks are indivisible. It is at least ``work_bound``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from ...cost_model.cluster.cluster import Device
from ...cost_model.ops.compute import COMPUTE_FAMILIES, rate
from ..costs.choices import input_specs
from ..inter_op.heterogeneous import is_mixed
from ..inter_op.sweep import Tiling
from ..intra_op.elimination import Floats
from ..intra_op.intra_op import IntraOp
from ..intra_op.kind_tables import KindTables, Rates
from ..stage.branches import find_sections
from ..stage.stage_problem import context_bytes
from ..stage.terms import TooWideError
from .context import SearchContext
from .space import mixed_tiling, uniform_tiling

PRICES = (0.05, 0.2, 0.5)
"""Prices per byte to try, relative to the price at which all bytes of a device cost its work."""

WORTH_BOUNDING = 1.05
"""Least ratio to N·W/D at which stages of different sizes are bounded (``unequal_bound``)."""

UNLIMITED = 1e18
"""Number of bytes that stands for no memory limit."""


def lower_bound(context: SearchContext) -> float:
    """Return a lower bound of the step time of all plans (any stages per rank). Cached.

    After the time limit, or if the cost tables of a block are too large, it is ``work_bound``.
    """
    if context.known.bound_seconds is None:
        with context.budget.timed("bound"):
            context.known.bound_seconds = _lower_bound(context)
    return context.known.bound_seconds


def _lower_bound(context: SearchContext) -> float:
    work = work_bound(context, context.microbatch_rows)
    least = max(work, relaxed_bound(context))
    if context.known.shared_bound is not None:
        return min(least, context.known.shared_bound)
    return work if is_mixed(context.cluster) else least


def relaxed_bound(context: SearchContext) -> float:
    """Return a lower bound of the step time from the cost tables of blocks; 0 if unknown.

    A sample takes no less time in a smaller micro-batch, so the work in the largest bounds all
    sizes, unless the request sets the samples of a rank: then each size has other meshes. The size
    of the least bound is bounded again, by its own tables, until that has been done before.
    """
    rows = context.microbatch_rows
    with context.budget.stoppable(), suppress(TooWideError):
        work = 0.0
        if context.request.microbatch_size is None:
            work = min(_bounds(context, max(rows), lambda part: part.work_seconds))
        left = [(work, -each, False) for each in rows]
        heapify(left)
        while left and not context.budget.ended_by:
            bound, number, is_own = heappop(left)
            if is_own:
                return bound
            own = min(_bounds(context, -number, _Relaxation.seconds))
            heappush(left, (max(bound, own), number, True))
    return 0.0


def _bounds(
    context: SearchContext, rows: int, bound: Callable[[_Relaxation], float]
) -> Iterator[float]:
    """Yield the ``bound`` of each part of the search space at one micro-batch size; 0 after the
    time limit."""
    for tilings in _parts(context, rows):
        yield 0.0 if context.budget.ended_by else bound(_Relaxation(context, rows, tilings))


def unequal_bound(context: SearchContext, rows: int, tiling: Tiling) -> float:
    """Return a lower bound of the step time of pipelines of several stages on ``tiling``; 0 if
    unknown.

    Of D devices, let stages of t_i seconds per micro-batch work W device seconds in all. N
    micro-batches take Σ t_i + (N − 1)·max t_i, which is least if two stages are equally long, (N +
    1)·W/D, or if nearly all work is on D − 1 devices, N·W/(D − 1). Where both are near N·W/D, the
    bound would seldom exclude a pipeline, and is not computed.
    """
    count, number = context.num_microbatches(rows), context.cluster.num_devices
    least = min(count + 1, count * number / (number - 1))
    if least < count * WORTH_BOUNDING:
        return 0.0
    with suppress(TooWideError):
        return least / count * _Relaxation(context, rows, (tiling,)).work_seconds
    return 0.0


def _parts(context: SearchContext, rows: int) -> Iterator[Sequence[Tiling]]:
    """Yield parts of the search space, as tilings of the devices into stages."""
    place, features = context.solvers.costs(rows).place, context.request.features
    found = (uniform_tiling(context.cluster, number, place) for number in context.stage_numbers)
    uniform = [tiling for tiling in found if tiling is not None]
    most = max(context.stage_numbers)
    is_any = features.allows("mixed-stages")
    is_any |= features.allows("branches") and bool(find_sections(context.structure))
    if is_any and most > 1:
        yield (*uniform, mixed_tiling(context.cluster, most, place))
    else:
        yield from ((tiling,) for tiling in uniform)


@dataclass
class _Relaxation:
    """Relaxed search problem, which bounds all plans on some tilings (divisions of the devices into
    stages) at one micro-batch size: every block takes its cheapest mesh and layouts."""

    context: SearchContext
    rows: int
    tilings: Sequence[Tiling]

    @cached_property
    def work_seconds(self) -> float:
        """Lower bound of the step's seconds whatever the memory; infinite if no mesh is possible.
        Raises ``TooWideError``."""
        count = self.context.num_microbatches(self.rows)
        seconds = self._device_seconds(np.zeros(1)) if self._solvers else np.array([np.inf])
        return count * float(seconds[0])

    def seconds(self) -> float:
        """Return a lower bound of the step's seconds within the memory limit; infinite if no mesh
        is possible. Raises ``TooWideError``."""
        work, count = self.work_seconds, self.context.num_microbatches(self.rows)
        if not np.isfinite(work):
            return work
        free = self._free_bytes
        if not np.isfinite(free) or free <= 0:
            return work
        prices = np.array(PRICES) * (work / count / free)
        least = self._device_seconds(prices) - prices * free
        return max(work, count * float(least.max()))

    @cached_property
    def _solvers(self) -> list[IntraOp]:
        """Return one solver for each distinct mesh in the tilings."""
        costs = self.context.solvers.costs(self.rows)
        places = dict.fromkeys(move.place for tiling in self.tilings for move in tiling.moves)
        found: dict[object, IntraOp] = {}
        for place in places:
            for mesh in costs.places[place].meshes:
                prices = mesh.solver.model.prices
                found.setdefault((prices.mesh, prices.groups, prices.speed), mesh.solver)
        return list(found.values())

    @cached_property
    def _free_bytes(self) -> float:
        """Return a device's bytes for tensors, averaged over all devices."""
        cluster, limit = self.context.cluster, self.context.request.memory_limit_bytes
        devices = [host.device for host in cluster.hosts for _ in range(host.num_devices)]
        sizes = [device.usable_memory_bytes if limit is None else limit for device in devices]
        reserved = min(context_bytes(solver.model) for solver in self._solvers)
        return min(sum(sizes) / len(sizes), UNLIMITED) - reserved

    def _device_seconds(self, prices: Floats) -> Floats:
        """Return, by price of a byte, a device's mean seconds of work per micro-batch."""
        blocks = Counter(block.kind for block in self.context.tables.at(self.rows).blocks.blocks)
        return sum(
            (number * self._block_seconds(kind, prices) for kind, number in blocks.items()),
            np.zeros(len(prices)),
        )

    def _block_seconds(self, kind: str, prices: Floats) -> Floats:
        """Return, by price of a byte, the least seconds of a block over all meshes, each times the
        share of all devices that the mesh has."""
        count, number = self.context.num_microbatches(self.rows), self.context.cluster.num_devices
        every = [
            solver.model.prices.mesh.size / number * block_seconds(solver, kind, count, prices)
            for solver in self._solvers
        ]
        found: Floats = np.minimum.reduce(every)
        return found


def block_seconds(solver: IntraOp, kind: str, count: int, prices: Floats) -> Floats:
    """Return the least cost of a block on the solver's mesh, over all layouts, ZeRO stages and
    recomputation modes: seconds per micro-batch plus bytes at each of ``prices``. Cached for all
    meshes with equal cost tables.

    ``count`` is the number of micro-batches. Raises ``TooWideError``.
    """
    model, states = solver.model, tuple(prices.tolist())
    tables, number = KindTables.of(model, kind), len(solver.zeros)
    if not prices.any():
        every = [Rates(count, solver.zeros, solver.modes[0])]  # recomputing only saves bytes
    else:
        zeros, given = tuple(zero for zero in solver.zeros for _ in states), states * number
        every = [Rates(count, zeros, mode, given, given, any_zero=True) for mode in solver.modes]

    def make() -> Floats:
        tables.check()
        solver.budget.num_problems += 1
        found: Floats = np.minimum.reduce([least(rates) for rates in every])
        return found

    def least(rates: Rates) -> Floats:
        constant = model.kind(kind).constant[list(solver.zeros)] @ rates.seconds
        table = tables.solve(rates).table[0]
        inside = table.reshape(len(table), -1).min(axis=1)
        if rates.any_zero:
            return np.broadcast_to(inside + constant.min(), prices.shape)
        return np.full(prices.shape, (inside + constant).min())

    return model.common(model.prices.cache.block_seconds, (kind, *every), make)


def work_bound(context: SearchContext, rows: Sequence[int]) -> float:
    """Return a lower bound of the step time from the work of the ops alone, without solving.

    Whatever the layouts, the devices that share an op together do all of its FLOPs and access all
    of its bytes, at most at their peak rates: of D devices the busiest computes at least

        N/D · Σ over ops of  max(flops · seconds per FLOP, bytes · seconds per byte)

    in forward and backward, with the rates of the fastest device. For matrix products and
    attention, which a GPU computes in tiles, only FLOPs count. N is the number of micro-batches. An
    op's work at r rows is at most linear in r and N·r is the batch, so the sum is least for the
    largest micro-batch, which is used for all. Communication, recomputation and idle time are
    ignored. For measured prices the bound is 0, as peak rates do not bound them.
    """
    if context.basis.used is not None or context.basis.only not in (None, "spec"):
        return 0.0
    largest = max(rows)
    structure = context.tables.at(largest)
    devices = list({host.device.speed: host.device for host in context.cluster.hosts}.values())
    total = 0.0
    for kind, count in Counter(block.kind for block in structure.blocks.blocks).items():
        nodes = structure.blocks.kinds[kind].nodes
        total += count * sum(_least_seconds(context, largest, name, devices) for name in nodes)
    return context.num_microbatches(largest) * total / context.cluster.num_devices


def _least_seconds(
    context: SearchContext, rows: int, name: str, devices: Sequence[Device]
) -> float:
    """Return the seconds (forward, backward) of a whole op on the fastest of ``devices``."""
    graph = context.tables.at(rows).graph
    node = graph[name]
    work = context.rules.work(node, input_specs(node, graph), node.outputs)
    passes = ((work.flops_forward, work.bytes_forward), (work.flops_backward, work.bytes_backward))
    least = float("inf")
    for device in devices:
        own = rate(device, work.family, node.product_dtype or node.spec.dtype)
        per_byte = 0.0 if work.family in COMPUTE_FAMILIES else own.seconds_per_byte
        seconds = sum(max(f * own.seconds_per_flop, b * per_byte) for f, b in passes)
        least = min(least, seconds)
    return least
