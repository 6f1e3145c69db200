"""What no pipeline of several stages per rank is faster than, if its ranks are to fit in memory.

In: the blocks' least seconds at prices of a byte (``block_prices``), ranks, stages per rank, a
schedule. Out: two lower bounds of the step over all cuts. A rank of several stages holds their
states, and of each as many micro-batches as ``rank_held`` says, all within the limit. It waits
for the forwards of the stages before its first one. (For their backwards in the end it may also
wait, but not with its own end of the step, which is in its least: so that is not counted.)

The mean of the ranks, with the same price λ per byte on each:

    R · step  >=  Σ over stages s of  N·least_s(λ, λ·held_s) + wait_s·F_s  −  N·λ·R·free

A stage's least is that of its blocks, one by one, so the least over all cuts is a dynamic program
over blocks, for all λ at once:

    D_s(b) = min over a of  D_(s-1)(a - 1) + first_s(a) + Σ of later_s(a + 1 .. b)

Of very many stages and blocks the places of blocks are left out: with M(k) the least that a block
of kind k takes after another in any stage, it is no less than

    Σ over blocks of  M(k)  +  Σ over stages of  min over k of  first_s(k) - M(k).

And the busiest rank, as blocks are whole: in so many seconds rank r can do at most n_r blocks of
the commonest kind, on its cheapest stage, each rank with its own λ; all do enough of them, and
one has besides the largest of the other blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..intra_op.block_prices import HELD, BlockPrices, Neighbours, block_prices
from ..pricing.assembly import reserve
from ..pricing.run_classes import Floats, Ints
from ..schedules.rank_held import rank_held
from ..schedules.schedules import parts_of_ranks
from ..search.costs import MeshCosts
from ..search.memory_bounds import UNLIMITED
from ..search.stage_bounds import FORWARD_COMPUTE, least_compute

NUM_PRICES = 24
"""λ that are tried."""

MANY_TIMES = 4
"""More blocks than so many times the mean are not tried on one rank."""

MOST_CELLS = 1 << 15
"""Stages times blocks that are gone through."""

HALVINGS = 40
"""Of the seconds between which the busiest rank's are sought."""


@dataclass(frozen=True)
class _Mesh:
    """A mesh that a rank may have; ``least[kind]`` are (linked, alone) at prices, by mode."""

    prices: BlockPrices
    free_bytes: float

    def least(self, kind: str, held: int, grid: Floats) -> tuple[Floats, Floats]:
        """By price a block's seconds after one of its kind, and at least: in any mode.

        Both are concave in the price and never fall, so interpolation is below them.
        """
        own, number = self.prices, np.array([float(held)])
        states = own.states(number)[0]

        def of(values: Floats) -> Floats:
            found: Floats = np.interp(grid, states, own.at(values, number)[0])
            return found

        linked = np.minimum.reduce([of(values) for values in own.linked[kind].values()])
        alone = np.minimum.reduce([of(values) for values in own.alone[kind].values()])
        return linked, np.minimum(alone, linked)


