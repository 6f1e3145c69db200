"""The best way to run a stage on one mesh: layouts, ZeRO stage, how much is recomputed.

In: the tables of a mesh, runs of blocks, micro-batches per step and in flight, a memory
limit. Out: the cheapest way that fits, and its cost.

For a fixed ZeRO stage the best objective of a family of runs that differ in the number n
of equal blocks is the least of lines a + b·n, one per solution: concave. So where the
solution at one end is also best at the other it is best between (few programs are solved);
otherwise the middle is solved too. Solutions are kept in a pool; each is then priced under
every ZeRO stage with the fewest blocks recomputed that make it fit. Where none fits the
pool gets solutions that take less memory; ``refine`` solves with the limit itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from . import ilp
from .assembly import Assembly, Setting, Solution
from .errors import TimeLimitError
from .plan import Recompute
from .stage_cost import Figures, StageCost
from .stage_model import StageModel
from .structure import Run

THRIFTY = 100.0
"""The price of a stage's bytes in its own seconds at which only memory counts."""

SAME = 1 + 1e-9
"""Two objectives within this factor are equal."""


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
    def cost(self) -> StageCost:
        return self.figures.price(self.run, self.setting)


@dataclass(frozen=True, slots=True)
class Limits:
    """What every stage must keep to: bytes per device, forced ZeRO and recomputation."""

    memory_bytes: float
    zero: int | None = None
    recompute: Recompute | None = None


@dataclass
class Effort:
    """Time for solving and what was spent."""

    deadline: float
    num_problems: int = 0
    seconds: float = 0.0
    table_seconds: float = 0.0

    @property
    def left_seconds(self) -> float:
        return self.deadline - time.perf_counter()


@dataclass
class _Entry:
    figures: Figures
    solution: Solution
    gap: float


