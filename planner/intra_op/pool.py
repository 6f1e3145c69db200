"""The solutions found for a family of runs, and the cheapest that fits for each of its runs.

In: solutions (choices by kind), runs, micro-batches per step and in flight, a limit of bytes.
Out: per run the best of every solution, ZeRO stage and rung of the recompute ladder. With
nothing recomputed all runs, solutions and stages are compared at once, as arrays; the ladder
is climbed only by those that do not fit and would otherwise be faster than what does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import Recompute
from ..pricing.ladder import MODES, Ints, Ladder, forced
from ..pricing.stage_cost import Figures
from ..pricing.stage_model import StageModel
from ..pricing.structure import Run
from .assembly import Assembly, Setting, Solution, constant_bytes, reserve
from .elimination import Floats

SAME = 1 + 1e-9
"""Two objectives within this factor are equal."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A solution with its figures."""

    figures: Figures
    solution: Solution


@dataclass(frozen=True, slots=True)
class Found:
    """The best way for a run: which solution, the setting, the objective."""

    entry: Entry
    setting: Setting
    objective: float


@dataclass(frozen=True, slots=True)
class _Base:
    """A solution with nothing recomputed: ``[run, zero]``; bytes kept by ``[run]``, transient
    ones by ``[zero]``."""

    microbatch_seconds: Floats
    step_seconds: Floats
    fixed_bytes: Floats
    kept_bytes: Floats
    transient_bytes: Floats

    def followed(self, more: _Base) -> _Base:
        """With more runs of the same solution."""
        return _Base(
            np.concatenate([self.microbatch_seconds, more.microbatch_seconds]),
            np.concatenate([self.step_seconds, more.step_seconds]),
            np.concatenate([self.fixed_bytes, more.fixed_bytes]),
            np.concatenate([self.kept_bytes, more.kept_bytes]),
            self.transient_bytes,
        )

    def of_run(self, number: int) -> _Base:
        """Of a stack over solutions, one run."""
        return _Base(
            self.microbatch_seconds[:, number],
            self.step_seconds[:, number],
            self.fixed_bytes[:, number],
            self.kept_bytes[:, number],
            self.transient_bytes,
        )


