"""The best way to run a stage on one mesh: layouts, ZeRO stage, what is recomputed.

In: the tables of a mesh, runs of blocks, micro-batches per step and in flight, a memory
limit. Out: the cheapest way that fits, its cost, and how far from the best it can be.

Where memory does not bind, the answer is exact for every run and ZeRO stage: each kind of
block is solved once for every layout at its ends, and runs are put together from that
(``families``). Where it binds, the same is done with a price λ per byte, for several λ and
with blocks recomputed or not; what is found goes into a pool, and each solution of the pool
is priced under every ZeRO stage on every rung of the recompute ladder (``pool``). For any λ

    min over layouts, ZeRO and rungs of  seconds + λ·(bytes − limit)

is a lower bound (Lagrangian relaxation: Everett, Operations Research 11, 1963): the gap.
``refine`` closes it with the integer program, whose memory limit is a constraint, where it is
wider than asked for. Where tables would be too wide, the integer program is all there is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from . import ilp
from .assembly import Assembly, Setting, Solution, fixed_bytes
from .closing import allowed_rungs, bounds, lowest_first, priced, rounded
from .errors import TimeLimitError
from .families import Family, Solved
from .kind_tables import KindTables, Rates, TooWideError
from .ladder import forced, num_rungs
from .ladder_front import MOST_RUNGS
from .plan import Recompute
from .pool import SAME, Found, Pool
from .stage_cost import Figures, StageCost
from .stage_limits import Effort as Effort
from .stage_limits import Limits as Limits
from .stage_model import StageModel
from .structure import Run

PRICES = (0.03, 0.3, 3.0, 100.0)
"""λ that solutions are sought for, in a stage's seconds per its bytes."""

MOST_PROGRAMS, MOST_SMALL_PROGRAMS = 2, 8
"""Integer programs that are solved to narrow a stage's gap; the second in a small graph."""

PROGRAM_SECONDS = 1.0
"""What such a program may take, but in a small graph; its bound then is what was proven."""

SMALL = 60
"""In a small graph, programs of up to so many binaries are solved to the end for every run."""

SMALL_GRAPH = 30
"""Ops of all kinds of blocks, at most, of a small graph."""


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """A stage's best way: its choices (by kind), setting, objective, and the solver's gap."""

    run: Run
    figures: Figures
    solution: Solution
    setting: Setting
    objective: float
    gap: float

    @property
    def shares(self) -> tuple[int, ...]:
        """The rows of each coordinate of "dp"; () where they are split evenly."""
        return ()

    @property
    def cost(self) -> StageCost:
        return self.figures.price(self.run, self.setting)


_Bounded = tuple[Sequence[Run], Rates]


