"""What a block takes at least by itself, where bytes have a price too.

In: the tables of a mesh's kinds of blocks, micro-batches per step. Out: for every kind and way to
recompute it, and for pairs of prices (λ per byte of states, μ per byte that one micro-batch
keeps) the least over layouts and ZeRO stages of

    seconds + λ·states + μ·kept        per block and micro-batch, without messages of stages.

A block that follows one of its kind converts what it reads of that one, and if it is recomputed
keeps it: equal blocks have equal layouts, so that is part of the least (``linked``). What else
blocks cost each other counts nothing. The decisions of a block may each have a ZeRO stage of
their own, and blocks layouts of their own: there is one small problem for each kind, whatever
runs there are, and what a run of blocks takes at least is a sum (``memory_bounds``).

The least is concave in (λ, μ). With λ = μ / h for h micro-batches in flight it is known for few h
and bounded between them by interpolation in λ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..plan import Recompute
from ..pricing.stage_model import StageModel
from ..pricing.structure import Edge, Run, Structure
from .elimination import BATCH_AXES, Factor, Floats
from .families import Family
from .kind_tables import KindTables, Rates

HELD = (1, 6, 40)
"""Micro-batches in flight for which the least is found."""

PRICES = (0.25, 0.6, 1.2, 3.0, 20.0)
"""μ, in what the commonest block takes forward per byte that it keeps: near 1 it is as good to
recompute it as to keep it."""


@dataclass(frozen=True)
class Neighbours:
    """Of each kind the edges from a block of it to the next, and which blocks have just those;
    of each kind the fewest bytes that any block of it is the first to read of others."""

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


@dataclass(frozen=True)
class BlockPrices:
    """The least of each kind by mode and price: of a block after one of its kind, and of any.

    Arrays are over (0, 0) and then the pairs of ``HELD`` and ``saved``, the former outermost.
    ``kept_bytes``: what one micro-batch keeps of a block of a kind at least, not recomputed.
    """

    saved: Floats
    linked: Mapping[str, Mapping[Recompute, Floats]]
    alone: Mapping[str, Mapping[Recompute, Floats]]
    kept_bytes: Mapping[str, float]
    working_bytes: Mapping[str, float]

    def least_seconds(self, kind: str) -> float:
        """Of a block, where bytes have no price."""
        return min(float(least[0]) for least in self.alone[kind].values())

    def states(self, held: Floats) -> Floats:
        """``[h, price]``: λ where so many micro-batches are in flight: no more than μ / h, as
        fewer in flight hold less."""
        few = np.minimum(held, HELD[-1])
        return np.column_stack([np.zeros(len(held)), self.saved / few[:, None]])

    def at(self, least: Floats, held: Floats) -> Floats:
        """``[h, price]``: the least, or below, at these λ and at μ of 0 and ``saved``."""
        known = np.array(HELD, dtype=np.float64)
        own = least[1:].reshape(len(known), -1)
        low = np.clip(np.searchsorted(known, held, side="right") - 1, 0, len(known) - 2)
        fewer, more = 1 / known[low], 1 / known[low + 1]
        share = np.clip((fewer - 1 / held) / (fewer - more), 0.0, 1.0)[:, None]
        between = (1 - share) * own[low] + share * own[low + 1]
        return np.column_stack([np.full(len(held), least[0]), between])


@dataclass
class _Solver:
    """The problems of one mesh at one number of micro-batches."""

    model: StageModel
    zeros: tuple[int, ...]
    modes: tuple[Recompute, ...]
    count: int
    neighbours: Neighbours

    @cached_property
    def tables(self) -> Mapping[str, KindTables]:
        """Raises ``TooWideError``."""
        found = {kind: KindTables.of(self.model, kind) for kind in self.kinds}
        for own in found.values():
            own.check()
        return found

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.model.structure.blocks.kinds)

    @cached_property
    def saved(self) -> Floats:
        """The prices of a kept byte."""
        counts = Counter(block.kind for block in self.model.structure.blocks.blocks)
        tables = self.tables[counts.most_common(1)[0][0]]
        forward = sum(float(d.seconds[0, :, :2].sum(axis=1).min()) for d in tables.tables.decisions)
        return np.array(PRICES) * (forward / max(tables.kept_bytes(np.mean), 1.0))

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        saved: list[float] = self.saved.tolist()
        return [(0.0, 0.0), *((price / held, price) for held in HELD for price in saved)]

    def rates(self, mode: Recompute) -> Rates:
        states, saved = zip(*self.pairs, strict=True)
        number = len(self.zeros)
        zeros = tuple(zero for zero in self.zeros for _ in self.pairs)
        return Rates(self.count, zeros, mode, states * number, saved * number, any_zero=True)

    def least(self, kind: str, mode: Recompute) -> tuple[Floats, Floats]:
        """Of a block of a kind after one of its kind, and of any."""
        rates = self.rates(mode)
        table = self.tables[kind].solve(rates).table[0]
        saved = np.array([price for _, price in self.pairs])
        sync = min(
            float(np.array(self.model.block_sync(kind, zero)) @ rates.weights)
            for zero in self.zeros
        )
        alone = sync + table.reshape(len(table), -1).min(axis=1)
        if mode != "none":
            size = self.model.prices.mesh.size
            alone = alone + saved * (self.neighbours.read_bytes[kind] // size)
        linked = self._linked(kind, table, rates, saved)
        least = sync + linked.reshape(len(linked), -1).min(axis=1)
        shape = len(self.pairs)
        return np.broadcast_to(least, shape), np.broadcast_to(alone, shape)

    def _linked(self, kind: str, table: Floats, rates: Rates, saved: Floats) -> Floats:
        """The table of a kind's ends with what it reads of the block before."""
        edges = self.neighbours.edges.get(kind, ())
        family = _family(self.model, kind, self.tables) if edges else None
        for edge in edges:
            assert family is not None
            own, number = family.crossing(edge), table.ndim - 1
            if own.link is not None:
                table = table + _over_ends(own.link.factor(rates.mode), number)[0]
            if rates.mode != "none":
                held = Factor((own.source,), (saved[:, None] * own.held_bytes)[None])
                table = table + _over_ends(held, number)[0]
        return table


