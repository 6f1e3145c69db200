"""Time limit and time spent of planning: the only clock of the planner.

Work is counted beside it: shares of counted work are the same on any machine, however busy, so
plans do not depend on the machine unless the time limit ends the search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STEPS_PER_PROBLEM = 20
"""Steps of the recurrence over stages that take about as long as one solved problem."""

SOLVING = ("costs", "ilp")
"""Phases of the stage solvers, which run inside other phases."""


@dataclass
class Budget:
    """A deadline, seconds by phase, and counted work."""

    deadline: float
    began: float
    num_problems: int = 0
    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(limit_seconds: float) -> Budget:
        """Start a budget now."""
        now = time.perf_counter()
        return Budget(now + limit_seconds, now)

    @property
    def work(self) -> float:
        """The solved problems and their equivalents: each takes about a hundredth of a second."""
        return self.num_problems + self.num_steps / STEPS_PER_PROBLEM

    @property
    def left_seconds(self) -> float:
        """Return the seconds until the deadline, negative after it."""
        return self.deadline - time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Return the seconds since the budget began."""
        return time.perf_counter() - self.began

    def end_in(self, seconds: float) -> None:
        """Set the deadline."""
        self.deadline = time.perf_counter() + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Context manager: add the elapsed time to a phase, without nested time of solvers."""
        began, solved = time.perf_counter(), self._solving_seconds
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            if phase not in SOLVING:
                spent -= self._solving_seconds - solved
            self.record_time(phase, spent)

    def record_time(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def _solving_seconds(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in SOLVING)
