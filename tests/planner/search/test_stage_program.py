"""The program of a plan's stage: what it says of the plan, and that files keep it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import highspy
import numpy as np
import pulp
import pytest
from small_graphs import cluster, mlp

from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.integer_programs.program import HIGHS, SolveOptions
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.stage_program import StageProgram, stage_program
from autoparallel.planning.objectives import plan_for

GRAPH, BLOCKS = mlp(4, rows=8, width=256, inner=1024)

FORCED = {
    "one stage": Forced(pp=1),
    "tensor parallel": Forced(tp=2, pp=1),
    "zero and recomputation": Forced(dp=2, pp=1, zero=2, recompute="full"),
    "two stages": Forced(pp=2),
    "halves": Forced(pp=2, schedule="zb-h1", num_microbatches=4),
    "chunks": Forced(pp=2, schedule="interleaved", chunks=2, num_microbatches=4),
}


@cache
def planned(name: str) -> Plan:
    return plan_for(GRAPH, BLOCKS, cluster(2), Request(8, forced=FORCED[name], gap=0.0))


def least(found: StageProgram) -> float:
    named = found.named
    raw = HIGHS.solve(named.program, SolveOptions())
    assert raw.status == "optimal"
    return named.cost(raw.values)


@pytest.mark.parametrize("name", FORCED)
def test_the_plans_layouts_are_in_the_program_and_cost_what_the_plan_says(name: str) -> None:
    """What they cost is told by ``evaluate``, which knows no programs."""
    plan = planned(name)
    told = evaluate(GRAPH, BLOCKS, plan, plan.cluster).objective_seconds
    for index, seconds in enumerate(told):
        found = stage_program(GRAPH, BLOCKS, plan, index)
        assert found.unit == "us"
        assert found.planned == pytest.approx(seconds * 1e6, rel=1e-6)


@pytest.mark.parametrize("name", ["one stage", "zero and recomputation", "two stages"])
def test_a_plan_without_a_gap_has_the_least(name: str) -> None:
    plan = planned(name)
    for index in range(len(plan.stages)):
        found = stage_program(GRAPH, BLOCKS, plan, index)
        assert found.planned is not None
        assert least(found) == pytest.approx(found.planned, rel=1e-6)


def test_without_a_limit_it_takes_no_longer_and_of_memory_no_more() -> None:
    plan = planned("one stage")
    time, unlimited, memory = (
        stage_program(GRAPH, BLOCKS, plan, 0, minimized=minimized)
        for minimized in ("time", "unlimited", "memory")
    )
    assert least(unlimited) <= least(time) * (1 + 1e-9)
    assert memory.unit == "MB"
    assert memory.planned is not None
    assert least(memory) <= memory.planned * (1 + 1e-9)
    held = sum(plan.stages[0].prediction.memory_bytes.values())
    assert memory.planned * 1e6 == pytest.approx(held, rel=1e-3)


def test_a_limit_below_the_least_memory_leaves_no_solution() -> None:
    plan = planned("one stage")
    most = least(stage_program(GRAPH, BLOCKS, plan, 0, minimized="memory")) * 1e6
    for share, status in ((1.001, "optimal"), (0.999, "infeasible")):
        found = stage_program(GRAPH, BLOCKS, plan, 0, memory_limit_bytes=share * most)
        assert HIGHS.solve(found.named.program, SolveOptions()).status == status


@pytest.mark.parametrize("minimized", ["time", "unlimited", "memory"])
def test_files_have_the_same_optimum(minimized: str, tmp_path: Path) -> None:
    """CBC by PuLP reads the MPS file back, HiGHS by itself reads both."""
    found = stage_program(GRAPH, BLOCKS, planned("tensor parallel"), 0, minimized=minimized)
    best = least(found)
    problem = found.named.as_pulp()
    mps, lp = str(tmp_path / "stage.mps"), str(tmp_path / "stage.lp")
    problem.writeMPS(mps)
    problem.writeLP(lp)
    _, again = pulp.LpProblem.fromMPS(mps)
    again.solve(pulp.PULP_CBC_CMD(msg=False))
    assert pulp.LpStatus[again.status] == "Optimal"
    assert again.isMIP()
    assert pulp.value(again.objective) == pytest.approx(best, rel=1e-6)
    for path in (mps, lp):
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        assert highs.readModel(path) == highspy.HighsStatus.kOk
        highs.run()
        assert highs.getInfo().objective_function_value == pytest.approx(best, rel=1e-6)


def test_names_say_the_op_and_its_strategy() -> None:
    found = stage_program(GRAPH, BLOCKS, planned("tensor parallel"), 0)
    names = found.named.names
    assert len(set(names)) == len(names) == found.named.program.num_columns
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,99}", name) for name in names)
    binaries = names[: found.named.program.num_binaries]
    assert any(re.fullmatch(r"layers\.0\.up__\d+__[RI]_S0_to_S1", name) for name in binaries)
    assert {name.split("__")[0] for name in binaries} == {
        each.name for each in found.named.decisions
    }


def test_a_solution_of_the_named_program_is_readable() -> None:
    """Of each op one strategy is chosen."""
    found = stage_program(GRAPH, BLOCKS, planned("tensor parallel"), 0)
    values = HIGHS.solve(found.named.program, SolveOptions()).values
    number = found.named.program.num_binaries
    chosen = [
        name
        for name, value in zip(found.named.names[:number], np.round(values[:number]), strict=True)
        if value == 1
    ]
    assert [name.split("__")[0] for name in chosen] == [each.name for each in found.named.decisions]


@pytest.mark.parametrize(
    ("index", "minimized", "said"),
    [(1, "time", "no stage 1"), (-1, "time", "no stage -1"), (0, "money", "--objective money")],
)
def test_what_there_is_not_is_told(index: int, minimized: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        stage_program(GRAPH, BLOCKS, planned("one stage"), index, minimized=minimized)
    assert caught.value.code == "AP332"


def test_a_stage_with_unequal_shares_has_no_program() -> None:
    plan = planned("one stage")
    shared = replace(plan, stages=(replace(plan.stages[0], shares=(3, 5)),))
    with pytest.raises(UsageError, match="unequal shares"):
        stage_program(GRAPH, BLOCKS, shared, 0)