def _family(model: StageModel, kind: str, tables: Mapping[str, KindTables]) -> Family:
    """The ends of one block."""
    alone = Run(0, 1, (kind,), ((),), (), {}, (), (), has_loss=False)
    return Family.of(model, alone, dict(tables))


def _over_ends(factor: Factor, number: int) -> Floats:
    """A factor's table with an axis for each of so many ends."""
    order = sorted(range(len(factor.scope)), key=lambda axis: factor.scope[axis])
    table = factor.table.transpose((0, 1, *(BATCH_AXES + axis for axis in order)))
    index = (slice(None) if end in factor.scope else None for end in range(number))
    return table[(slice(None),) * BATCH_AXES + tuple(index)]


def block_prices(
    model: StageModel,
    zeros: tuple[int, ...],
    modes: Sequence[Recompute],
    count: int,
    neighbours: Neighbours,
) -> BlockPrices:
    """The least of every kind of block on a mesh, once for all models of equal tables.

    Raises ``TooWideError``.
    """
    own = _Solver(model, zeros, tuple(modes), count, neighbours)
    key = ("block prices", zeros, own.modes, count)
    return model.common(key, lambda: _found(own))


def _found(own: _Solver) -> BlockPrices:
    linked: dict[str, dict[Recompute, Floats]] = {}
    alone: dict[str, dict[Recompute, Floats]] = {}
    for kind in own.kinds:
        every = {mode: own.least(kind, mode) for mode in own.modes}
        linked[kind] = {mode: least for mode, (least, _) in every.items()}
        alone[kind] = {mode: least for mode, (_, least) in every.items()}
    return BlockPrices(
        own.saved,
        linked,
        alone,
        {kind: own.tables[kind].kept_bytes(np.min) for kind in own.kinds},
        {kind: _least_working(own.model, kind) for kind in own.kinds},
    )


def _least_working(model: StageModel, kind: str) -> float:
    sizes = model.kind(kind).working_bytes
    return max((float(own.min()) for own in sizes), default=0.0)
