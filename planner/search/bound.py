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
layouts, ZeRO stage and recomputation independently, by eliminating its ops (``kind_tables``). A
block that follows a block of the same kind also converts the values it reads from that block,
except at the start of a stage; there are at most as many stages as the request allows.

The bound ignores waits between stages, their messages, all but one of the micro-batches in flight,
and that blocks are indivisible. It is at least ``work_bound``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost_model.cluster.cluster import Device
from ...cost_model.ops.compute import COMPUTE_FAMILIES, rate
from ..costs.choices import input_specs
from ..inter_op.heterogeneous import is_mixed
from ..inter_op.sweep import Tiling
from ..intra_op.elimination import BATCH_AXES, Factor, Floats
from ..intra_op.families import Family
from ..intra_op.intra_op import IntraOp
from ..intra_op.kind_tables import KindTables, Rates, TooWideError
from ..plan import Recompute
from ..requests.request import MOST_CHUNKS
from ..stage.assembly import context_bytes
from ..stage.branches import find_sections
from ..stage.stage_model import StageModel
from ..stage.structure import Edge, Run, Structure
from .context import SearchContext
from .space import mixed_tiling, uniform_tiling

PRICES = (0.02, 0.06, 0.15, 0.3, 0.6, 1.0, 2.0, 6.0)
"""Prices per byte to try, relative to the price at which all bytes of a device cost its work."""

UNLIMITED = 1e18
"""Number of bytes that stands for no memory limit."""


def lower_bound(context: SearchContext) -> float:
    """Return a lower bound of the step time of all plans (any stages per rank). Cached.

    After the time limit, or if the cost tables of a block are too large, it is ``work_bound``.
    """
    if context.bound_seconds is None:
        with context.budget.timed("bound"):
            context.bound_seconds = _lower_bound(context)
    return context.bound_seconds


def _lower_bound(context: SearchContext) -> float:
    work = least = work_bound(context, context.microbatch_rows)
    with context.stoppable():
        # each process bounds its own micro-batch sizes, whose tables it has
        least = max(work, min(context.workers.map(relaxed_bound)))
    if context.shared_bound is not None:
        return min(least, context.shared_bound)
    return work if is_mixed(context.cluster) else least


def relaxed_bound(context: SearchContext, rows: Sequence[int]) -> float:
    """Return a lower bound of the step time over micro-batches of ``rows`` rows, from the cost
    tables of blocks (not ``work_bound``); 0 if unknown."""
    least = float("inf")
    with context.stoppable(), suppress(TooWideError):
        for each in rows:
            for tilings, most_stages in _parts(context, each):
                if context.ended_by:
                    return 0.0
                least = min(least, _Relaxation(context, each, tilings, most_stages).seconds())
        return least
    return 0.0


def _parts(context: SearchContext, rows: int) -> Iterator[tuple[Sequence[Tiling], int]]:
    """Yield parts of the search space: tilings of the devices, and their maximum of stages."""
    place, features = context.costs(rows).place, context.request.features
    most_chunks = 1
    if context.request.chunked_schedules:
        most_chunks = context.request.forced.chunks or MOST_CHUNKS
    uniform = {}
    for number in context.stage_numbers:
        tiling = uniform_tiling(context.cluster, number, place)
        if tiling is not None:
            uniform[number] = tiling
    if 1 in uniform:
        yield (uniform.pop(1),), 1
    most = max(context.stage_numbers)
    is_any = features.allows("mixed-stages")
    is_any |= features.allows("branches") and bool(find_sections(context.structure))
    if is_any and most > 1:
        every = (*uniform.values(), mixed_tiling(context.cluster, most, place))
        yield every, most * most_chunks
    else:
        for number, tiling in uniform.items():
            yield (tiling,), number * most_chunks


