"""The solutions found for a family of runs, and the cheapest that fits for each of its runs.

In: solutions (choices by kind), a run, micro-batches per step and in flight, a limit of bytes.
Out: the best of every solution, ZeRO stage and rung of the recompute ladder. With nothing
recomputed all solutions and stages are compared at once, as arrays (``side_by_side``); the
ladder is climbed only by those that do not fit and would otherwise be faster than what does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import Recompute
from ..pricing.assembly import Assembly, Setting, Solution, constant_bytes, reserve
from ..pricing.ladder import MODES, Ints, Ladder, forced
from ..pricing.stage_cost import Figures
from ..pricing.stage_model import StageModel
from ..pricing.structure import Run
from .elimination import Floats
from .side_by_side import SideBySide

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


@dataclass
class Pool:
    """Solutions of the family of ``run`` on one mesh."""

    model: StageModel
    run: Run
    zeros: tuple[int, ...]
    recompute: Recompute | None
    modes: tuple[Recompute, ...] = MODES
    entries: dict[tuple[int, ...], Entry] = field(default_factory=dict)
    excess_bytes: dict[object, float] = field(default_factory=dict)
    _figures: SideBySide = field(default_factory=SideBySide)
    _per_byte: list[tuple[float, float]] = field(default_factory=list)

    @cached_property
    def _assembly(self) -> Assembly:
        return Assembly(self.model, self.run)

    def add(self, solution: Solution) -> Entry:
        """Takes a solution in, unless it is there already."""
        choices = self._assembly.choices(solution)
        if choices not in self.entries:
            self.entries[choices] = Entry(Figures(self._assembly, choices), solution)
            self._figures.add(self.entries[choices].figures)
        return self.entries[choices]

    def cheapest(
        self, run: Run, num_microbatches: int, in_flight: int, limit_bytes: float
    ) -> Found | None:
        """The best way for a run of the family, None where nothing fits."""
        if not self.entries:
            return None
        base = Setting(num_microbatches, in_flight=in_flight)
        own = self._figures.unrecomputed(run)
        zeros = list(self.zeros)
        seconds = (own.microbatch_seconds + own.step_seconds / num_microbatches)[:, zeros]
        kept = own.kept_bytes[:, None] * in_flight
        fixed = constant_bytes(self.model, run) + reserve(self.model)
        over = (own.states_bytes + kept + own.transient_bytes)[:, zeros] + (fixed - limit_bytes)
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
        for entry in self._listed[len(self._per_byte) :]:
            self._per_byte.append(entry.figures.seconds_per_byte(modes))
        return np.array(self._per_byte)

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