@dataclass
class Ranks:
    """So many ranks, the meshes that each may have, and the model's blocks."""

    number: int
    meshes: Sequence[MeshCosts]
    neighbours: Neighbours
    _least: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _loaded: dict[tuple[int, str | None], Floats] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.meshes[0].runs.count

    @cached_property
    def kinds(self) -> list[str]:
        """Of each block."""
        return [block.kind for block in self.meshes[0].runs.structure.blocks.blocks]

    @cached_property
    def counts(self) -> Mapping[str, int]:
        return Counter(self.kinds)

    @cached_property
    def at(self) -> Ints:
        """The number of each block's kind."""
        numbers = {kind: number for number, kind in enumerate(self.counts)}
        return np.array([numbers[kind] for kind in self.kinds])

    @cached_property
    def distinct(self) -> list[_Mesh]:
        """The meshes that differ. Raises ``TooWideError``."""
        found: dict[object, _Mesh] = {}
        for mesh in self.meshes:
            solver = mesh.solver
            own = block_prices(
                solver.model, solver.zeros, solver.modes, self.count, self.neighbours
            )  # fmt: skip
            free = min(solver.limits.memory_bytes, UNLIMITED) - reserve(solver.model)
            free -= min(own.working_bytes.values())
            found[id(own), free] = _Mesh(own, free)
        return list(found.values())

    @cached_property
    def grid(self) -> Floats:
        """Prices of a byte, 0 first."""
        few = np.array([1.0, HELD[-1]])
        every = np.concatenate([mesh.prices.states(few) for mesh in self.distinct])
        some = every[every > 0]
        if not len(some):  # nothing is computed
            return np.zeros(1)
        return np.append(0.0, np.geomspace(some.min(), some.max(), NUM_PRICES))

    def least(self, held: int) -> tuple[Floats, Floats]:
        """``[mesh, kind, price]`` of a block after one of its kind, and of any."""
        if held not in self._least:
            every = [
                [mesh.least(kind, held, self.grid) for kind in self.counts]
                for mesh in self.distinct
            ]
            linked, alone = np.moveaxis(np.array(every), 2, 0)
            self._least[held] = linked, alone
        return self._least[held]

    @cached_property
    def computed(self) -> Floats:
        """By block what a forward computes at least."""
        models = {id(mesh.solver.model): mesh.solver.model for mesh in self.meshes}.values()
        forward = [
            min(least_compute(model, kind, FORWARD_COMPUTE) for model in models)
            for kind in self.counts
        ]
        return np.array(forward)[self.at]

    def work_seconds(self) -> float:
        """What the mean rank works, without memory: of any number of stages."""
        _, alone = self.least(1)
        least = alone[:, :, 0].min(axis=0)[self.at]
        return self.count * float(least.sum()) / self.number

    def step_seconds(self, schedule: str, chunks: int, enough: float = float("inf")) -> float:
        """The bound under one schedule, or one that is ``enough``; infinite where it cannot have
        so many stages."""
        held = rank_held(schedule, self.number, chunks, self.count)
        if held is None:
            return float("inf")
        waited = self.computed
        parts = parts_of_ranks(schedule, self.number, chunks)
        busiest = self._busiest(held, parts, waited)
        return busiest if busiest >= enough else max(busiest, self._mean(held, waited))

    def _mean(self, held: Sequence[int], waited: Floats) -> float:
        """The first bound, under both forms of waiting of ``chunk_bound``."""
        number, count = self.number, self.count
        waits = [[float(max(number - 1 - at, 0)) for at in range(len(held))]]
        if count < number:
            waits.append([float(number - count)] * len(held))
        return max(self._of_waits(held, own, waited) for own in waits)

    def _of_waits(self, held: Sequence[int], waits: Sequence[float], waited: Floats) -> float:
        in_all = self.of_places if len(held) * len(self.at) <= MOST_CELLS else self.of_kinds
        free = max(mesh.free_bytes for mesh in self.distinct)
        least: Floats = in_all(held, waits, waited) - self.count * self.number * free * self.grid
        return float(least.max()) / self.number

    def of_places(self, held: Sequence[int], waits: Sequence[float], waited: Floats) -> Floats:
        """By price the least over all cuts of the sum over stages."""
        is_linked = np.array(self.neighbours.linked)[:, None]
        before: Floats | None = None
        for own, wait in zip(held, waits, strict=True):
            linked, alone = (each.min(axis=0)[self.at] for each in self.least(own))
            more = wait * waited[:, None]
            first = self.count * alone + more
            later = np.where(is_linked, self.count * linked + more, first)
            before = _next(before, first, later)
        assert before is not None, "there is a stage"
        last: Floats = before[-1]
        return last

    def of_kinds(self, held: Sequence[int], waits: Sequence[float], waited: Floats) -> Floats:
        """The same at least, wherever blocks are: stages that hold and wait alike are alike."""
        linked = np.array(self.neighbours.linked)
        ways = np.stack([self.at, linked])
        (kinds, is_linked), where, of_block, numbers = np.unique(
            ways, axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        stages = Counter(zip(held, waits, strict=True))
        firsts, laters = {}, []
        for own, wait in stages:
            after, alone = (each.min(axis=0)[kinds] for each in self.least(own))
            more = wait * waited[where][:, None]
            firsts[own, wait] = self.count * alone + more
            later = np.where(is_linked[:, None], self.count * after + more, firsts[own, wait])
            laters.append(later)
        least = np.minimum.reduce(laters)
        total: Floats = numbers @ least
        opened = {key: first - least for key, first in firsts.items()}
        total += sum(number * opened[key].min(axis=0) for key, number in stages.items())
        start = opened[held[0], waits[0]]
        total += start[of_block.ravel()[0]] - start.min(axis=0)
        return total

    def _busiest(
        self, held: Sequence[int], parts: Sequence[Sequence[int]], waited: Floats
    ) -> float:
        """The second bound."""
        main = max(self.counts, key=lambda kind: self.counts[kind])
        others = [kind for kind in self.counts if kind != main]
        between = float(waited[1:-1].min()) if len(waited) > 2 else 0.0
        waits = np.array([max(rank - 1, 0) * between for rank in range(self.number)])[:, None]
        plain = self._loads(held, parts, main, None) + waits
        more = [self._loads(held, parts, main, kind) + waits for kind in others]
        low, high = 0.0, float(plain[:, -1].max())
        if not np.isfinite(high):
            return low
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self._can(middle, plain, more, self.counts[main]):
                high = middle
            else:
                low = middle
        return low

    @staticmethod
    def _can(seconds: float, plain: Floats, more: Sequence[Floats], blocks: int) -> bool:
        """Whether the ranks can do so many blocks, one of them with another one besides."""
        most = (plain <= seconds).sum(axis=1)
        besides = [most - (own <= seconds).sum(axis=1) for own in more]
        if any((own[:, 0] > seconds).all() for own in more):
            return False
        lost = max((int(own.min()) for own in besides), default=0)
        if (most == plain.shape[1]).any():  # that rank may do more blocks than were tried
            return True
        return int((most - 1).sum()) - lost >= blocks

    def _loads(
        self, held: Sequence[int], parts: Sequence[Sequence[int]], main: str, other: str | None
    ) -> Floats:
        """``[rank, n]`` what a rank takes for n blocks of a kind, and one of another: all on the
        stage that holds the fewest micro-batches."""
        fewest = [min(held[stage] for stage in stages) for stages in parts]
        for own in {*fewest} - {held for held, kind in self._loaded if kind == other}:
            self._loaded[own, other] = self._load(own, main, other)
        return np.array([self._loaded[own, other] for own in fewest])

    def _load(self, held: int, main: str, other: str | None) -> Floats:
        order = list(self.counts)
        blocks = self.counts[main]
        most = min(blocks, MANY_TIMES * -(-blocks // self.number))
        numbers = np.arange(most + 1)[:, None]
        free = np.array([mesh.free_bytes for mesh in self.distinct])[:, None, None] * self.grid
        _, alone = self.least(held)
        total = numbers * alone[:, None, order.index(main)] - free
        if other is not None:
            total = total + alone[:, None, order.index(other)]
        found: Floats = self.count * total.max(axis=2).min(axis=0)
        return found


def _next(before: Floats | None, first: Floats, later: Floats) -> Floats:
    """``D_s[b, price]`` from ``D_(s-1)``; without one, of the first stage."""
    total = np.cumsum(later, axis=0)
    if before is None:
        return first[:1] - later[:1] + total
    opened = np.full(first.shape, np.inf)
    opened[1:] = before[:-1]
    found: Floats = total + np.minimum.accumulate(opened + first - total, axis=0)
    return found
