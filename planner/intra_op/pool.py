"""Pool of the solutions for a family of runs; it finds the cheapest that fits for each run.

In: solutions (choices by kind), a run, micro-batches per step and in flight, a limit of bytes. Out:
the best combination of solution, ZeRO stage and recomputation policy. Without recomputation all
solutions and stages are compared at once, as arrays; policies are tried only for solutions that do
not fit but would otherwise be faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..costs.seconds import Groups, group_blocks, objective_weights, seconds_of_passes
from ..kernels.recompute import BLOCK_MODES, has_tiles
from ..plan import Recompute
from ..requests.features import PLAIN_MODES
from ..stage.recompute_policy import NO_RECOMPUTE, Ints, recomputing
from ..stage.stage_cost import StageCost, StageTable
from ..stage.stage_model import CostRow, StageModel
from ..stage.stage_problem import (
    Solution,
    StageOptions,
    StageProblem,
    constant_bytes,
    context_bytes,
)
from ..stage.structure import Run
from ..stage.terms import HELD_STATES, KEPT, RECEIVED, SECONDS, UNRECOMPUTED
from .elimination import Floats

SAME = 1 + 1e-9
"""Ratio up to which two objectives count as equal."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A solution in the pool (choices of layouts), with the costs of stages that use it."""

    table: StageTable
    solution: Solution


