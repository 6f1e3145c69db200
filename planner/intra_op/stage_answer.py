"""What the solver of a stage answers."""

from __future__ import annotations

from dataclasses import dataclass

from ..pricing.assembly import Setting, Solution
from ..pricing.stage_cost import StageCost, StageTable
from ..pricing.structure import Run


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """A stage's best way: its choices (by kind), setting, objective, and the solver's gap."""

    run: Run
    table: StageTable
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
        return self.table.price(self.run, self.setting)


def gap_between(bound: float, objective: float) -> float:
    """By what part of it an objective may be more than the least; 0 where it is nothing.

    >>> gap_between(3.0, 4.0), gap_between(5.0, 4.0), gap_between(0.0, 0.0)
    (0.25, 0.0, 0.0)
    """
    return max(0.0, 1 - bound / objective) if objective > 0 else 0.0
