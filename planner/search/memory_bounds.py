"""What runs of blocks take at least if they are to fit in memory, all runs of a mesh at once.

In: the blocks' least seconds at prices λ per byte (``block_prices``), the classes of runs, the
memory limit, micro-batches in flight. Out: for every class a lower bound of what a stage computes
and communicates per micro-batch, with its share of the step's end but without messages:

    min over rungs of  max over λ of  Σ over blocks of least(kind, mode, λ) − λ·(limit − fixed)

A rung says how many blocks of the commonest kind are recomputed fully, selectively or not; of
others, and of long runs, every block is recomputed as is best for the λ. Where a rung has a block
fully recomputed, memory also holds at some time all that one micro-batch keeps of that block.
This is the Lagrangian bound of ``intra_op``, but of the blocks one by one: no run is solved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from ..intra_op.block_prices import BlockPrices, Neighbours, block_prices
from ..intra_op.kind_tables import TooWideError
from ..plan import Recompute
from ..pricing.assembly import reserve
from ..pricing.run_classes import Floats, Ints
from .costs import MeshCosts
from .cuts import Runs

FEW_BLOCKS = 12
"""Of longer runs, mixes of the ways to recompute are not tried one by one."""

MOST_CELLS = 1_000_000
"""Of an array of rungs that are tried at once."""

UNLIMITED = 1e18
"""Bytes that are as good as no limit."""

EXACT = 16
"""Up to so many micro-batches in flight, each number has bounds of its own."""


@dataclass
class BlockCounts:
    """``counts[kind][class]`` blocks, and of them those after one of their kind."""

    runs: Runs

    @cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours.of(self.runs.structure)

    @cached_property
    def main(self) -> str:
        """The commonest kind."""
        return max(self.counts, key=lambda kind: float(self.counts[kind].max()))

    @cached_property
    def counts(self) -> Mapping[str, Ints]:
        return self._summed(np.ones(len(self._kinds), dtype=np.bool_), 0)

    @cached_property
    def linked(self) -> Mapping[str, Ints]:
        return self._summed(np.array(self.neighbours.linked), 1)

    @cached_property
    def _kinds(self) -> list[str]:
        return [block.kind for block in self.runs.structure.blocks.blocks]

    def _summed(self, which: Ints, skipped: int) -> Mapping[str, Ints]:
        """How many of these blocks each class has, but for the first ones of a run."""
        starts, stops = np.array(self.runs.classes.firsts).T
        kinds, found = np.array(self._kinds), {}
        for kind in self.runs.structure.blocks.kinds:
            total = np.append(0, np.cumsum(which & (kinds == kind)))
            found[kind] = total[stops] - total[starts + skipped]
        return found


@dataclass
class MemoryBounds:
    """The bounds on one mesh; what takes more than ``most_seconds`` a step may be bounded lower."""

    mesh: MeshCosts
    blocks: BlockCounts
    prices: BlockPrices
    most_seconds: float
    _found: dict[int, Floats] = field(default_factory=dict)

    def least(self, held: int, others: Sequence[int]) -> Floats:
        """By class, with so many micro-batches in flight; ``others`` will be asked for too."""
        if held not in self._found:
            every = [each for each in {*others, held} if each not in self._found]
            self._found.update(zip(every, self._least(np.array(every, float)), strict=True))
        return self._found[held]

    def _least(self, held: Floats) -> Floats:
        """``[h, class]``."""
        found = np.tile(self._unpriced, (len(held), 1))
        fits = self.mesh.excess_bytes <= 0
        found[:, ~fits] = np.inf
        is_fast = self._unpriced * self.mesh.runs.count <= self.most_seconds
        which = np.flatnonzero(fits & is_fast)
        if len(which):
            found[:, which] = np.maximum(self._of(which, held), found[:, which])
        return found

    @cached_property
    def _unpriced(self) -> Floats:
        """By class without memory."""
        found = np.zeros(len(self.mesh.runs.classes.firsts))
        for kind, counts in self.blocks.counts.items():
            found += counts * self.prices.least_seconds(kind)
        return found

    def _of(self, which: Ints, held: Floats) -> Floats:
        """``[h, class]`` of some classes."""
        prices = self.prices
        solver, main = self.mesh.solver, self.blocks.main
        states = prices.states(held)
        rest = np.zeros((len(held), len(which), states.shape[1]))
        working = np.zeros(len(which))
        for kind, counts in self.blocks.counts.items():
            own, linked = counts[which], self.blocks.linked[kind][which]
            working = np.maximum(working, np.where(own > 0, prices.working_bytes[kind], 0.0))
            if kind != main and own.any():
                after, alone = (
                    np.minimum.reduce([prices.at(least, held) for least in every.values()])
                    for every in (prices.linked[kind], prices.alone[kind])
                )
                rest += linked[:, None] * after[:, None]
                rest += (own - linked)[:, None] * alone[:, None]
        free = min(solver.limits.memory_bytes, UNLIMITED) - reserve(solver.model) - working
        rest -= states[:, None] * free[:, None]
        return self._with_main(which, held, rest)

    def _with_main(self, which: Ints, held: Floats, rest: Floats) -> Floats:
        """The same with the commonest kind's blocks: ``rest[h, class, price]`` without."""
        main, prices = self.blocks.main, self.prices
        states = prices.states(held)
        modes = tuple(prices.linked[main])
        after = np.stack([prices.at(prices.linked[main][mode], held) for mode in modes])
        alone = np.stack([prices.at(prices.alone[main][mode], held) for mode in modes])
        counts = self.blocks.counts[main][which]
        # a block that is not linked may be in any mode
        first = (counts - self.blocks.linked[main][which])[:, None]
        rest = rest - first * (after - alone).max(axis=0)[:, None]
        found = np.empty(rest.shape[:2])
        again = states * prices.kept_bytes[main]
        few = (counts <= FEW_BLOCKS) & (len(modes) > 1)
        whole = rest[:, ~few] + counts[~few][:, None] * after.min(axis=0)[:, None]
        found[:, ~few] = whole.max(axis=2)
        for count in np.unique(counts[few]).tolist():
            at = np.flatnonzero(few & (counts == count))
            rungs, is_again = mixes(count, modes)
            own = np.einsum("rm,mhp->rhp", rungs, after) + is_again[:, None, None] * again
            found[:, at] = _least_rung(own, rest[:, at])
        return found


