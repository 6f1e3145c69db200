"""Time limit and time spent of planning; the only module of the planner that reads a clock.

Work is counted as well: shares of counted work are the same on any machine, however busy, so plans
do not depend on the machine unless the time limit ends the search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STEPS_PER_PROBLEM = 20
"""Steps of the inter-op dynamic program that take about as long as solving one stage."""

SOLVING = ("costs", "ilp")
"""Phases of the stage solvers; their time is not counted again in the phases that call them."""


@dataclass
class Budget:
    """Budget of a plan search: its deadline, the seconds spent in each phase, and the work done."""

    deadline: float
    began: float
    num_problems: int = 0
    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(limit_seconds: float) -> Budget:
        """Start a budget of ``limit_seconds`` now."""
        now = time.perf_counter()
        return Budget(now + limit_seconds, now)

    @property
    def work(self) -> float:
        """Work done so far, in problems of stage layouts solved (about 0.01 s each); steps of the
        dynamic program over stages are converted to such problems."""
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
        """Set the deadline to ``seconds`` from now."""
        self.deadline = time.perf_counter() + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a ``with`` block to ``phase``, except seconds that the block spends in
        the phases ``SOLVING``, which are recorded there."""
        began, solved = time.perf_counter(), self._solving_seconds
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            if phase not in SOLVING:
                spent -= self._solving_seconds - solved
            self.record_time(phase, spent)

    def record_time(self, phase: str, seconds: float) -> None:
        """Add ``seconds`` to the time of ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def _solving_seconds(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in SOLVING)