@dataclass
class _Relaxation:
    """Relaxed search problem, which bounds all plans on some tilings (divisions of the devices into
    stages) at one micro-batch size: every block takes its cheapest mesh and layouts."""

    context: SearchContext
    rows: int
    tilings: Sequence[Tiling]
    most_stages: int

    def seconds(self) -> float:
        """Return a lower bound of the step's seconds over all plans; infinite if no mesh is
        possible. Raises ``TooWideError``."""
        solvers = self._solvers
        if not solvers:
            return float("inf")
        count = self.context.num_microbatches(self.rows)
        work = float(self._device_seconds(np.zeros(1))[0])
        free = self._free_bytes
        if not np.isfinite(free) or free <= 0:
            return count * work
        prices = np.array(PRICES) * (work / free)
        least = self._device_seconds(prices) - prices * free
        return count * max(work, float(least.max()))

    @cached_property
    def _solvers(self) -> list[IntraOp]:
        """Return one solver for each distinct mesh in the tilings."""
        costs = self.context.costs(self.rows)
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
        structure = self.context.at(self.rows)
        neighbours, count = Neighbours.of(structure), self.context.num_microbatches(self.rows)
        shares = [
            solver.model.prices.mesh.size / self.context.cluster.num_devices
            for solver in self._solvers
        ]
        every = [block_seconds(solver, count, neighbours, prices) for solver in self._solvers]
        total, saved = np.zeros(len(prices)), np.zeros(len(prices))
        blocks = Counter(
            (block.kind, linked)
            for block, linked in zip(structure.blocks.blocks, neighbours.linked, strict=True)
        )
        for (kind, is_linked), number in blocks.items():
            first = np.minimum.reduce(
                [share * own[kind].first for share, own in zip(shares, every, strict=True)]
            )
            if is_linked:
                later = np.minimum.reduce(
                    [share * own[kind].later for share, own in zip(shares, every, strict=True)]
                )
                saved = np.maximum(saved, later - first)
                first = later
            total += number * first
        others = sum(number for (_, is_linked), number in blocks.items() if is_linked)
        starts = min(max(self.most_stages - 1, 0), others)
        found: Floats = total - starts * saved
        return found


@dataclass(frozen=True)
class BlockSeconds:
    """Least seconds of a block by price of a byte: as a stage's ``first`` block, or ``later``,
    after a block of its own kind."""

    first: Floats
    later: Floats


@dataclass(frozen=True)
class Neighbours:
    """Values that blocks of a kind read. ``edges``: from the block before, if of the same kind, in
    most blocks of the kind; ``linked`` marks the blocks with exactly these edges. ``read_bytes``:
    the least bytes of values that a block is the first to read."""

    edges: Mapping[str, tuple[Edge, ...]]
    linked: tuple[bool, ...]
    read_bytes: Mapping[str, int]

    @staticmethod
    def of(structure: Structure) -> Neighbours:
        blocks = structure.blocks.blocks
        found: list[tuple[Edge, ...]] = []
        read: dict[str, int] = {}
        for at, block in enumerate(blocks):
            values = [
                (ref, uses)
                for ref, uses in structure.outside[at]
                if structure.graph[ref.name].kind == "op"
            ]
            firsts = structure.first_values(at)
            num_bytes = sum(structure.graph.spec(ref).num_bytes for ref in firsts)
            read[block.kind] = min(num_bytes, read.get(block.kind, num_bytes))
            follows = at > 0 and blocks[at - 1].kind == block.kind
            near = (e for e in values if follows and structure.position[e[0].name] == at - 1)
            found.append(tuple(structure.inner_edge(at, ref, uses) for ref, uses in near))
        commonest: dict[str, Counter[tuple[Edge, ...]]] = {}
        for block, own in zip(blocks, found, strict=True):
            if own:
                commonest.setdefault(block.kind, Counter())[own] += 1
        edges = {kind: each.most_common(1)[0][0] for kind, each in commonest.items()}
        linked = (
            bool(own) and edges[block.kind] == own for block, own in zip(blocks, found, strict=True)
        )
        return Neighbours(edges, tuple(linked), read)


