"""Linear and mixed-integer programs as arrays, and what every solver of them must do.

In: columns with costs, rows with bounds, of which the first columns are binary. Out: a value
per column and the proven bound. The relaxation is solved first; the integers only where it
is fractional. ``highs`` and ``pulp_solver`` are the solvers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Status = Literal[
    "optimal", "feasible", "cutoff", "time_limit", "infeasible", "unbounded", "interrupted", "error"
]
"""What a solver ends with. ``feasible``: the time limit passed, with a solution; ``time_limit``:
without one. ``cutoff``: no solution can be below the cutoff."""

INTEGRALITY = 1e-6
"""How far from 0 and 1 a binary may be and still count as integral."""


@dataclass(frozen=True, slots=True)
class Group:
    """Columns that were added together: what they are, and of which decisions."""

    kind: str
    decisions: tuple[int, ...]
    columns: Ints


@dataclass(slots=True)
class Program:
    """A linear program in the making: columns and rows, appended as arrays."""

    costs: list[Floats] = field(default_factory=list)
    rows: list[tuple[Ints, Floats]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    num_columns: int = 0
    num_binaries: int = 0

    def columns(self, costs: Floats, kind: str = "", decisions: tuple[int, ...] = ()) -> Ints:
        """New columns with these costs; their numbers."""
        start = self.num_columns
        self.costs.append(np.asarray(costs, dtype=np.float64).ravel())
        self.num_columns += self.costs[-1].size
        found = np.arange(start, self.num_columns)
        self.groups.append(Group(kind, decisions, found))
        return found

    def row(self, columns: Ints, values: Floats, lower: float, upper: float) -> None:
        self.rows.append((columns, values))
        self.lower.append(lower)
        self.upper.append(upper)

    @property
    def upper_bounds(self) -> Floats:
        """The upper bound of each column; every lower bound is 0."""
        found = np.full(self.num_columns, np.inf)
        found[: self.num_binaries] = 1.0
        return found


@dataclass(frozen=True, slots=True)
class Raw:
    """What a solver said: a value per column (none without a solution), and the proven bound.

    ``detail`` is the solver's own text, where it failed.
    """

    status: Status
    values: Floats
    bound: float
    lp_integral: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How far a program is solved.

    Integers are solved up to a relative ``gap``, and not at all if the relaxation is not
    below ``cutoff``: nothing of interest can be. ``start`` is a value for each of the first
    columns, of a solution that is known.
    """

    time_limit_seconds: float = 60.0
    seed: int = 0
    gap: float = 0.0
    cutoff: float = np.inf
    start: Floats | None = None


class Solver(Protocol):
    """Solves programs. ``name`` is what ``--solver`` calls it."""

    @property
    def name(self) -> str: ...

    def solve(self, program: Program, options: SolveOptions) -> Raw: ...


class LoadedProgram(Protocol):
    """A program in a solver, which is run with or without its integers."""

    def run(self, *, integral: bool) -> Raw: ...


def relax_then_branch(program: Program, loaded: LoadedProgram, cutoff: float) -> Raw:
    """The linear program's answer; with integers only where the relaxation is fractional."""
    relaxed = loaded.run(integral=False)
    if relaxed.status != "optimal":
        status: Status = "time_limit" if relaxed.status == "feasible" else relaxed.status
        return Raw(status, np.zeros(0), -np.inf, detail=relaxed.detail)
    binaries = relaxed.values[: program.num_binaries]
    if np.abs(binaries - np.round(binaries)).max(initial=0.0) <= INTEGRALITY:
        return Raw("optimal", relaxed.values, relaxed.bound, True)
    if relaxed.bound >= cutoff:
        return Raw("cutoff", relaxed.values, relaxed.bound)
    found = loaded.run(integral=True)
    return Raw(found.status, found.values, max(relaxed.bound, found.bound), detail=found.detail)
