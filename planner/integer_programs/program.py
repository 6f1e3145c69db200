"""Linear and mixed-integer programs as arrays, and the interface of their solvers.

In: columns with costs, the first of which are binary, and rows with bounds. Out: a value per column
and the proven bound. The relaxation is solved first, the integer program only if it is fractional.
The solvers are ``Highs`` and ``pulp_solver``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import highspy
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Status = Literal[
    "optimal", "feasible", "cutoff", "time_limit", "infeasible", "unbounded", "interrupted", "error"
]
"""Outcome of a solver. ``feasible``: a solution, but the time limit passed; ``time_limit``: no
solution in time. ``cutoff``: no solution can be below the cutoff."""

INTEGRALITY = 1e-6
"""Maximum distance of a binary from 0 or 1 at which it still counts as integral."""


@dataclass(frozen=True, slots=True)
class Group:
    """Columns added in one call: their kind, the decisions they stand for, their numbers."""

    kind: str
    decisions: tuple[int, ...]
    columns: Ints


@dataclass(slots=True)
class Program:
    """A linear program under construction: columns and rows, appended as arrays."""

    costs: list[Floats] = field(default_factory=list)
    rows: list[tuple[Ints, Floats]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    num_columns: int = 0
    num_binaries: int = 0

    def columns(self, costs: Floats, kind: str = "", decisions: tuple[int, ...] = ()) -> Ints:
        """Add columns with ``costs``; return their numbers."""
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
        """Return the upper bound of each column; every lower bound is 0."""
        found = np.full(self.num_columns, np.inf)
        found[: self.num_binaries] = 1.0
        return found


@dataclass(frozen=True, slots=True)
class Raw:
    """Result of a solver: a value for each column (empty without a solution), and the proven bound.

    ``detail`` is the solver's error text if it failed.
    """

    status: Status
    values: Floats
    bound: float
    lp_integral: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """Options of a solve.

    The integer program is solved up to a relative ``gap``, and not at all if the relaxation is not
    below ``cutoff``. ``start`` has the first columns' values in a known solution.
    """

    time_limit_seconds: float = 60.0
    seed: int = 0
    gap: float = 0.0
    cutoff: float = np.inf
    start: Floats | None = None


class Solver(Protocol):
    """Interface of solvers. ``name`` is the value of ``--solver`` that selects it."""

    @property
    def name(self) -> str: ...

    def solve(self, program: Program, options: SolveOptions) -> Raw: ...


class LoadedProgram(Protocol):
    """Interface of a program loaded into a solver, which runs it as a linear or integer program."""

    def run(self, *, integral: bool) -> Raw: ...


def relax_then_branch(program: Program, loaded: LoadedProgram, cutoff: float) -> Raw:
    """Solve the linear program, and the integer program only if the relaxation is fractional."""
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


@dataclass(frozen=True, slots=True)
class Highs:
    """The default solver, HiGHS."""

    name: str = "highs"

    def solve(self, program: Program, options: SolveOptions) -> Raw:
        return relax_then_branch(program, _Loaded(program, options), options.cutoff)


HIGHS = Highs()


class _SilentHighs(highspy.Highs):
    """HiGHS without output to stdout, which is reserved for the results of commands.

    Its constructor enables callbacks, which since version 1.16 writes a banner unless the option is
    set before.
    """

    def enableCallbacks(self) -> None:  # noqa: N802 - HiGHS's name
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class _Loaded:
    """A program loaded into HiGHS; its second run starts from the relaxation's basis."""

    def __init__(self, program: Program, options: SolveOptions) -> None:
        self.program = program
        self.highs: Any = _SilentHighs()  # type: ignore[no-untyped-call]
        for name, value in {
            "threads": 1,
            "random_seed": options.seed,
            "time_limit": max(0.05, options.time_limit_seconds),
            "mip_rel_gap": max(options.gap, 1e-9),
            "mip_abs_gap": 1e-12,
        }.items():
            self.highs.setOptionValue(name, value)
        self.highs.passModel(_highs_model(program))

    def run(self, *, integral: bool) -> Raw:
        if integral:
            number = self.program.num_binaries
            kinds = np.full(number, highspy.HighsVarType.kInteger)
            self.highs.changeColsIntegrality(number, np.arange(number, dtype=np.int32), kinds)
        self.highs.run()
        info = self.highs.getInfo()
        has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(self.highs.getSolution().col_value) if has_solution else np.zeros(0)
        bound = info.mip_dual_bound if integral else info.objective_function_value
        status = _status(self.highs.getModelStatus(), has_solution)
        return Raw(status, values, bound, detail=self._detail(status))

    def _detail(self, status: Status) -> str:
        if status != "error":
            return ""
        return str(self.highs.modelStatusToString(self.highs.getModelStatus()))


def _status(found: Any, has_solution: bool) -> Status:
    model = highspy.HighsModelStatus
    if found in (model.kOptimal, model.kModelEmpty):
        return "optimal"
    if found in (model.kTimeLimit, model.kIterationLimit, model.kSolutionLimit):
        return "feasible" if has_solution else "time_limit"
    if found in (model.kInfeasible, model.kUnboundedOrInfeasible):
        return "infeasible"
    if found == model.kUnbounded:
        return "unbounded"
    if found == model.kInterrupt:
        return "interrupted"
    return "error"


def _highs_model(program: Program) -> Any:
    lengths = np.array([len(columns) for columns, _ in program.rows], dtype=np.int64)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.num_columns, len(program.rows)
    model.col_cost_ = np.concatenate(program.costs)
    model.col_lower_ = np.zeros(program.num_columns)
    model.col_upper_ = program.upper_bounds
    model.row_lower_ = np.array(program.lower)
    model.row_upper_ = np.array(program.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate([columns for columns, _ in program.rows]).astype(
        np.int32
    )
    model.a_matrix_.value_ = np.concatenate([values for _, values in program.rows])
    return model


def classes_of(keys: Sequence[object]) -> tuple[Ints, Ints]:
    """Number the distinct keys in order of first occurrence; return each key's number, and for each
    number the position of its first key.

    >>> [found.tolist() for found in classes_of("abca")]
    [[0, 1, 2, 0], [0, 1, 2]]
    """
    numbers: dict[object, int] = {}
    firsts: list[int] = []
    for index, key in enumerate(keys):
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(index)
    return np.array([numbers[key] for key in keys]), np.array(firsts)
