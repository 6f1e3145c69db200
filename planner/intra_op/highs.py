"""Linear and mixed-integer programs as arrays, solved by HiGHS.

In: columns with costs, rows with bounds, of which the first columns are binary. Out: a value
per column and the proven bound. The relaxation is solved first; the integers only where it
is fractional. Source: Huangfu and Hall, "Parallelizing the dual revised simplex method",
Mathematical Programming Computation 10, 2018 (HiGHS).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import highspy
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Status = Literal["optimal", "time_limit", "infeasible", "cutoff"]

INTEGRALITY = 1e-6
"""How far from 0 and 1 a binary may be and still count as integral."""


@dataclass(slots=True)
class Program:
    """A linear program in the making: columns and rows, appended as arrays."""

    costs: list[Floats] = field(default_factory=list)
    rows: list[tuple[Ints, Floats]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    num_columns: int = 0
    num_binaries: int = 0

    def columns(self, costs: Floats) -> Ints:
        """New columns with these costs; their numbers."""
        start = self.num_columns
        self.costs.append(np.asarray(costs, dtype=np.float64).ravel())
        self.num_columns += self.costs[-1].size
        return np.arange(start, self.num_columns)

    def row(self, columns: Ints, values: Floats, lower: float, upper: float) -> None:
        self.rows.append((columns, values))
        self.lower.append(lower)
        self.upper.append(upper)


@dataclass(frozen=True, slots=True)
class Raw:
    """What HiGHS said: a value per column, and the proven bound."""

    status: Status
    values: Floats
    bound: float
    lp_integral: bool


def solve(
    program: Program,
    *,
    time_limit_seconds: float = 60.0,
    seed: int = 0,
    gap: float = 0.0,
    cutoff: float = np.inf,
) -> Raw:
    """The linear program's answer; with integers only where the relaxation is fractional.

    Integers are solved up to a relative ``gap``, and not at all if the relaxation is not
    below ``cutoff``: nothing of interest can be.
    """
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", seed)
    highs.setOptionValue("time_limit", max(0.05, time_limit_seconds))
    highs.passModel(_highs_model(program))
    highs.run()
    status = _status(highs)
    if status != "optimal":
        return Raw(status, np.zeros(program.num_columns), -np.inf, False)
    values = np.array(highs.getSolution().col_value)
    bound = highs.getInfo().objective_function_value
    binaries = values[: program.num_binaries]
    if np.abs(binaries - np.round(binaries)).max(initial=0.0) <= INTEGRALITY:
        return Raw("optimal", values, bound, True)
    if bound >= cutoff:
        return Raw("cutoff", values, bound, False)
    columns = np.arange(program.num_binaries, dtype=np.int32)
    kinds = np.full(program.num_binaries, highspy.HighsVarType.kInteger)
    highs.changeColsIntegrality(program.num_binaries, columns, kinds)
    highs.setOptionValue("mip_rel_gap", max(gap, 1e-9))
    highs.setOptionValue("mip_abs_gap", 1e-12)
    highs.run()
    status = _status(highs)
    info = highs.getInfo()
    has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(highs.getSolution().col_value) if has_solution else np.zeros(0)
    return Raw(status, values, max(bound, info.mip_dual_bound), False)


def _status(highs: Any) -> Status:
    model = highspy.HighsModelStatus
    found = highs.getModelStatus()
    if found == model.kOptimal or found == model.kModelEmpty:
        return "optimal"
    if found in (model.kTimeLimit, model.kIterationLimit, model.kInterrupt):
        return "time_limit"
    if found in (model.kInfeasible, model.kUnboundedOrInfeasible):
        return "infeasible"
    raise AssertionError(f"HiGHS ended with {highs.modelStatusToString(found)}")


def _highs_model(program: Program) -> Any:
    lengths = np.array([len(columns) for columns, _ in program.rows], dtype=np.int64)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.num_columns, len(program.rows)
    model.col_cost_ = np.concatenate(program.costs)
    model.col_lower_ = np.zeros(program.num_columns)
    upper = np.full(program.num_columns, np.inf)
    upper[: program.num_binaries] = 1.0
    model.col_upper_ = upper
    model.row_lower_ = np.array(program.lower)
    model.row_upper_ = np.array(program.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate([columns for columns, _ in program.rows]).astype(
        np.int32
    )
    model.a_matrix_.value_ = np.concatenate([values for _, values in program.rows])
    return model
