"""Intra-op planning: layouts, ZeRO stage and recomputation of a stage on one mesh.

In: the tables of a mesh, runs of blocks, micro-batches per step and in flight, a memory limit. Out:
the cheapest solution that fits, its cost, and its gap.

If memory does not bind, the answer is exact for every run and ZeRO stage: each kind of block is
solved once for every layout at its ends, and runs are composed from these solutions (``families``).
If it binds, the same is done with a price λ per byte, for several λ and with blocks recomputed or
not; the solutions are collected in a pool and priced under every ZeRO stage and recomputation
policy (``pool``). For any λ

    min over layouts, ZeRO and policies of  seconds + λ·(bytes − limit)

is a lower bound (Lagrangian relaxation: Everett, Operations Research 11, 1963), which gives the
gap. ``refine`` narrows it to the requested gap with the integer program, whose memory limit is a
constraint. If tables would be too wide, only the integer program is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from ..costs.seconds import objective_weights
from ..errors import TimeLimitError
from ..integer_programs import ilp
from ..integer_programs.program import HIGHS, Solver
from ..plan import Recompute
from ..requests.features import PLAIN_MODES
from ..requests.goal import Budget
from ..stage.recompute_policy import MOST_POLICIES, num_policies, recomputing, uniform_policy
from ..stage.stage_model import StageModel
from ..stage.stage_problem import Solution, StageOptions, StageProblem, fixed_bytes
from ..stage.structure import Run
from ..stage.terms import TooWideError
from . import closing
from .families import Family, Solved
from .kind_tables import KindTables, Rates
from .pool import SAME, Pool, PooledSolution, gap_between
from .pool import StageAnswer as StageAnswer

PRICES = (0.3, 3.0, 100.0)
"""Prices λ of a byte to solve stages for, in multiples of a stage's seconds / a device's bytes."""

HIGH_PRICES = (3e3, 1e6)
"""Higher λ, used if nothing fits otherwise: on slow links saved bytes cost that many seconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a stage: bytes per device, allowed ZeRO stages and recomputation modes, forced mode
    (``recompute``).

    ``gap``: allowed distance of a stage's cost from its proven lower bound, relative to the cost.
    ``solver`` solves the integer programs; without ``uses_tables`` they choose all layouts.
    """

    memory_bytes: float
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recompute: Recompute | None = None
    gap: float = 0.01
    modes: tuple[Recompute, ...] = PLAIN_MODES
    solver: Solver = HIGHS
    uses_tables: bool = True


_Bounded = tuple[Sequence[Run], Rates]


@dataclass
class IntraOp:
    """Solver of stages on one mesh (``model``): layouts, ZeRO stage and recomputation. Cached."""

    model: StageModel
    limits: Limits
    budget: Budget
    pools: dict[int, Pool] = field(default_factory=dict, repr=False)
    answers: dict[object, StageAnswer | None] = field(default_factory=dict, repr=False)
    _kinds: dict[str, KindTables] = field(default_factory=dict, repr=False)
    _families: dict[int, Family | None] = field(default_factory=dict, repr=False)
    _bounds: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)
    _blocks: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)
    _bounded: dict[int, list[_Bounded]] = field(default_factory=dict, repr=False)
    _refined: dict[object, int] = field(default_factory=dict, repr=False)
    _proven: dict[object, dict[int, float]] = field(default_factory=dict, repr=False)
    _thrifty: set[object] = field(default_factory=set, repr=False)
    _noted: dict[object, float] = field(default_factory=dict, repr=False)

    @property
    def zeros(self) -> tuple[int, ...]:
        """Return the allowed choices of ZeRO, by their numbers in ``Prices.shardings``."""
        return self.model.prices.allowed_shardings(self.limits.zeros)

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """Return the allowed recomputation modes."""
        given = self.limits.recompute
        return self.limits.modes if given is None else (given,)

    @property
    def excess_bytes(self) -> dict[object, float]:
        """Map stages and settings for which nothing fits to their least bytes over the limit."""
        found = dict(self._noted)
        for pool in self.pools.values():
            found |= pool.excess_bytes
        return found

    def note_excess(self, num_bytes: float) -> None:
        """Record that some stage needs ``num_bytes`` or more beyond the memory limit."""
        self._noted["any"] = min(num_bytes, self._noted.get("any", num_bytes))

    def prepare(self, runs: Sequence[Run], num_microbatches: int) -> None:
        """Compute lower bounds of stages (of the same kinds of blocks), ignoring memory limits."""
        new = [run for run in runs if (run.key, num_microbatches) not in self._bounds]
        if new and not self._prepare_by_tables(new, num_microbatches):
            self._solve_programs(new, self._plain(num_microbatches))

    def _prepare_by_tables(self, runs: Sequence[Run], num_microbatches: int) -> bool:
        """Compute lower bounds of stages (of the same kinds of blocks) from cost tables.

        Return False if the tables are too large or the time is up.
        """
        rates = self._plain(num_microbatches)
        solved = self._solve(runs, rates)
        if solved is None:
            return False
        for number, run in enumerate(runs):
            self._bounds[run.key, num_microbatches] = float(solved.least[number].min())
        self._bounded.setdefault(runs[0].family, []).append((runs, rates))
        return True

    def _plain(self, num_microbatches: int) -> Rates:
        """Return weights for the search without memory limit: one problem per ZeRO stage."""
        return Rates(num_microbatches, self.zeros, self.modes[0])

    def _pool(self, run: Run) -> Pool:
        """Return the pool of solutions for the stage and all stages of the same kinds of blocks."""
        if run.family not in self.pools:
            self.pools[run.family] = Pool(
                self.model, run, self.zeros, self.limits.recompute, self.limits.modes
            )
        pool = self.pools[run.family]
        for runs, rates in self._bounded.pop(run.family, ()):
            solved = self._solve(runs, rates)
            if solved is not None:
                self._take(pool, solved)
        return pool

    def _family(self, run: Run) -> Family | None:
        """Return the problem shared by stages of these kinds of blocks; None if it is too large."""
        if not self.limits.uses_tables:
            return None
        if run.family not in self._families:
            self._families[run.family] = None
            with self.budget.timed("costs"), suppress(TooWideError):
                for kind in run.counts:
                    if kind not in self._kinds:
                        self._kinds[kind] = KindTables.of(self.model, kind)
                    self._kinds[kind].check()
                self._families[run.family] = Family.of(self.model, run, self._kinds)
        return self._families[run.family]

    def _solve(self, runs: Sequence[Run], rates: Rates) -> Solved | None:
        """Solve stages of the same kinds of blocks by cost tables; None if too large or late."""
        family = self._family(runs[0])
        if family is None or self.budget.left_seconds <= 0:
            return None
        self.budget.num_problems += 1
        with self.budget.timed("ilp"), suppress(TooWideError):
            return family.solve(runs, rates)
        self._families[runs[0].family] = None
        return None

    def _take(self, pool: Pool, solved: Solved) -> None:
        with self.budget.timed("ilp"):
            for solution in solved.solutions():
                pool.add(solution)

    def bound_seconds(self, run: Run, num_microbatches: int) -> float:
        """Return a lower bound of the stage's seconds per micro-batch, whatever the choices.

        The memory limit is ignored. The bound is 0 if nothing was proven in time.
        """
        self.prepare((run,), num_microbatches)
        return self._bounds.get((run.key, num_microbatches), 0.0)

    def block_seconds(self, kind: str, num_microbatches: int) -> float:
        """Return a lower bound of a block's seconds per micro-batch; 0 if tables are too large."""
        key = (kind, num_microbatches)
        if key not in self._blocks:
            self._blocks[key] = 0.0
            if kind in self._kinds:
                with suppress(TooWideError):
                    table = self._kinds[kind].solve(self._plain(num_microbatches)).table
                    self._blocks[key] = float(table.min())
        return self._blocks[key]

    def best(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """Return the cheapest found solution of a stage that fits in memory; None without any."""
        key = (run.key, num_microbatches, in_flight)
        if key not in self.answers:
            self.prepare((run,), num_microbatches)
            self.answers[key] = self._best(run, num_microbatches, in_flight)
        return self.answers[key]

    def _best(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """Return the pool's cheapest solution, after adding more while its gap is too large."""
        pool, limit = self._pool(run), self.limits.memory_bytes
        found = pool.cheapest(run, num_microbatches, in_flight, limit)
        for prices in (PRICES, HIGH_PRICES):
            is_wanting = self._gap(run, num_microbatches, found) > self.limits.gap
            if not is_wanting or (found is not None and prices is HIGH_PRICES):
                break
            if self._add_priced(run, num_microbatches, in_flight, prices, found is None):
                found = pool.cheapest(run, num_microbatches, in_flight, limit)
        return self._stage_answer(run, num_microbatches, found)

    def _gap(self, run: Run, num_microbatches: int, best: PooledSolution | None) -> float:
        if best is None:
            return float("inf")
        bound = self._bounds.get((run.key, num_microbatches), 0.0)
        return gap_between(bound, best.objective)

    def _stage_answer(
        self, run: Run, num_microbatches: int, best: PooledSolution | None
    ) -> StageAnswer | None:
        if best is None:
            return None
        gap = self._gap(run, num_microbatches, best)
        table, solution = best.entry.table, best.entry.solution
        return StageAnswer(run, table, solution, best.setting, best.objective, gap)

    def _add_priced(
        self,
        run: Run,
        num_microbatches: int,
        in_flight: int,
        prices: tuple[float, ...],
        nothing_fits: bool,
    ) -> bool:
        """Add the best solutions at ``prices`` per byte to the pool; return whether any is new.

        The prices are in multiples of ``_price_unit``; solutions with the least and with the most
        recomputation in all blocks are added. Runs once per family and numbers of blocks and
        micro-batches in flight, rounded to powers of two.
        """
        in_flight = 1 << (in_flight.bit_length() - 1)
        key = (run.family, num_microbatches, in_flight, run.num_blocks.bit_length(), prices)
        if key in self._thrifty or self.budget.left_seconds <= 0:
            return False
        self._thrifty.add(key)
        pool = self._pool(run)
        unit = closing.round_price(self._price_unit(run, num_microbatches))
        before = len(pool.entries)
        zeros = tuple(dict.fromkeys((self.zeros[0], self.zeros[-1])))  # the others share them
        for mode in dict.fromkeys((self.modes[0], self.modes[-1])):
            rates = closing.priced_rates(
                num_microbatches, in_flight, mode, zeros, [unit * price for price in prices]
            )
            solved = self._solve((run,), rates)
            if solved is not None:
                self._take(pool, solved)
            elif nothing_fits:
                self._solve_least_memory(run, rates, in_flight)
        return len(pool.entries) > before

    def _price_unit(self, run: Run, num_microbatches: int) -> float:
        """Return the seconds per byte at which a device's memory costs as much as the stage."""
        bound = self._bounds.get((run.key, num_microbatches), 0.0)
        limit = self.limits.memory_bytes
        return max(bound, 1e-9) / (limit if np.isfinite(limit) else 1e9)

    def memory_bound_seconds(self, run: Run, num_microbatches: int, in_flight: int) -> float:
        """Return a lower bound of the stage's seconds per micro-batch within the memory limit.

        Solutions at the prices near the bound are added to the pool.
        """
        bound = self.bound_seconds(run, num_microbatches)
        family = self._family(run)
        if family is None or not np.isfinite(self.limits.memory_bytes):
            return bound
        free = self.limits.memory_bytes - fixed_bytes(self.model, run)
        unit = closing.round_price(self._price_unit(run, num_microbatches))

        def ways(zeros: Sequence[int], prices: Sequence[float]) -> list[Rates]:
            return list(self._ways(num_microbatches, in_flight, zeros, prices).values())

        try:
            least, zero, near = closing.bound_by_price(family, run, ways, self.zeros, (free, unit))
        except TooWideError:
            return bound
        for rates in ways((zero,), near):
            solved = self._solve((run,), rates)
            if solved is not None:
                self._take(self._pool(run), solved)
        return max(bound, least)

    def _ways(
        self, num_microbatches: int, in_flight: int, zeros: Sequence[int], prices: Sequence[float]
    ) -> dict[Recompute, Rates]:
        return {
            mode: closing.priced_rates(num_microbatches, in_flight, mode, zeros, prices)
            for mode in self.modes
        }

    def refine(
        self, run: Run, num_microbatches: int, in_flight: int, most: int
    ) -> StageAnswer | None:
        """Return the cheapest solution that fits in memory, after solving up to ``most`` integer
        programs, within the time limit, to bring its proven gap down to ``limits.gap``."""
        found = self.best(run, num_microbatches, in_flight)
        key = (run.key, num_microbatches, in_flight)
        if found is None or found.gap <= SAME - 1 or self._refined.get(key, 0) >= most:
            return found
        self._refined[key] = most
        proven = self._proven.setdefault((run.key, num_microbatches), {})
        # a solution that fits with more micro-batches in flight fits with fewer
        bound = max((own for held, own in proven.items() if held <= in_flight), default=0.0)
        if 1 - bound / found.objective <= self.limits.gap:
            self.answers[key] = replace(found, gap=max(0.0, 1 - bound / found.objective))
            return self.answers[key]
        bound = max(bound, self.memory_bound_seconds(run, num_microbatches, in_flight))
        best = self._pool(run).cheapest(run, num_microbatches, in_flight, self.limits.memory_bytes)
        better = self._stage_answer(run, num_microbatches, best)
        assert better is not None, "what fits is still there"
        found = replace(better, gap=gap_between(bound, better.objective))
        if found.gap > self.limits.gap:
            found = self._close_gap(found, bound, self.limits.gap, most)
        proven[in_flight] = found.objective * (1 - found.gap)
        self.answers[key] = found
        return found

    def _close_gap(self, found: StageAnswer, bound: float, gap: float, most: float) -> StageAnswer:
        """Solve up to ``most`` integer programs to bring the gap to ``gap``; return the best
        solution."""
        run, base = found.run, replace(found.setting, limit_bytes=self.limits.memory_bytes)
        family, count = self._family(run), base.num_microbatches
        used = recomputing(self.limits.recompute, self.limits.modes)
        if family is None or num_policies(*run.class_counts, used) > MOST_POLICIES:
            return found
        weights = objective_weights(count)
        hidden = float(np.array(found.cost.seconds) @ weights) + sum(found.cost.receive_seconds)
        hidden -= found.cost.exposed_copies
        hidden += self.model.least_wait(run, base.zero, count)
        if hidden < found.objective * (1 - gap):
            # seconds that no compute hides are not in the programs
            most = min(most, closing.MOST_PROGRAMS)
        listed = closing.allowed_policies(run, self.limits.recompute, self.limits.modes)
        prices = [0.0, *(self._price_unit(run, count) * np.geomspace(1e-2, 1e2, 9)).tolist()]
        free = self.limits.memory_bytes - fixed_bytes(self.model, run)
        values = closing.bounds(
            family,
            run,
            self._ways(count, base.in_flight, self.zeros, prices),
            listed,
            num_zeros=len(self.zeros),
            free_bytes=free,
        )
        least = found.objective
        solved: list[float] = []
        for number, (value, zero, policy) in enumerate(closing.lowest_first(values)):
            bound = max(bound, min([value, *solved]))
            if min(value, least) >= least * (1 - gap) or number >= most:
                break
            setting = replace(base, zero=self.zeros[zero], policy=listed[policy])
            answer = self._program(
                run, setting, gap=gap / 2, cutoff=least * (1 - gap), start=found.solution
            )
            if answer is None:
                break
            is_over = answer.status == "optimal" and answer.excess_bytes > 0
            solved.append(float("inf") if is_over else answer.bound)
            best = self._pool(run).cheapest(run, count, base.in_flight, self.limits.memory_bytes)
            assert best is not None, "what fits is still there"
            least = min(least, best.objective)
        else:
            bound = max(bound, min(solved))
        best = self._pool(run).cheapest(run, count, base.in_flight, self.limits.memory_bytes)
        improved = self._stage_answer(run, count, best)
        assert improved is not None, "what fits is still there"
        return replace(improved, gap=gap_between(bound, improved.objective))

    def _program(
        self,
        run: Run,
        setting: StageOptions,
        *,
        gap: float = 0.0,
        cutoff: float = np.inf,
        start: Solution | None = None,
    ) -> ilp.Answer | None:
        """Solve one integer program and add its solution to the pool; return None if time is up.

        It stops once no solution can be below ``cutoff``; it begins with the solution ``start``.
        """
        if self.budget.left_seconds <= 0:
            return None
        with self.budget.timed("costs"):
            stage = StageProblem(self.model, run)
            problem = stage.linearized(setting)
        try:
            left = self.budget.left_seconds
            if np.isfinite(cutoff):
                left = min(left, closing.PROGRAM_SECONDS)
            known = () if start is None else stage.choices(start)
            with self.budget.timed("ilp"):
                answer = ilp.optimize(
                    problem,
                    time_limit_seconds=left,
                    gap=gap,
                    cutoff=cutoff,
                    solver=self.limits.solver,
                    start=known,
                )
        except TimeLimitError:
            return None
        finally:
            self.budget.num_problems += 1
        self._pool(run).add(stage.solution(answer.choices))
        return answer

    def _solve_programs(self, runs: Sequence[Run], rates: Rates) -> None:
        """Solve integer programs, not tables, for the shortest, middle and longest of ``runs``.

        Only stages that were solved under every ZeRO stage get a lower bound.
        """
        ordered = sorted(runs, key=lambda run: run.num_blocks)
        some = {run.key: run for run in (ordered[0], ordered[len(runs) // 2], ordered[-1])}
        for run in some.values():
            policy = uniform_policy(rates.mode, run.class_counts[0])
            answers = [
                self._program(run, StageOptions(rates.num_microbatches, zero, policy))
                for zero in rates.zeros
            ]
            bounds = [answer.bound for answer in answers if answer is not None]
            if len(bounds) == len(answers):
                self._bounds[run.key, rates.num_microbatches] = min(bounds)

    def _solve_least_memory(self, run: Run, rates: Rates, in_flight: int) -> None:
        """Solve the integer program at a high price per byte, for stages with too large tables."""
        policy = uniform_policy(rates.mode, run.class_counts[0])
        setting = StageOptions(
            rates.num_microbatches,
            rates.zeros[-1],
            policy,
            in_flight,
            limit_bytes=float("inf"),
            memory_weight=rates.state_prices[-1],
        )
        self._program(run, setting)
