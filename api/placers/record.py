"""What a placer has seen: every pipeline priced, the best of them, and how it learned.

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
"""So many pipelines are priced however little time there is."""

Observe = Callable[[str, float, float], None]
"""(what is being done, how much is done, of how much)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A point of the learning curve, after ``num_evaluations`` pipelines were priced.

    ``mean_seconds`` is of the pipelines priced since the point before.
    """

    num_evaluations: int
    best_seconds: float
    mean_seconds: float


@dataclass
class Record:
    """Prices pipelines of a space until ``limit`` were priced, or until ``deadline``."""

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
        """How many more may be priced; none once every pipeline there is was."""
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
        """The seconds of a step under these stages."""
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
        """−log of the price over the first finite one; a step that cannot be run is ten times it.

        The logarithm keeps slow pipelines from drowning the differences between fast ones.
        """
        seconds = self.price(stages)
        if not math.isfinite(seconds):
            return -math.log(10.0)
        if self.unit_seconds is None:
            self.unit_seconds = seconds
        return -math.log(seconds / self.unit_seconds)

    def mark(self) -> None:
        """Adds a point to the learning curve."""
        if not self._since:
            return
        mean = sum(self._since) / len(self._since)
        self.curve.append(Progress(self.num_evaluations, self.best_seconds, mean))
        self._since.clear()
        if self.observe is not None:
            self.observe("learning a placement", self.num_evaluations, self.limit)