@dataclass
class Pool:
    """Solutions of one family on one mesh, for all of its ``runs``."""

    model: StageModel
    zeros: tuple[int, ...]
    recompute: Recompute | None
    modes: tuple[Recompute, ...] = MODES
    runs: list[Run] = field(default_factory=list)
    entries: dict[tuple[int, ...], Entry] = field(default_factory=dict)
    excess_bytes: dict[object, float] = field(default_factory=dict)
    _number: dict[int, int] = field(default_factory=dict)
    _bases: list[_Base] = field(default_factory=list)
    _stacked: _Base | None = None

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Makes room for runs of the family."""
        new = list({run.key: run for run in runs if run.key not in self._number}.values())
        if not new:
            return
        for run in new:
            self._number[run.key] = len(self.runs)
            self.runs.append(run)
        self._bases = [
            base.followed(self._base(entry, new))
            for base, entry in zip(self._bases, self.entries.values(), strict=True)
        ]
        self._stacked = None

    @cached_property
    def _assembly(self) -> Assembly:
        return Assembly(self.model, self.runs[0])

    def add(self, solution: Solution) -> Entry:
        """Takes a solution in, unless it is there already."""
        choices = self._assembly.choices(solution)
        if choices not in self.entries:
            self.entries[choices] = Entry(Figures(self._assembly, choices), solution)
            self._bases.append(self._base(self.entries[choices], self.runs))
            self._stacked = None
        return self.entries[choices]

    def _base(self, entry: Entry, runs: Sequence[Run]) -> _Base:
        micro, step, states, kept, transient = entry.figures.unrecomputed(runs)
        fixed = [constant_bytes(self.model, run) + reserve(self.model) for run in runs]
        return _Base(micro, step, states + np.array(fixed)[:, None], kept, transient)

    @property
    def bases(self) -> _Base:
        """All solutions': ``[solution, run, zero]``."""
        if self._stacked is None:
            self._stacked = _Base(
                np.stack([each.microbatch_seconds for each in self._bases]),
                np.stack([each.step_seconds for each in self._bases]),
                np.stack([each.fixed_bytes for each in self._bases]),
                np.stack([each.kept_bytes for each in self._bases]),
                np.stack([each.transient_bytes for each in self._bases]),
            )
        return self._stacked

    def cheapest(
        self, run: Run, num_microbatches: int, in_flight: int, limit_bytes: float
    ) -> Found | None:
        """The best way for one of ``runs``, None where nothing fits."""
        if not self.entries:
            return None
        base = Setting(num_microbatches, in_flight=in_flight)
        own = self.bases.of_run(self._number[run.key])
        zeros = list(self.zeros)
        seconds = (own.microbatch_seconds + own.step_seconds / num_microbatches)[:, zeros]
        kept = own.kept_bytes[:, None] * in_flight
        over = (own.fixed_bytes + kept + own.transient_bytes)[:, zeros] - limit_bytes
        fits = (over <= 0) & (self.recompute in (None, "none"))
        fitting = np.where(fits, seconds, np.inf)
        least = float(fitting.min())
        best = None
        if np.isfinite(least):
            at, place = divmod(int((fitting <= least * SAME).argmax()), len(zeros))
            setting = replace(base, zero=zeros[place])
            best = Found(self._listed[at], setting, least)
        lower = self._lower_bounds(seconds, over, kept, in_flight)
        wanted = np.flatnonzero(~fits & (lower * SAME < least))
        if len(wanted):
            order = wanted[np.argsort(lower.ravel()[wanted], kind="stable")]
            best = self._climbed(run, order, (seconds, lower, over), base, best)
        if best is None:
            self._note_excess(run, base, float((over - self._rates[:, 1:] * kept).min()))
        return best

    @property
    def _listed(self) -> list[Entry]:
        return list(self.entries.values())

    @property
    def _rates(self) -> Floats:
        """Per solution: seconds per byte that recomputing saves at best, and the share of what
        is kept that it can save."""
        both = tuple(mode for mode in ("full", "selective") if mode in self.modes)
        modes: tuple[Recompute, ...] = both if self.recompute is None else (self.recompute,)
        return np.array([entry.figures.seconds_per_byte(modes) for entry in self._listed])

    def _lower_bounds(self, seconds: Floats, over: Floats, kept: Floats, in_flight: int) -> Floats:
        """What recomputing until it fits costs at least, infinite where it cannot fit."""
        rate, share = self._rates[:, :1], self._rates[:, 1:]
        needed = np.maximum(over, 0.0)
        return np.where(needed <= share * kept, seconds + needed / in_flight * rate, np.inf)

    def _climbed(
        self,
        run: Run,
        order: Ints,
        figures: tuple[Floats, Floats, Floats],
        base: Setting,
        best: Found | None,
    ) -> Found | None:
        """The best rung of the solutions that do not fit as they are, the likeliest first.

        ``figures``: by solution and ZeRO stage the seconds with nothing recomputed, a lower
        bound of those with enough recomputed, the bytes over the limit.
        """
        seconds, lower, over_limit = figures
        for column in order:
            at, place = divmod(int(column), len(self.zeros))
            if best is not None and lower[at, place] * SAME >= best.objective:
                break
            zero, entry = self.zeros[place], self._listed[at]
            ladder = entry.figures.ladder(run)
            transient = ladder.transient_bytes[zero]
            over = ladder.kept_bytes * base.in_flight + (transient - transient[0])
            over += over_limit[at, place]
            over[~self._allowed(run, ladder)] = np.inf
            again = np.where(over <= 0, ladder.again_seconds, np.inf)
            rung = int(again.argmin())
            if not np.isfinite(again[rung]):
                self._note_excess(run, base, float(over.min()))
                continue
            objective = float(seconds[at, place] + again[rung])
            if best is None or objective * SAME < best.objective:
                setting = replace(base, zero=zero, rung=ladder.rungs[rung])
                best = Found(entry, setting, objective)
        return best

    def _allowed(self, run: Run, ladder: Ladder) -> NDArray[np.bool_]:
        """Which rungs the forced recomputation, or the allowed modes leave."""
        if self.recompute is None:
            return ladder.rungs.within(self.modes)
        rung = forced(self.recompute, run.class_counts[0])
        same = (ladder.rungs.full == rung.full) & (ladder.rungs.selective == rung.selective)
        found: NDArray[np.bool_] = same.all(axis=1)
        return found

    def _note_excess(self, run: Run, base: Setting, excess: float) -> None:
        key = (run.key, base.num_microbatches, base.in_flight)
        self.excess_bytes[key] = min(excess, self.excess_bytes.get(key, excess))
