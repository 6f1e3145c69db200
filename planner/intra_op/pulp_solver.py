"""Solvers of PuLP: programs as PuLP problems, solved by any solver that PuLP supports.

In: a program as arrays, the name of a solver. Out: a ``pulp.LpProblem``, or the solver's result.
PuLP is imported on use. Source: Mitchell, O'Sullivan and Dunning, "PuLP: a linear programming
toolkit for Python", 2011.

PuLP reports no lower bound, and command-line solvers write solutions with eight digits. So
solutions are checked against the rows, and the bound is derived from the requested gap.

``named_program`` is a stage's program for readers: costs in microseconds, readable names.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from ..errors import MachineError, UsageError
from ..graph.layout import Layout, NodeLayout
from ..integer_programs.ilp import Problem, build, scaled
from ..integer_programs.program import (
    HIGHS,
    INTEGRALITY,
    Floats,
    Group,
    Program,
    Raw,
    SolveOptions,
    Solver,
    Status,
    relax_then_branch,
)
from ..requests.goal import Budget
from ..stage.decisions import Decision

DIGITS = 1e-6
"""Maximum violation of a row's bounds, relative to the sum of the absolute values of its terms."""

ROUNDING = 1e-7
"""Maximum relative error of a solution that is written with eight digits."""

UNTOLD_GAP = 1e-4
"""Assumed relative gap of solvers without an option for it: no known default is larger."""

CBC = ("COIN_CMD", "PULP_CBC_CMD")
"""PuLP's names of CBC: an installed CBC, and the CBC bundled with PuLP."""


def find_solver(name: str) -> Solver:
    """Return the solver that ``--solver`` names: HiGHS, or an installed solver of PuLP.

    Raises UsageError AP331 if PuLP does not know the name, MachineError AP402 if the solver
    is not installed.
    """
    if name.lower() == HIGHS.name:
        return HIGHS
    pulp = import_pulp()
    with _quiet():
        known = pulp.listSolvers()
        available = pulp.listSolvers(onlyAvailable=True)
    wanted = [each for each in known if name.lower() in (each.lower(), short_name(each))]
    if not wanted:
        raise UsageError(
            "AP331",
            f"there is no solver {name}",
            where=f"--solver {name}",
            fix=f"one of {', '.join(dict.fromkeys(['highs', *map(short_name, known)]))}",
        )
    installed = [each for each in wanted if each in available]
    if not installed:
        others = dict.fromkeys(["highs", *map(short_name, available)])
        raise MachineError(
            "AP402",
            f"the solver {name} is not installed",
            why=f"PuLP does not find {' or '.join(wanted)}",
            where=f"--solver {name}",
            fix=f"install it, or use one that is installed here: {', '.join(others)}",
        )
    return PulpSolver(name.lower(), min(installed, key=_preference))


def short_name(pulp_name: str) -> str:
    """Return the name by which ``--solver`` selects a solver of PuLP, the same for all of PuLP's
    interfaces to it.

    >>> [short_name(each) for each in ("PULP_CBC_CMD", "COIN_CMD", "GUROBI", "SCIP_PY")]
    ['cbc', 'cbc', 'gurobi', 'scip']
    """
    if pulp_name in CBC:
        return "cbc"
    return re.sub("_(cmd|py|dll)$", "", pulp_name.lower())


def _preference(pulp_name: str) -> tuple[bool, int]:
    """Return a sort key of PuLP's interfaces to a solver: Python before command line, an installed
    CBC before PuLP's own."""
    return pulp_name.endswith("_CMD"), CBC.index(pulp_name) if pulp_name in CBC else 0


def import_pulp() -> Any:
    """Import the module ``pulp`` on first use, as this takes a while."""
    import pulp

    return pulp


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PuLP's deprecation warnings in a ``with`` block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def pulp_problem(
    program: Program, name: str = "stage", names: Sequence[str] = (), *, integral: bool = True
) -> Any:
    """Convert a program to a ``pulp.LpProblem``. ``names``: of columns, by default x0, x1, ….
    ``integral``: False relaxes binary columns to numbers between 0 and 1.

    Raises MachineError AP402 if PuLP is not installed.
    """
    return _pulp_problem(program, name, names, integral=integral)[0]


