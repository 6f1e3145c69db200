"""Programs solved by HiGHS through its own interface, without a modelling layer.

Source: Huangfu and Hall, "Parallelizing the dual revised simplex method", Mathematical
Programming Computation 10, 2018 (HiGHS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from .program import Program, Raw, SolveOptions, Status, relax_then_branch


@dataclass(frozen=True, slots=True)
class Highs:
    """The solver that is used unless another one is asked for."""

    name: str = "highs"

    def solve(self, program: Program, options: SolveOptions) -> Raw:
        return relax_then_branch(program, _Loaded(program, options), options.cutoff)


HIGHS = Highs()


class _Loaded:
    """A program in HiGHS, which goes on from the relaxation's basis."""

    def __init__(self, program: Program, options: SolveOptions) -> None:
        self.program = program
        self.highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in {
            "output_flag": False,
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