def _least_rung(own: Floats, rest: Floats) -> Floats:
    """``min over rungs of max over prices``: ``own[rung, h, price]``, ``rest[h, class, price]``."""
    at_once = max(1, MOST_CELLS // rest.size)
    parts = (own[first : first + at_once, :, None] for first in range(0, len(own), at_once))
    found: Floats = np.minimum.reduce([(part + rest).max(axis=3).min(axis=0) for part in parts])
    return found


@lru_cache(maxsize=256)
def mixes(count: int, modes: tuple[Recompute, ...]) -> tuple[Floats, Floats]:
    """Every way to share so many blocks out to modes, and whether one is recomputed fully.

    >>> mixes(1, ("none", "full"))[0].tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    rows: list[tuple[int, ...]] = [()]
    for _ in modes[:-1]:
        rows = [(*row, own) for row in rows for own in range(count - sum(row) + 1)]
    every = np.array([(*row, count - sum(row)) for row in rows], dtype=np.float64)
    is_again = [row[modes.index("full")] > 0 if "full" in modes else False for row in every]
    return every, np.array(is_again, dtype=np.float64)


@dataclass
class Priced:
    """The bounds of all meshes at one micro-batch size, made as they are asked for."""

    runs: Runs
    most_seconds: float = float("inf")
    _blocks: BlockCounts = field(init=False)
    _found: dict[tuple[int, int], MemoryBounds | None] = field(default_factory=dict)
    _alike: dict[object, MemoryBounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._blocks = BlockCounts(self.runs)

    def least(
        self, mesh: MeshCosts, count: int, held: int, others: Sequence[int] = ()
    ) -> Floats | None:
        """By class what a stage takes per micro-batch without messages, at least, with a share
        of the step's end among ``count``; None where tables would be too wide.

        ``others`` are numbers in flight that will be asked for too.
        """
        found = self.of_mesh(mesh, count)
        return None if found is None else found.least(rounded(held), others)

    def device_seconds(self, meshes: Sequence[MeshCosts]) -> float:
        """What all blocks take per micro-batch, each on the mesh on which it takes the least of
        its devices' time; the sum over devices, without memory. 0 where that is not known."""
        every = [self.of_mesh(mesh, self.runs.count) for mesh in meshes]
        total = 0.0
        for kind, counts in self._blocks.counts.items():
            of_meshes = [
                own.prices.least_seconds(kind) * own.mesh.solver.model.prices.mesh.size
                for own in every
                if own is not None
            ]
            total += int(counts.max()) * min(of_meshes, default=0.0)
        return 0.0 if None in every else total

    def of_mesh(self, mesh: MeshCosts, count: int) -> MemoryBounds | None:
        """The bounds of a mesh, made once; None where tables would be too wide."""
        key = id(mesh), count
        if key not in self._found:
            self._found[key] = self._of(mesh, count)
        return self._found[key]

    def _of(self, mesh: MeshCosts, count: int) -> MemoryBounds | None:
        solver, neighbours = mesh.solver, self._blocks.neighbours
        try:
            prices = block_prices(solver.model, solver.zeros, solver.modes, count, neighbours)
        except TooWideError:
            return None
        key = id(prices), solver.limits, reserve(solver.model)
        if key not in self._alike:
            solver.effort.num_problems += len(solver.modes)
            self._alike[key] = MemoryBounds(mesh, self._blocks, prices, self.most_seconds)
        return self._alike[key]


def rounded(held: int) -> int:
    """Micro-batches in flight, of many to the next lower of a few numbers.

    >>> [rounded(held) for held in (5, 16, 17, 31, 39, 64)]
    [5, 16, 16, 30, 36, 64]
    """
    step = 1 << max(held.bit_length() - EXACT.bit_length() + 1, 0)
    return held if held <= EXACT else held // step * step