def _pulp_problem(
    program: Program, name: str, names: Sequence[str], *, integral: bool
) -> tuple[Any, list[Any]]:
    """Return a program as a ``pulp.LpProblem`` with its variables, one per column."""
    pulp = import_pulp()
    names = names or [f"x{number}" for number in range(program.num_columns)]
    problem = pulp.LpProblem(name, pulp.LpMinimize)
    with _quiet():
        variables = [
            problem.add_variable(each, 0, upper if np.isfinite(upper) else None)
            for each, upper in zip(names, program.upper_bounds.tolist(), strict=True)
        ]
    if integral:
        _make_integral(variables, program)
    costs = np.concatenate(program.costs).tolist()
    terms = [(each, cost) for each, cost in zip(variables, costs, strict=True) if cost]
    problem.setObjective(pulp.LpAffineExpression(terms))
    for (columns, values), lower, upper in zip(
        program.rows, program.lower, program.upper, strict=True
    ):
        pairs = zip(columns.tolist(), values.tolist(), strict=True)
        expression = pulp.LpAffineExpression([(variables[at], value) for at, value in pairs])
        if lower == upper:
            problem.addConstraint(expression == lower)
        else:
            if np.isfinite(lower):
                problem.addConstraint(expression >= lower)
            if np.isfinite(upper):
                problem.addConstraint(expression <= upper)
    return problem, variables


def _make_integral(variables: Sequence[Any], program: Program) -> None:
    for each in variables[: program.num_binaries]:
        each.cat = "Integer"


@dataclass(frozen=True, slots=True)
class PulpSolver:
    """A solver of PuLP, with its name in ``--solver`` and its name in PuLP."""

    name: str
    pulp_name: str

    def solve(self, program: Program, options: SolveOptions) -> Raw:
        loaded = _Loaded(program, self.pulp_name, options)
        return relax_then_branch(program, loaded, options.cutoff)


class _Loaded:
    """A program converted to a PuLP problem, with its solver, options and deadline."""

    def __init__(self, program: Program, pulp_name: str, options: SolveOptions) -> None:
        self.budget = Budget.of(options.time_limit_seconds)
        self.program, self.pulp_name, self.options = program, pulp_name, options
        self.pulp = import_pulp()
        self.problem, self.variables = _pulp_problem(program, "stage", (), integral=False)

    def run(self, *, integral: bool) -> Raw:
        if integral:
            _make_integral(self.variables, self.program)
            self._start()
        solver, gap = self._solver(has_start=integral and self.options.start is not None)
        try:
            self.problem.solve(solver)
        except Exception as error:  # noqa: BLE001 - solvers have exceptions of their own
            return Raw("error", np.zeros(0), -np.inf, detail=f"{type(error).__name__}: {error}")
        values = np.array([each.value() or 0.0 for each in self.variables])
        is_solution = _solves(self.program, values, integral=integral)
        status = self._status(is_solution)
        if not is_solution:
            detail = "its solution breaks a constraint" if status == "error" else ""
            return Raw(status, np.zeros(0), -np.inf, detail=detail)
        objective = float(np.concatenate(self.program.costs) @ values)
        left_open = (gap if integral else 0.0) + ROUNDING
        bound = objective - left_open * abs(objective) if status == "optimal" else -np.inf
        return Raw(status, values, bound)

    def _start(self) -> None:
        """Set the variables' initial values to the known solution, if there is one."""
        for each in self.variables:
            each.varValue = None
        if self.options.start is not None:
            known = self.variables[: len(self.options.start)]
            for each, value in zip(known, self.options.start.tolist(), strict=True):
                each.setInitialValue(value)

    def _solver(self, *, has_start: bool) -> tuple[Any, float]:
        """Return PuLP's solver object with the options that it supports, and its relative gap."""
        gap = max(self.options.gap, 1e-9)
        left = self.budget.left_seconds
        wanted = {
            "msg": False,
            "timeLimit": max(1, ceil(left)),  # some solvers take whole seconds only
            "gapRel": gap,
            "threads": 1,
            "warmStart": has_start,
        }
        with _quiet():
            known = inspect.signature(type(self.pulp.getSolver(self.pulp_name, msg=False)))
            given = {name: own for name, own in wanted.items() if name in known.parameters}
            solver = self.pulp.getSolver(self.pulp_name, **given)
        return solver, gap if "gapRel" in given else UNTOLD_GAP

    def _status(self, is_solution: bool) -> Status:
        """Convert PuLP's two statuses to one. ``is_solution``: whether the values were checked."""
        pulp = self.pulp
        match self.problem.status, self.problem.sol_status:
            case (pulp.LpStatusOptimal, pulp.LpSolutionOptimal):
                return "optimal" if is_solution else "error"
            case (pulp.LpStatusOptimal | pulp.LpStatusNotSolved, _):
                return "feasible" if is_solution else "time_limit"
            case (pulp.LpStatusInfeasible, _):
                return "infeasible"
            case (pulp.LpStatusUnbounded, _):
                return "unbounded"
            case _:
                return "error"