@dataclass
class IntraOp:
    """Solves stages on one mesh (``model``) and keeps what it found."""

    model: StageModel
    limits: Limits
    effort: Effort
    pools: dict[int, dict[tuple[int, ...], _Entry]] = field(default_factory=dict, repr=False)
    answers: dict[object, StageAnswer | None] = field(default_factory=dict, repr=False)
    excess_bytes: dict[object, float] = field(default_factory=dict, repr=False)
    _ready: set[object] = field(default_factory=set, repr=False)
    _thrifty: set[int] = field(default_factory=set, repr=False)

    @property
    def zeros(self) -> tuple[int, ...]:
        """The ZeRO stages to choose from."""
        if self.limits.zero is not None:
            return (self.limits.zero if self.model.prices.shards > 1 else 0,)
        return (0, 1, 2, 3) if self.model.prices.shards > 1 else (0,)

    def levels(self, run: Run) -> tuple[int, int]:
        """The least and the most blocks that may be recomputed."""
        match self.limits.recompute:
            case "none":
                return 0, 0
            case "full":
                return run.num_blocks, run.num_blocks
            case _:
                return 0, run.num_blocks

    def best(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """The cheapest way that fits, or None if nothing does."""
        key = (run.key, num_microbatches, in_flight)
        if key not in self.answers:
            self.answers[key] = self._best(run, num_microbatches, in_flight)
        return self.answers[key]

    def prepare(self, runs: Sequence[Run], num_microbatches: int) -> None:
        """Solves a family of runs, shortest first, without the memory limit."""
        family = (runs[0].family, num_microbatches)
        if family in self._ready:
            return
        self._ready.add(family)
        varying = {kind for kind in runs[0].counts if len({run.counts[kind] for run in runs}) > 1}
        setting = Setting(num_microbatches, self._first_zero, self.levels(runs[0])[0])
        if len(varying) > 1:
            for run in runs:
                self._solve(run, self._leveled(run, setting))
        else:
            self._envelope(runs, setting)

    @property
    def _first_zero(self) -> int:
        return 1 if 1 in self.zeros else self.zeros[0]

    def _leveled(self, run: Run, setting: Setting) -> Setting:
        return replace(setting, level=self.levels(run)[0])

    def _envelope(self, runs: Sequence[Run], setting: Setting) -> None:
        first = self._solve(runs[0], self._leveled(runs[0], setting))
        if len(runs) == 1:
            return
        last = self._solve(runs[-1], self._leveled(runs[-1], setting))
        self._between(runs, setting, 0, len(runs) - 1, (first, last))

    def _between(
        self,
        runs: Sequence[Run],
        setting: Setting,
        low: int,
        high: int,
        ends: tuple[_Entry | None, _Entry | None],
    ) -> None:
        first, last = ends
        if first is None or last is None or high - low < 2:
            return
        if self._objective(first, runs[high], setting) <= SAME * self._objective(
            last, runs[high], setting
        ):
            return
        if self._objective(last, runs[low], setting) <= SAME * self._objective(
            first, runs[low], setting
        ):
            return
        middle = (low + high) // 2
        found = self._solve(runs[middle], self._leveled(runs[middle], setting))
        self._between(runs, setting, low, middle, (first, found))
        self._between(runs, setting, middle, high, (found, last))

    def _objective(self, entry: _Entry, run: Run, setting: Setting) -> float:
        level = self.levels(run)[0]
        return entry.figures.ladder(run).objective(setting.zero, level, setting.num_microbatches)

    def _solve(self, run: Run, setting: Setting) -> _Entry | None:
        """Solves one program and puts its solution in the pool; None if time is up."""
        if self.effort.left_seconds <= 0:
            return None
        began = time.perf_counter()
        assembly = Assembly(self.model, run)
        problem = assembly.problem(setting)
        self.effort.table_seconds += time.perf_counter() - began
        try:
            answer = ilp.optimize(problem, time_limit_seconds=self.effort.left_seconds)
        except TimeLimitError:
            return None
        finally:
            self.effort.num_problems += 1
        self.effort.seconds += answer.seconds
        pool = self.pools.setdefault(run.family, {})
        if answer.choices not in pool:
            solution = assembly.solution(answer.choices)
            pool[answer.choices] = _Entry(Figures(assembly, answer.choices), solution, answer.gap)
        return pool[answer.choices]

    def _best(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        self.prepare((run,), num_microbatches)
        base = Setting(num_microbatches, in_flight=in_flight)
        found = self._cheapest(run, base)
        if found is None and run.family not in self._thrifty:
            self._make_fit(run, base)
            found = self._cheapest(run, base)
        return found

    def _cheapest(self, run: Run, base: Setting) -> StageAnswer | None:
        """The best of the pool that fits, with the fewest blocks recomputed that make it fit."""
        best: StageAnswer | None = None
        low, high = self.levels(run)
        for entry in self.pools.get(run.family, {}).values():
            ladder = entry.figures.ladder(run)
            for zero in self.zeros:
                over = ladder.total_bytes(zero, base.in_flight)[low : high + 1]
                over = over - self.limits.memory_bytes
                level = low + int(np.argmax(over <= 0))
                if over[level - low] > 0:
                    self._note_excess(run, base, float(over.min()))
                    continue
                objective = ladder.objective(zero, level, base.num_microbatches)
                if best is None or objective * SAME < best.objective:
                    setting = replace(base, zero=zero, level=level)
                    best = StageAnswer(
                        run, entry.figures, entry.solution, setting, objective, entry.gap
                    )
        return best

    def _note_excess(self, run: Run, base: Setting, excess: float) -> None:
        key = (run.key, base.num_microbatches, base.in_flight)
        self.excess_bytes[key] = min(excess, self.excess_bytes.get(key, excess))

    def _make_fit(self, run: Run, base: Setting) -> None:
        """Adds solutions that take less memory, once per family of runs.

        First the thriftiest of all, then the best ones when a byte has a price: what it costs
        between the fastest and the thriftiest (points of the convex hull of seconds and bytes).
        """
        if run.family in self._thrifty:
            return
        self._thrifty.add(run.family)
        low, high = self.levels(run)
        setting = replace(base, zero=self.zeros[-1], level=high, limit_bytes=float("inf"))
        fastest = self._solve(run, replace(setting, limit_bytes=None))
        if fastest is None:
            return
        cost = fastest.figures.price(run, setting)
        price = THRIFTY * cost.objective(base.num_microbatches) / cost.total_bytes
        least = self._solve(run, replace(setting, memory_weight=price))
        if least is None:
            return
        ends = (cost, least.figures.price(run, setting))
        seconds = [cost.objective(base.num_microbatches) for cost in ends]
        saved_bytes = ends[0].total_bytes - ends[1].total_bytes
        if saved_bytes <= 0 or seconds[1] <= seconds[0]:
            return
        price = (seconds[1] - seconds[0]) / saved_bytes
        for level in dict.fromkeys((low, high)):
            self._solve(run, replace(setting, level=level, memory_weight=price))

    def refine(self, run: Run, num_microbatches: int, in_flight: int) -> StageAnswer | None:
        """``best`` with every ZeRO stage and several recompute levels solved for themselves.

        Where the unlimited optimum fits as it is, ZeRO 0 and 1 alone can be the fastest; where
        memory binds, programs with its limit.
        """
        low, high = self.levels(run)
        base = Setting(num_microbatches, in_flight=in_flight)
        found = self.best(run, num_microbatches, in_flight)
        if found is None:
            return None
        binds = found.setting.level > low or found.setting.zero > 1
        levels = [low]
        if binds:
            near = found.setting.level
            tries = {low, near - 1, near, (low + high) // 2, high}
            levels = sorted(level for level in tries if low <= level <= high)
        for zero in self.zeros if binds else self.zeros[:2]:
            for level in levels:
                limit = self.limits.memory_bytes if binds else None
                self._solve(run, replace(base, zero=zero, level=level, limit_bytes=limit))
        answer = self._cheapest(run, base)
        self.answers[run.key, num_microbatches, in_flight] = answer
        return answer