def block_seconds(
    solver: IntraOp, count: int, neighbours: Neighbours, prices: Floats
) -> Mapping[str, BlockSeconds]:
    """Map each kind of block to the least cost (seconds plus priced bytes), over all layouts, of
    one block of it on the solver's mesh, by price of a byte. Cached for all meshes with equal cost
    tables.

    ``count`` is the number of micro-batches. Raises ``TooWideError``.
    """
    model = solver.model
    key = (solver.zeros, solver.modes, count, tuple(prices.tolist()))

    def make() -> Mapping[str, BlockSeconds]:
        tables = {kind: KindTables.of(model, kind) for kind in model.structure.blocks.kinds}
        for own in tables.values():
            own.check()
        solver.budget.num_problems += len(solver.modes)
        blocks = _Blocks(model, solver.zeros, solver.modes, count, neighbours, prices, tables)
        return {kind: blocks.seconds(kind) for kind in tables}

    return model.common(model.prices.cache.block_seconds, key, make)


@dataclass
class _Blocks:
    """Cost tables of blocks on one mesh, with prices per byte to bound their least seconds."""

    model: StageModel
    zeros: tuple[int, ...]
    modes: tuple[Recompute, ...]
    count: int
    neighbours: Neighbours
    prices: Floats
    tables: Mapping[str, KindTables]

    def seconds(self, kind: str) -> BlockSeconds:
        every = [self._in_mode(kind, mode) for mode in self.modes]
        first = np.minimum.reduce([alone for alone, _ in every])
        later = np.minimum.reduce([linked for _, linked in every])
        return BlockSeconds(np.minimum(first, later), later)

    def _in_mode(self, kind: str, mode: Recompute) -> tuple[Floats, Floats]:
        """Return the least seconds of a block recomputed by ``mode``: as a stage's first block, and
        after a block of its kind."""
        number, states = len(self.zeros), tuple(self.prices.tolist())
        rates = Rates(
            self.count,
            tuple(zero for zero in self.zeros for _ in states),
            mode,
            states * number,
            states * number,
            any_zero=True,
        )
        table = self.tables[kind].solve(rates).table[0]
        sync = min(
            float(np.array(self.model.block_sync(kind, zero)) @ rates.weights)
            for zero in self.zeros
        )
        alone = table.reshape(len(table), -1).min(axis=1)
        if mode != "none":
            size = self.model.prices.mesh.size
            alone = alone + self.prices * (self.neighbours.read_bytes[kind] // size)
        linked = self._linked(kind, table, rates)
        linked = linked.reshape(len(linked), -1).min(axis=1)
        shape = len(states)
        return np.broadcast_to(sync + alone, shape), np.broadcast_to(sync + linked, shape)

    def _linked(self, kind: str, table: Floats, rates: Rates) -> Floats:
        """Return a block's cost table over the kind's ends (decisions that other blocks see), with
        the costs of values from the block before added."""
        edges = self.neighbours.edges.get(kind, ())
        alone = Run(0, 1, (kind,), ((),), (), {}, (), (), has_loss=False)
        family = Family.of(self.model, alone, dict(self.tables)) if edges else None
        for edge in edges:
            assert family is not None
            own, number = family.crossing(edge), table.ndim - 1
            if own.link is not None:
                table = table + _over_ends(own.link.factor(rates.mode), number)[0]
            if rates.mode != "none":
                held = Factor((own.source,), (self.prices[:, None] * own.held_bytes)[None])
                table = table + _over_ends(held, number)[0]
        return table


def _over_ends(factor: Factor, number: int) -> Floats:
    """Reshape a factor's table to have an axis for each of ``number`` variables (ends)."""
    order = sorted(range(len(factor.scope)), key=lambda axis: factor.scope[axis])
    table = factor.table.transpose((0, 1, *(BATCH_AXES + axis for axis in order)))
    index = (slice(None) if end in factor.scope else None for end in range(number))
    return table[(slice(None),) * BATCH_AXES + tuple(index)]


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
    structure = context.at(largest)
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
    graph = context.at(rows).graph
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