def _solves(program: Program, values: Floats, *, integral: bool) -> bool:
    """Return whether ``values`` satisfy all rows, bounds and, if asked, integrality."""
    if values.min(initial=0.0) < -DIGITS:
        return False
    binaries = values[: program.num_binaries]
    if integral and np.abs(binaries - np.round(binaries)).max(initial=0.0) > INTEGRALITY:
        return False
    rows = zip(program.rows, program.lower, program.upper, strict=True)
    for (columns, factors), lower, upper in rows:
        parts = factors * values[columns]
        total, room = float(parts.sum()), DIGITS * max(1.0, float(np.abs(parts).sum()))
        if not lower - room <= total <= upper + room:
            return False
    return True


MICROSECONDS = 1e6
"""Microseconds per second. Costs in microseconds are well above the tolerances of solvers."""

LONGEST = 100
"""Maximum length of a name that PuLP writes."""


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """A linear program with column names, and the layout decisions that binary columns make."""

    title: str
    program: Program
    names: tuple[str, ...]
    decisions: tuple[Decision, ...]

    def as_pulp(self) -> Any:
        """Build a ``pulp.LpProblem``. Raises MachineError AP402 if PuLP is not installed."""
        return pulp_problem(self.program, self.title, self.names)

    def cost(self, values: Floats) -> float:
        """Return the objective in microseconds if the columns have ``values``."""
        return float(np.concatenate(self.program.costs) @ values)


def named_program(title: str, problem: Problem, decisions: Sequence[Decision]) -> NamedProgram:
    """Convert a problem in seconds to a program in microseconds with named columns."""
    program = build(scaled(problem, MICROSECONDS), can_exceed=False)
    if problem.constant:
        fixed = program.columns(np.array([problem.constant * MICROSECONDS]), "constant")
        program.row(fixed, np.ones(1), 1.0, 1.0)
    names: list[str] = []
    for number, group in enumerate(program.groups):
        names += _names(group, number, decisions)
    return NamedProgram(title, program, tuple(map(_short, names, range(len(names)))), (*decisions,))


def _names(group: Group, number: int, decisions: Sequence[Decision]) -> list[str]:
    """Return the names of a group of the program's columns. ``number``: index of the group."""
    if group.kind == "choice":
        (own,) = (decisions[each] for each in group.decisions)
        return [
            f"{legal(own.name)}__{index}__{strategy_text(choice.layouts[own.name])}"
            for index, choice in enumerate(own.choices)
        ]
    of = "__".join(legal(decisions[each].name) for each in dict.fromkeys(group.decisions))
    whole = "__".join(part for part in (f"{group.kind}_{number}", of) if part)
    if len(group.columns) == 1:
        return [whole]
    return [f"{whole}__{index}" for index in range(len(group.columns))]


def strategy_text(layout: NodeLayout) -> str:
    """Return the input and output layouts of an op as a name that LP and MPS files allow.

    >>> from ..graph.layout import PARTIAL, shard
    >>> strategy_text(NodeLayout(((shard(1),), (shard(0),)), ((PARTIAL,),)))
    'S1_S0_to_P'
    """
    inputs, outputs = ("_".join(map(_layout_text, own)) for own in (layout.inputs, layout.outputs))
    return f"{inputs}_to_{outputs}" if inputs else outputs


def _layout_text(layout: Layout) -> str:
    return legal(".".join(str(each).replace("(", "").replace(")", "") for each in layout))


def legal(name: str) -> str:
    """Replace the characters of a name that LP and MPS files do not allow.

    >>> legal("layers/0 up-proj")
    'layers_0_up_proj'
    """
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)


def _short(name: str, number: int) -> str:
    """Shorten a name to ``LONGEST`` characters; the column's number keeps it unique."""
    if len(name) <= LONGEST:
        return name
    end = f"__column{number}"
    return name[: LONGEST - len(end)] + end
