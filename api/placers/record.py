"""Record of a placer: all priced pipelines, the best of them, and the learning curve.

In: pipelines. Out: their prices, counted. A pipeline priced again counts again, but is not
simulated again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autoparallel.placers.space import Space
from autoparallel.planner.inter_op.inter_op import Pipeline, StageChoice

FEWEST = 20
"""Minimum number of pipelines that are priced, even after the deadline."""

Observe = Callable[[str, float, float], None]
"""Callback for progress that takes the phase's name, the amount done, and the total."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Point of the learning curve, after ``num_evaluations`` pipelines: best and mean step seconds.

    ``mean_seconds`` is the mean over the pipelines priced since the previous point.
    """

    num_evaluations: int
    best_seconds: float
    mean_seconds: float


@dataclass
class Record:
    """Record of a search space's priced pipelines: up to ``limit``, until ``deadline_seconds``."""

    space: Space
    limit: int
    deadline_seconds: float
    observe: Observe | None = None
    num_evaluations: int = 0
    unit_seconds: float | None = None
    best: dict[int, Pipeline] = field(default_factory=dict)
    curve: list[Progress] = field(default_factory=list)
    known: dict[tuple[StageChoice, ...], float] = field(default_factory=dict)
    _since: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of pipelines that may still be priced; 0 once all pipelines are priced."""
        if len(self.known) >= self.space.num_pipelines:
            return 0
        is_late = time.perf_counter() >= self.deadline_seconds
        if is_late and self.num_evaluations >= FEWEST:
            return 0
        return self.limit - self.num_evaluations

    @property
    def best_seconds(self) -> float:
        return min((pipeline.seconds for pipeline in self.best.values()), default=math.inf)

    def price(self, stages: tuple[StageChoice, ...]) -> float:
        """Return the seconds of a step with these stages, and record them."""
        if stages not in self.known:
            self.known[stages] = self.space.seconds(stages)
        seconds = self.known[stages]
        self.num_evaluations += 1
        self._since.append(seconds)
        known = self.best.get(len(stages))
        if seconds < math.inf and (known is None or seconds < known.seconds):
            self.best[len(stages)] = Pipeline(stages, seconds)
        return seconds

    def reward(self, stages: tuple[StageChoice, ...]) -> float:
        """Return −log(T / T₁) of the step time T; T₁ is the first finite T, infinite T is 10·T₁.

        The logarithm keeps differences between fast pipelines visible beside slow pipelines.
        """
        seconds = self.price(stages)
        if not math.isfinite(seconds):
            return -math.log(10.0)
        if self.unit_seconds is None:
            self.unit_seconds = seconds
        return -math.log(seconds / self.unit_seconds)

    def mark(self) -> None:
        """Add a point to the learning curve, for the pipelines priced since the last point."""
        if not self._since:
            return
        mean = sum(self._since) / len(self._since)
        self.curve.append(Progress(self.num_evaluations, self.best_seconds, mean))
        self._since.clear()
        if self.observe is not None:
            self.observe("learning a placement", self.num_evaluations, self.limit)
