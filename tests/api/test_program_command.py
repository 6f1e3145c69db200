"""``autoparallel show program`` and ``--solver`` on the command line and in Python."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pulp
import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.__main__ import run_command

TARGET = str(Path(__file__).resolve().parents[1] / "models" / "regression.py")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    arguments = ["--cluster", "cpu:2", "--parallel", "tp=2", "--solver", "cbc", "--no-cache"]
    assert run_command(["plan", TARGET, *arguments, "-o", str(path)]) == 0
    return path


def test_a_plan_says_who_solved_its_programs(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autoparallel.load_plan(plan_file).solver.solver == "cbc"
    assert run_command(["inspect", str(plan_file), "--all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"problems solved, integer programs by cbc", text)


@pytest.mark.parametrize("ending", ["mps", "lp"])
def test_a_stage_is_written_for_other_solvers(
    plan_file: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file.with_name(f"stage.{ending}")
    assert run_command(["show", "program", str(plan_file), "-o", str(path)]) == 0
    said = capsys.readouterr().out
    told = float(re.search(r"the plan's own layouts: ([0-9.]+) us", said).group(1))  # type: ignore[union-attr]
    assert "minimizes us" in said
    if ending == "mps":
        _, problem = pulp.LpProblem.fromMPS(str(path))
        problem.solve(pulp.PULP_CBC_CMD(msg=False))
        # the plan had to split over tp, which the program need not
        assert pulp.value(problem.objective) <= told * (1 + 1e-6)
    else:
        assert re.search(r"linear__\d+__\w*S\w*_to_S1\b", path.read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (["-o", "stage.txt"], "AP332", 2),
        (["--stage", "7", "-o", "stage.lp"], "AP332", 2),
        (["--objective", "money", "-o", "stage.lp"], "AP332", 2),
        (["-o", "no/such/folder/stage.lp"], "AP101", 2),
    ],
)
def test_what_cannot_be_written_is_told(
    plan_file: Path,
    arguments: list[str],
    code: str,
    exit_code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(plan_file.parent)
    assert run_command(["show", "program", str(plan_file), "--trust", *arguments]) == exit_code
    assert capsys.readouterr().err.startswith(f"error[{code}]")


def test_a_changed_model_has_no_program_of_the_plan(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = autoparallel.load_plan(plan_file)
    path = tmp_path / "plan.json"
    autoparallel.save_plan(replace(plan, model=replace(plan.model, fingerprint="other")), path)
    assert run_command(["show", "program", str(path), "-o", str(tmp_path / "stage.lp")]) == 6
    assert "AP550" in capsys.readouterr().err


def test_an_unknown_solver_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["plan", "no_such_file.py", "--solver", "simplexx"]) == 2
    assert capsys.readouterr().err.startswith("error[AP331]: there is no solver simplexx")


def test_python_takes_a_solver() -> None:
    model, batch = nn.Linear(4, 1), (torch.zeros(8, 4),)
    with pytest.raises(autoparallel.UsageError, match="AP331"):
        autoparallel.plan(model, batch, cluster="cpu:2", solver="simplexx")