@dataclass(frozen=True, slots=True)
class PooledSolution:
    """Best solution of the pool for a stage, its ZeRO stage and recomputation (``setting``), and
    its ``objective`` in seconds per micro-batch."""

    entry: Entry
    setting: StageOptions
    objective: float


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """Solution of a stage: layouts by kind of block, ZeRO stage and recomputation (``setting``),
    ``objective`` in seconds per micro-batch, and relative ``gap`` to its lower bound."""

    run: Run
    table: StageTable
    solution: Solution
    setting: StageOptions
    objective: float
    gap: float

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows of a micro-batch by index along mesh axis "dp"; () as all are equal."""
        return ()

    @property
    def cost(self) -> StageCost:
        return self.table.price(self.run, self.setting)


def gap_between(bound: float, objective: float) -> float:
    """Return the relative gap (objective - bound) / objective, at least 0.

    >>> gap_between(3.0, 4.0), gap_between(5.0, 4.0), gap_between(0.0, 0.0)
    (0.25, 0.0, 0.0)
    """
    return max(0.0, 1 - bound / objective) if objective > 0 else 0.0


@dataclass
class Pool:
    """Solutions found on one mesh. Each can be used for all stages of the family of ``run`` (the
    same kinds of blocks, the same values sent and received)."""

    model: StageModel
    run: Run
    zeros: tuple[int, ...]
    recompute: Recompute | None
    modes: tuple[Recompute, ...] = PLAIN_MODES
    entries: dict[tuple[int, ...], Entry] = field(default_factory=dict)
    excess_bytes: dict[object, float] = field(default_factory=dict)
    _totals: dict[int, Floats] = field(default_factory=dict)
    _rows: dict[CostRow, Floats] = field(default_factory=dict)
    _transient_bytes: list[Floats] = field(default_factory=list)
    _tiled_bytes: list[float] = field(default_factory=list)
    """By solution, the bytes of its largest op that full recomputation saves."""
    _per_byte: list[tuple[float, float]] = field(default_factory=list)

    def _host_bytes(self, run: Run) -> float:
        """Return the bytes of the host's memory that are left to activations of each of its
        devices, at most: states of a stage ``run`` there are divided among all of the stage's
        devices. 0 if unknown."""
        prices, structure = self.model.prices, self.model.structure
        limit, each = prices.device.host_memory_bytes, prices.policy.in_host(3, prices.shards)
        if not limit or not prices.policy.host_bytes:
            return limit
        blocks = structure.blocks.blocks[run.start : run.stop]
        specs = [structure.graph[name].spec for block in blocks for name in block.parameters]
        numel = sum(spec.numel for spec in specs if spec.requires_grad)
        return max(1.0, limit - numel * each / prices.mesh.size)

    @cached_property
    def _problem(self) -> StageProblem:
        return StageProblem(self.model, self.run)

    def add(self, solution: Solution) -> Entry:
        """Add a solution unless the pool has it; return its entry."""
        choices = self._problem.choices(solution)
        if choices not in self.entries:
            table = StageTable(self._problem, choices)
            self.entries[choices] = Entry(table, solution)
            self._transient_bytes.append(table.transient_bytes)
            is_tiled = any(map(has_tiles, self._recomputing))
            self._tiled_bytes.append(table.tiled_bytes if is_tiled else 0.0)
            self._per_byte.append(table.seconds_per_byte(self._recomputing))
        return self.entries[choices]

    def cheapest(
        self, run: Run, num_microbatches: int, in_flight: int, limit_bytes: float
    ) -> PooledSolution | None:
        """Return the best solution, ZeRO stage and recomputation for the stage ``run`` that fit in
        ``limit_bytes`` per device; None if none does."""
        if not self.entries:
            return None
        base = StageOptions(num_microbatches, in_flight=in_flight)
        zeros = list(self.zeros)
        figures = self.unrecomputed(run)[:, zeros]
        states = figures[..., HELD_STATES].sum(axis=-1)
        kept = figures[:, :1, KEPT.start] * in_flight
        seconds, hidden = self._objectives(run, figures, num_microbatches)
        fixed = constant_bytes(self.model, run) + context_bytes(self.model)
        over = (states + kept + np.array(self._transient_bytes)[:, zeros]) + (fixed - limit_bytes)
        fits = (over <= 0) & (self.recompute in (None, "none"))
        fitting = np.where(fits, seconds, np.inf)
        least = float(fitting.min())
        best = None
        if np.isfinite(least):
            at, place = divmod(int((fitting <= least * SAME).argmax()), len(zeros))
            setting = replace(base, zero=zeros[place])
            best = PooledSolution(self._listed[at], setting, least)
        least_over = over - np.array(self._tiled_bytes)[:, None]
        lower = np.maximum(seconds, self._lower_bounds(hidden, least_over, kept, in_flight))
        wanted = np.flatnonzero(~fits & (lower * SAME < least))
        if len(wanted):
            order = wanted[np.argsort(lower.ravel()[wanted], kind="stable")]
            best = self._best_policy(run, order, (lower, over), base, best)
        if best is None:
            saved = np.array(self._per_byte)[:, 1:] * kept
            self._note_excess(run, base, float((least_over - saved).min()))
        return best

    def _objectives(
        self, run: Run, figures: Floats, num_microbatches: int
    ) -> tuple[Floats, Floats]:
        """Return, as ``[solution, zero]``, the seconds per micro-batch, and lower bounds of them
        that hold however ZeRO's collectives overlap compute. ``figures[solution, zero,
        amount]``."""
        prices = self.model.prices
        degrees = [prices.shardings[zero].degree for zero in self.zeros]
        shares_links = np.array([prices.shares_links(degree) for degree in degrees])
        seconds, received = figures[..., SECONDS], figures[..., RECEIVED].sum(axis=-1)
        groups = self._groups(run)
        forward, backward, gather, end = seconds_of_passes(seconds, groups, shares_links)
        hidden: Floats = seconds @ objective_weights(num_microbatches) + received
        found: Floats = forward + backward + (gather + end) / num_microbatches + received
        return found, hidden

    @property
    def _listed(self) -> list[Entry]:
        return list(self.entries.values())

    def unrecomputed(self, run: Run) -> Floats:
        """Return a stage's amounts without recomputation, ``[solution, zero, amount]``."""
        totals = self._totals.get(run.key)
        if totals is None or len(totals) < len(self.entries):
            rows = self.model.rows(run, NO_RECOMPUTE)
            totals = np.sum([sum(counts) * self._row(row) for row, counts in rows], axis=0)
            self._totals[run.key] = totals
        return totals

    def _groups(self, run: Run) -> Groups:
        """Return the seconds of the stage's blocks without recomputation, grouped by kind.

        The array is ``seconds[solution, ZeRO stage, group of blocks, Resource]``.
        """
        kinds, counts = group_blocks(run.kinds)
        which = list(self.zeros)
        rows = {kind: self._row(kind)[:, which, SECONDS] for kind in run.counts}
        seconds = np.stack([rows[kind] for kind in kinds], axis=-2)
        for name in run.shared:
            seconds[..., 0, :] += self._row(name)[:, which, SECONDS]
        return Groups(seconds, counts)

    def _row(self, row: CostRow) -> Floats:
        """Return the amounts without recomputation, in every solution, of a row of a stage's cost.
        Cached."""
        known = self._rows.get(
            row, np.zeros((0, len(self.model.prices.shardings), UNRECOMPUTED.stop))
        )
        if len(known) < len(self.entries):
            listed = self._listed[len(known) :]
            new = [own.table.row(row).amounts[:, UNRECOMPUTED] for own in listed]
            known = self._rows[row] = np.concatenate([known, new])
        return known

    @property
    def _recomputing(self) -> tuple[Recompute, ...]:
        """Return the modes in which blocks may be recomputed."""
        if self.recompute is not None:
            return (self.recompute,)
        return tuple(mode for mode in BLOCK_MODES[1:] if mode in self.modes)

    def _lower_bounds(self, seconds: Floats, over: Floats, kept: Floats, in_flight: int) -> Floats:
        """Return lower bounds of the seconds after recomputing enough to save the bytes ``over``
        the limit; infinite if ``kept`` bytes do not suffice."""
        rate, share = np.array(self._per_byte)[:, :, None].swapaxes(0, 1)
        needed = np.maximum(over, 0.0)
        return np.where(needed <= share * kept, seconds + needed / in_flight * rate, np.inf)

    def _best_policy(
        self,
        run: Run,
        order: Ints,
        figures: tuple[Floats, Floats],
        base: StageOptions,
        best: PooledSolution | None,
    ) -> PooledSolution | None:
        """Return the best of ``best`` and of solutions that fit if blocks are recomputed. Pairs of
        a solution and a ZeRO stage are tried in ``order``.

        ``figures``, by solution and ZeRO stage: lower bounds of the seconds after recomputing
        enough, and the bytes over the limit without recomputation.
        """
        lower, over_limit = figures
        host_bytes = self._host_bytes(run)
        for column in order:
            at, place = divmod(int(column), len(self.zeros))
            if best is not None and lower[at, place] * SAME >= best.objective:
                break
            zero, entry = self.zeros[place], self._listed[at]
            costs = entry.table.policy_costs(run, modes=recomputing(self.recompute, self.modes))
            transient = costs.transient_bytes[zero]
            over = costs.kept_bytes * base.in_flight + (transient - transient[0])
            over += over_limit[at, place]
            counts, _ = run.class_counts
            over[~costs.policies.allowed(self.recompute, self.modes, counts)] = np.inf
            if host_bytes:
                over[costs.host_bytes * base.in_flight > host_bytes] = np.inf
            added = np.where(over <= 0, costs.seconds, np.inf)
            number = int(added.argmin())
            if not np.isfinite(added[number]):
                self._note_excess(run, base, float(over.min()))
                continue
            setting = replace(base, zero=zero, policy=costs.policies[number])
            objective = entry.table.price(run, setting).objective(base.num_microbatches)
            if best is None or objective * SAME < best.objective:
                best = PooledSolution(entry, setting, objective)
        return best

    def _note_excess(self, run: Run, base: StageOptions, excess: float) -> None:
        key = (run.key, base.num_microbatches, base.in_flight)
        self.excess_bytes[key] = min(excess, self.excess_bytes.get(key, excess))
