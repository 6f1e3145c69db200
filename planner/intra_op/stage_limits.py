"""What the solver of a stage must keep to, and the time that it may take and took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..integer_programs.highs import HIGHS
from ..integer_programs.program import Solver
from ..plan import Recompute
from ..requests.features import MODES


@dataclass(frozen=True, slots=True)
class Limits:
    """What every stage must keep to: bytes per device, allowed ZeRO, forced recomputation.

    ``gap``: a stage may be worse than the best by this part of its cost. ``solver`` solves the
    integer programs.
    """

    memory_bytes: float
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recompute: Recompute | None = None
    gap: float = 0.01
    modes: tuple[Recompute, ...] = MODES
    solver: Solver = HIGHS


STEPS_PER_PROBLEM = 20
"""Steps of the recurrence over stages take as long as solving a problem, about."""


@dataclass
class Effort:
    """Time for solving and what was spent.

    ``work`` is counted, not measured: shares of it are the same on any machine, however busy.
    """

    deadline: float
    num_problems: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    table_seconds: float = 0.0

    @property
    def work(self) -> float:
        """Problems that were solved, or what took as long: about a hundredth of a second each."""
        return self.num_problems + self.num_steps / STEPS_PER_PROBLEM

    @property
    def left_seconds(self) -> float:
        return self.deadline - time.perf_counter()
