"""Solvers of integer programs: CBC, through PuLP, agrees with HiGHS, and both fail alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pulp
import pytest
from one_stage import plan
from random_suites import seeds
from small_graphs import cluster, mlp
from solver_programs import CASES, LARGE_CASES, Case, random_problem

from autoparallel.planner.errors import (
    AutoparallelError,
    InfeasibleError,
    MachineError,
    TimeLimitError,
    UsageError,
)
from autoparallel.planner.integer_programs.ilp import (
    Problem,
    build,
    check_solved,
    cost,
    memory_bytes,
    optimize,
)
from autoparallel.planner.integer_programs.program import (
    HIGHS,
    Program,
    Raw,
    SolveOptions,
    Solver,
    Status,
)
from autoparallel.planner.intra_op.families import Family
from autoparallel.planner.intra_op.pulp_solver import PulpSolver, find_solver
from autoparallel.planner.requests.request import Request

CBC = find_solver("cbc")
SOLVERS = pytest.mark.parametrize("solver", [HIGHS, CBC], ids=lambda solver: solver.name)

SAME = 1e-6
"""CBC writes eight digits."""


def assert_keeps_its_limit(problem: Problem, choices: tuple[int, ...]) -> None:
    if problem.memory is not None:
        assert memory_bytes(problem.memory, choices) <= problem.memory.limit * (1 + SAME)


@pytest.mark.parametrize(
    "case",
    [
        case
        if case.is_quick and case.name.endswith((" 0", " 1"))
        else pytest.param(case, marks=pytest.mark.slow)
        for case in (*CASES, *LARGE_CASES)
    ],
    ids=lambda case: case.name,
)
def test_cbc_and_highs_agree(case: Case) -> None:
    """The objective of either is found again from its choices, which keep the memory limit."""
    problem = case.made()
    answers = [optimize(problem, solver=solver) for solver in (HIGHS, CBC)]
    for answer in answers:
        assert answer.status == "optimal"
        assert answer.objective == pytest.approx(cost(problem, answer.choices), rel=1e-12)
        assert answer.bound <= answer.objective * (1 + 1e-9) + 1e-12
        assert_keeps_its_limit(problem, answer.choices)
    ours, theirs = (answer.objective for answer in answers)
    assert theirs == pytest.approx(ours, rel=SAME, abs=1e-9)


@pytest.mark.slow
def test_the_limit_binds_in_many_of_these_programs() -> None:
    """Else they would say nothing about memory: the fastest layouts are over the limit."""
    tight = [case for case in CASES if case.share is not None]
    binding = 0
    for case in tight:
        problem = case.made()
        assert problem.memory is not None
        free = optimize(Problem(problem.costs, problem.couplings, constant=problem.constant))
        binding += memory_bytes(problem.memory, free.choices) > problem.memory.limit
    assert len(CASES) >= 60
    assert binding >= 20


@pytest.mark.parametrize("seed", seeds(5))
def test_a_gap_is_kept_and_its_bound_holds(seed: int) -> None:
    problem = random_problem(random.Random(seed), with_memory=True)
    best = optimize(problem).objective
    answer = optimize(problem, solver=CBC, gap=0.2)
    assert answer.bound <= best * (1 + 1e-9)
    assert answer.objective <= best / (1 - 0.2) * (1 + SAME)


def test_nothing_below_the_cutoff_ends_the_solver() -> None:
    """The relaxation of this one is fractional, and at least what it is."""
    problem = fractional_problem()
    for solver in (HIGHS, CBC):
        answer = optimize(problem, solver=solver, cutoff=problem.costs[0].min() / 1e3)
        assert answer.status == "cutoff"


def fractional_problem() -> Problem:
    for seed in range(1, 60, 2):
        problem = random_problem(random.Random(seed), with_memory=True)
        if not optimize(problem).lp_integral:
            return problem
    raise AssertionError("none of them is fractional")


def test_a_known_solution_is_a_start() -> None:
    problem = fractional_problem()
    best = optimize(problem)
    again = optimize(problem, solver=CBC, start=best.choices)
    assert again.objective == pytest.approx(best.objective, rel=SAME)


def infeasible() -> Program:
    """A hard limit below what any choice needs."""
    problem = random_problem(random.Random(1), with_memory=True)
    program = build(problem, can_exceed=False)
    program.row(np.arange(2), np.ones(2), 3.0, np.inf)
    return program


def unbounded() -> Program:
    program = Program()
    free = program.columns(np.array([-1.0]))
    other = program.columns(np.array([1.0]))
    program.row(np.concatenate([free, other]), np.array([1.0, -1.0]), 0.0, np.inf)
    return program


def market_split(*, can_miss: bool) -> Program:
    """Sums of many large numbers that are to be exactly half: hard for every solver.

    Cornuéjols and Dawande, "A class of hard small 0-1 programs", 1998. ``can_miss``: sums may be
    wrong at a price, so that there always is a solution.
    """
    rng = np.random.default_rng(0)
    program = Program()
    columns = program.columns(np.zeros(50))
    program.num_binaries = program.num_columns
    for _ in range(6):
        numbers = rng.integers(0, 100, 50).astype(float)
        half = float(numbers.sum() // 2)
        if can_miss:
            missed = program.columns(np.ones(2))
            numbers = np.concatenate([numbers, [1.0, -1.0]])
            program.row(np.concatenate([columns, missed]), numbers, half, half)
        else:
            program.row(columns, numbers, half, half)
    return program


ENDS: dict[str, tuple[Callable[[], Program], Status]] = {
    "infeasible": (infeasible, "infeasible"),
    "unbounded": (unbounded, "unbounded"),
    "no solution in time": (lambda: market_split(can_miss=False), "time_limit"),
    "a solution in time": (lambda: market_split(can_miss=True), "feasible"),
}


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        pytest.param(
            name,
            solver,
            id=f"{name}-{solver.name}",
        )
        for name in ENDS
        for solver in (HIGHS, CBC)
    ],
)
def test_solvers_end_with_the_same_status(name: str, solver: Solver) -> None:
    make, status = ENDS[name]
    seconds = 0.1 if status == "time_limit" else 0.4
    found = solver.solve(make(), SolveOptions(time_limit_seconds=seconds))
    assert found.status == status
    assert bool(len(found.values)) is (status == "feasible")


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        ("time_limit", TimeLimitError, "AP701"),
        ("infeasible", MachineError, "AP403"),
        ("unbounded", MachineError, "AP403"),
        ("error", MachineError, "AP403"),
    ],
)
@SOLVERS
def test_a_status_without_a_solution_is_the_same_error_of_every_solver(
    status: Status, error: type[AutoparallelError], code: str, solver: Solver
) -> None:
    with pytest.raises(error) as caught:
        check_solved(Raw(status, np.zeros(0), -np.inf), solver)
    assert caught.value.code == code


def test_an_interrupted_solver_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        check_solved(Raw("interrupted", np.zeros(0), -np.inf), HIGHS)


def test_a_solver_that_cannot_be_started_is_an_error_that_says_so() -> None:
    problem = random_problem(random.Random(1), with_memory=True)
    with pytest.raises(MachineError, match="cannot execute") as caught:
        optimize(problem, solver=PulpSolver("cplex", "CPLEX_CMD"))
    assert caught.value.code == "AP403"


def test_an_unknown_solver_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"highs, .*cbc") as caught:
        find_solver("simplexx")
    assert caught.value.code == "AP331"


def test_a_solver_that_is_not_installed_is_told_with_those_that_are() -> None:
    installed = pulp.listSolvers(onlyAvailable=True)
    name = next(each for each in ("MIPCL_CMD", "CHOCO_CMD", "SAS94") if each not in installed)
    with pytest.raises(MachineError, match="installed here: highs, cbc") as caught:
        find_solver(name)
    assert caught.value.code == "AP402"


def test_a_plan_found_with_cbc_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory binds, so that integer programs are solved."""
    solved: list[str] = []
    solve = PulpSolver.solve

    def counted(self: PulpSolver, program: Program, options: SolveOptions) -> Raw:
        solved.append(self.name)
        return solve(self, program, options)

    monkeypatch.setattr(PulpSolver, "solve", counted)
    graph, blocks = mlp(1, rows=8, width=32, inner=64)
    on = cluster(2)
    free = plan(graph, blocks, on, Request(8))
    limit = int(0.56 * free.prediction.peak_memory_bytes)
    ours, theirs = (
        plan(graph, blocks, on, Request(8, memory_limit_bytes=limit, gap=0.0, solver=solver))
        for solver in ("highs", "cbc")
    )
    assert set(solved) == {"cbc"}
    assert theirs.solver.solver == "cbc"
    assert theirs.prediction.step_seconds == pytest.approx(ours.prediction.step_seconds, rel=SAME)
    assert theirs.prediction.peak_memory_bytes <= limit


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_where_nothing_fits_every_solver_says_so(solver: str) -> None:
    graph, blocks = mlp(2, rows=8, width=32, inner=64)
    request = Request(8, memory_limit_bytes=1000, solver=solver)
    with pytest.raises(InfeasibleError) as caught:
        plan(graph, blocks, cluster(2), request)
    assert caught.value.code == "AP301"


@pytest.mark.parametrize("share", [None, 0.8])
@pytest.mark.parametrize("number", [1, 3])
def test_stages_by_integer_programs_have_plans_as_fast(
    monkeypatch: pytest.MonkeyPatch, number: int, share: float | None
) -> None:
    """Elimination of cost tables is not used at all."""
    graph, blocks = mlp(number, rows=8, width=32, inner=64)
    request, on = Request(8, gap=0.0), cluster(4)
    ours = plan(graph, blocks, on, request)
    if share is not None:
        limit = int(share * ours.prediction.peak_memory_bytes)
        request = replace(request, memory_limit_bytes=limit)
        ours = plan(graph, blocks, on, request)
    monkeypatch.setattr(Family, "solve", None)
    theirs = plan(graph, blocks, on, replace(request, intra_op="ilp"))
    assert theirs.solver.num_problems > 0
    assert theirs.prediction.step_seconds == pytest.approx(ours.prediction.step_seconds, rel=SAME)