@dataclass
class IntraOp:
    """Solves stages on one mesh (``model``) and keeps what it found."""

    model: StageModel
    limits: Limits
    effort: Effort
    pools: dict[int, Pool] = field(default_factory=dict, repr=False)
    answers: dict[object, StageAnswer | None] = field(default_factory=dict, repr=False)
    _kinds: dict[str, KindTables] = field(default_factory=dict, repr=False)
    _families: dict[int, Family | None] = field(default_factory=dict, repr=False)
    _bounds: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)
    _bounded: dict[int, list[_Bounded]] = field(default_factory=dict, repr=False)
    _refined: set[object] = field(default_factory=set, repr=False)
    _thrifty: set[object] = field(default_factory=set, repr=False)
    _least_excess: float = float("inf")

    @property
    def zeros(self) -> tuple[int, ...]:
        """The ZeRO stages to choose from."""
        return self.limits.zeros if self.model.prices.shards > 1 else (0,)

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """How blocks may be run."""
        given = self.limits.recompute
        return self.limits.modes if given is None else (given,)

    @property
    def excess_bytes(self) -> dict[object, float]:
        """By how much what did not fit is over the limit, by run and setting."""
        found: dict[object, float] = {}
        for pool in self.pools.values():
            found |= pool.excess_bytes
        if np.isfinite(self._least_excess):
            found["at least"] = self._least_excess
        return found

    def note_excess(self, num_bytes: float) -> None:
        """Some run cannot fit: it needs at least so many bytes more than there are."""
        self._least_excess = min(self._least_excess, num_bytes)

    def prepare(self, runs: Sequence[Run], num_microbatches: int) -> None:
        """Solves runs of one family without the memory limit."""
        new = [run for run in runs if (run.key, num_microbatches) not in self._bounds]
        if not new:
            return
        rates = Rates(num_microbatches, self.zeros, self.modes[0])
        solved = self._solve(new, rates)
        if solved is None:
            self._solve_programs(new, rates)
            return
        for number, run in enumerate(new):
            least = solved.least[number]
            self._bounds[run.key, rates.num_microbatches] = float(least.min())
        self._bounded.setdefault(new[0].family, []).append((new, rates))

    def _pool(self, run: Run) -> Pool:
        """The solutions of a run's family; those of runs that were only bounded are made now."""
        if run.family not in self.pools:
            self.pools[run.family] = Pool(
                self.model, self.zeros, self.limits.recompute, self.limits.modes
            )
        pool = self.pools[run.family]
        for runs, rates in self._bounded.pop(run.family, ()):
            pool.add_runs(runs)
            solved = self._solve(runs, rates)
            if solved is not None:
                self._take(pool, solved)
        pool.add_runs((run,))
        return pool

    def _family(self, run: Run) -> Family | None:
        """The tables of a run's family, None if they would be too wide."""
        if run.family not in self._families:
            began = time.perf_counter()
            try:
                for kind in run.counts:
                    if kind not in self._kinds:
                        self._kinds[kind] = KindTables(self.model, kind)
                    self._kinds[kind].check()
                self._families[run.family] = Family.of(self.model, run, self._kinds)
            except TooWideError:
                self._families[run.family] = None
            self.effort.table_seconds += time.perf_counter() - began
        return self._families[run.family]

    def is_quick(self, run: Run, num_microbatches: int) -> bool:
        """Whether a run is solved by tables, or its graph is so small that programs are quick."""
        if self._is_small_graph:
            return True
        return self._solve((run,), Rates(num_microbatches, self.zeros, self.modes[0])) is not None

    def _solve(self, runs: Sequence[Run], rates: Rates) -> Solved | None:
        """Runs of one family from the tables of their kinds; None where these are too wide."""
        family = self._family(runs[0])
        if family is None or self.effort.left_seconds <= 0:
            return None
        began = time.perf_counter()
        try:
            return family.solve(runs, rates)
        except TooWideError:
            self._families[runs[0].family] = None
            return None
        finally:
            self.effort.num_problems += 1
            self.effort.seconds += time.perf_counter() - began

    def _take(self, pool: Pool, solved: Solved) -> None:
        began = time.perf_counter()
        for solution in solved.solutions():
            pool.add(solution)
        self.effort.seconds += time.perf_counter() - began

    def bound_seconds(self, run: Run, num_microbatches: int) -> float:
        """A lower bound of the objective over all layouts, ZeRO stages and rungs.

        The memory limit is left out. 0 where nothing was proven in time.
        """
        self.prepare((run,), num_microbatches)
        return self._bounds.get((run.key, num_microbatches), 0.0)

    def best(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """The cheapest way that fits, or None if nothing does."""
        key = (run.key, num_microbatches, in_flight)
        if key not in self.answers:
            self.prepare((run,), num_microbatches)
            self.answers[key] = self._best(run, num_microbatches, in_flight)
        return self.answers[key]

    def _best(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """The best of the pool, and where memory binds of what else is found for it."""
        pool, limit = self._pool(run), self.limits.memory_bytes
        found = pool.cheapest(run, num_microbatches, in_flight, limit)
        is_wanting = self._gap(run, num_microbatches, found) > self.limits.gap
        if is_wanting and self._make_fit(run, num_microbatches, in_flight, found is None):
            found = pool.cheapest(run, num_microbatches, in_flight, limit)
        answer = self._stage_answer(run, num_microbatches, found)
        if answer is not None and answer.gap > SAME - 1 and self._is_small(run):
            return self._closed(answer, 0.0, SAME - 1, float("inf"))
        return answer

    @property
    def _is_small_graph(self) -> bool:
        every = self.model.structure.blocks.kinds.values()
        return sum(len(block.nodes) for block in every) <= SMALL_GRAPH

    def _is_small(self, run: Run) -> bool:
        """Whether the run's programs are so small that they may all be solved to the end."""
        if not self._is_small_graph:
            return False
        kinds = [self.model.kind(kind).decisions for kind in run.counts]
        sizes = [len(each.choices) for decisions in kinds for each in decisions]
        return sum(sizes) <= SMALL and np.isfinite(self.limits.memory_bytes)

    def _gap(self, run: Run, num_microbatches: int, best: Found | None) -> float:
        if best is None:
            return float("inf")
        bound = self._bounds.get((run.key, num_microbatches), 0.0)
        return max(0.0, 1 - bound / best.objective)

    def _stage_answer(
        self, run: Run, num_microbatches: int, best: Found | None
    ) -> StageAnswer | None:
        if best is None:
            return None
        gap = self._gap(run, num_microbatches, best)
        figures, solution = best.entry.figures, best.entry.solution
        return StageAnswer(run, figures, solution, best.setting, best.objective, gap)

    def _make_fit(
        self, run: Run, num_microbatches: int, in_flight: int, nothing_fits: bool
    ) -> bool:
        """Adds solutions for the case that memory binds; whether there were any to add.

        Those that are best when a byte has a price, with all blocks recomputed in the same way;
        once per family and per power of two of blocks and of micro-batches in flight.
        """
        near = (in_flight.bit_length(), run.num_blocks.bit_length())
        key = (run.family, num_microbatches, near)
        if key in self._thrifty or self.effort.left_seconds <= 0:
            return False
        self._thrifty.add(key)
        pool = self._pool(run)
        unit = rounded(self._price_unit(run, num_microbatches))
        in_flight = 1 << (in_flight.bit_length() - 1)
        before = len(pool.entries)
        for mode in self.modes:
            prices = [unit * price for price in PRICES]
            rates = priced(num_microbatches, in_flight, mode, self._some_zeros, prices)
            solved = self._solve((run,), rates)
            if solved is not None:
                self._take(pool, solved)
            elif nothing_fits:
                self._thriftiest_program(run, rates, in_flight)
        return len(pool.entries) > before

    @property
    def _some_zeros(self) -> tuple[int, ...]:
        """The ZeRO stages whose layouts are worth finding: every solution is tried under all."""
        return tuple(dict.fromkeys((self.zeros[0], self.zeros[-1])))

    def _price_unit(self, run: Run, num_microbatches: int) -> float:
        """Seconds per byte at which all of a device's bytes cost as much as the stage."""
        bound = self._bounds.get((run.key, num_microbatches), 0.0)
        limit = self.limits.memory_bytes
        return max(bound, 1e-9) / (limit if np.isfinite(limit) else 1e9)

    def memory_bound_seconds(self, run: Run, num_microbatches: int, in_flight: int) -> float:
        """A lower bound of the objective of whatever fits in memory (Lagrangian).

        What is best at the prices that give the bound goes into the pool.
        """
        bound = self.bound_seconds(run, num_microbatches)
        family = self._family(run)
        if family is None or not np.isfinite(self.limits.memory_bytes):
            return bound
        free = self.limits.memory_bytes - fixed_bytes(self.model, run)
        grid = np.geomspace(1e-3, 1e2, 12) * rounded(self._price_unit(run, num_microbatches))
        least = dict.fromkeys(self.zeros, 0.0)
        zeros = self.zeros
        for size in (6, 6, 0):
            ways = self._ways(num_microbatches, in_flight, zeros, grid.tolist())
            try:
                found = family.bound(run, list(ways.values()))
            except TooWideError:
                return bound
            values = found.reshape(len(zeros), -1) - free * grid
            for zero, own in zip(zeros, values.max(axis=1).tolist(), strict=True):
                least[zero] = max(least[zero], own)
            zero = min(zeros, key=least.__getitem__)
            best = int(values[zeros.index(zero)].argmax())
            near = grid[max(best - 1, 0) : best + 2]
            if size:
                zeros = tuple(each for each in zeros if least[each] <= least[zero] * 1.05)
                grid = np.geomspace(near[0], near[-1], size)
        for rates in self._ways(num_microbatches, in_flight, (zero,), near.tolist()).values():
            solved = self._solve((run,), rates)
            if solved is not None:
                self._take(self._pool(run), solved)
        return max(bound, min(least.values()))

    def _ways(
        self, num_microbatches: int, in_flight: int, zeros: Sequence[int], prices: Sequence[float]
    ) -> dict[Recompute, Rates]:
        return {
            mode: priced(num_microbatches, in_flight, mode, zeros, prices) for mode in self.modes
        }

    def refine(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """``best`` with its gap proven, and narrowed to ``limits.gap`` if time allows."""
        found = self.best(run, num_microbatches, in_flight)
        key = (run.key, num_microbatches, in_flight)
        if found is None or found.gap <= SAME - 1 or key in self._refined:
            return found
        self._refined.add(key)
        bound = self.memory_bound_seconds(run, num_microbatches, in_flight)
        best = self._pool(run).cheapest(run, num_microbatches, in_flight, self.limits.memory_bytes)
        better = self._stage_answer(run, num_microbatches, best)
        assert better is not None, "what fits is still there"
        found = replace(better, gap=max(0.0, 1 - bound / better.objective))
        if found.gap > self.limits.gap:
            most = MOST_SMALL_PROGRAMS if self._is_small_graph else MOST_PROGRAMS
            found = self._closed(found, bound, self.limits.gap, most)
        self.answers[key] = found
        return found

    def _closed(self, found: StageAnswer, bound: float, gap: float, most: float) -> StageAnswer:
        """The best after up to ``most`` integer programs, until the gap is no more than asked."""
        run, base = found.run, replace(found.setting, limit_bytes=self.limits.memory_bytes)
        family, count = self._family(run), base.num_microbatches
        if family is None or num_rungs(*run.class_counts) > MOST_RUNGS:
            return found
        on = allowed_rungs(run, self.limits.recompute, self.limits.modes)
        prices = [0.0, *(self._price_unit(run, count) * np.geomspace(1e-2, 1e2, 9)).tolist()]
        free = self.limits.memory_bytes - fixed_bytes(self.model, run)
        values = bounds(
            family, run, self._ways(count, base.in_flight, self.zeros, prices), on,
            num_zeros=len(self.zeros), free_bytes=free,
        )  # fmt: skip
        least = found.objective
        solved: list[float] = []
        for number, (value, zero, rung) in enumerate(lowest_first(values)):
            bound = max(bound, min([value, *solved]))
            if min(value, least) >= least * (1 - gap) or number >= most:
                break
            setting = replace(base, zero=self.zeros[zero], rung=on[rung])
            answer = self._program(run, setting, gap=gap / 2, cutoff=least * (1 - gap))
            if answer is None:
                break
            is_over = answer.status == "optimal" and answer.excess_bytes > 0
            solved.append(float("inf") if is_over else answer.bound)
            if answer.excess_bytes <= 0:
                least = min(least, answer.objective)
        else:
            bound = max(bound, min(solved))
        best = self._pool(run).cheapest(run, count, base.in_flight, self.limits.memory_bytes)
        improved = self._stage_answer(run, count, best)
        assert improved is not None, "what fits is still there"
        return replace(improved, gap=max(0.0, 1 - bound / improved.objective))

    def _program(
        self, run: Run, setting: Setting, *, gap: float = 0.0, cutoff: float = np.inf
    ) -> ilp.Answer | None:
        """Solves one integer program and puts its solution in the pool; None if time is up.

        It is not solved to the end where nothing below ``cutoff`` can be.
        """
        if self.effort.left_seconds <= 0:
            return None
        began = time.perf_counter()
        assembly = Assembly(self.model, run)
        problem = assembly.problem(setting)
        self.effort.table_seconds += time.perf_counter() - began
        try:
            left = self.effort.left_seconds
            if np.isfinite(cutoff) and not self._is_small_graph:
                left = min(left, PROGRAM_SECONDS)
            answer = ilp.optimize(problem, time_limit_seconds=left, gap=gap, cutoff=cutoff)
        except TimeLimitError:
            return None
        finally:
            self.effort.num_problems += 1
        self.effort.seconds += answer.seconds
        self._pool(run).add(assembly.solution(answer.choices))
        return answer

    def _solve_programs(self, runs: Sequence[Run], rates: Rates) -> None:
        """Without tables: the integer program for the shortest, the middle and the longest run.

        Its bound holds for the runs that were solved under every ZeRO stage.
        """
        ordered = sorted(runs, key=lambda run: run.num_blocks)
        some = {run.key: run for run in (ordered[0], ordered[len(runs) // 2], ordered[-1])}
        for run in some.values():
            rung = forced(rates.mode, run.class_counts[0])
            answers = [
                self._program(run, Setting(rates.num_microbatches, zero, rung))
                for zero in rates.zeros
            ]
            bounds = [answer.bound for answer in answers if answer is not None]
            if len(bounds) == len(answers):
                self._bounds[run.key, rates.num_microbatches] = min(bounds)

    def _thriftiest_program(self, run: Run, rates: Rates, in_flight: int) -> None:
        """Without tables: the integer program in which almost only memory counts."""
        setting = Setting(
            rates.num_microbatches, rates.zeros[-1], forced(rates.mode, run.class_counts[0]),
            in_flight, limit_bytes=float("inf"), memory_weight=rates.state_prices[-1],
        )  # fmt: skip
        self._program(run, setting)
