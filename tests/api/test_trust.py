"""A plan file's target runs only where it lies in the current folder, or is trusted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_python, run_torchrun
from forced_plans import settled

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.exporting.solver_programs import plan_program
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan_files import load_plan, save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.target.load import load_target
from autoparallel.target.trust import check_trusted, target_name

MODEL = """
import pathlib
import torch
from torch import nn

pathlib.Path(__file__).with_name("has_run").touch()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x).square().mean()

def build_model():
    return Net()

def example_batch(global_batch, seq=None):
    return {"x": torch.randn(global_batch, 8)}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    file = tmp_path_factory.mktemp("planned") / "model.py"
    file.write_text(MODEL)
    forced = parse_parallel(settled("dp=2"))
    options = PlanOptions(global_batch=4, profile="analytic", forced=forced)
    return make_plan(load_target(str(file)), "cpu:2", options)


def named(plan: Plan, target: Path | str) -> Plan:
    return replace(plan, model=replace(plan.model, target=str(target)))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of somebody else's; the current folder is another one."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "theirs" / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "theirs" / "model.py"


def test_a_target_elsewhere_runs_only_if_trusted(plan: Plan, elsewhere: Path) -> None:
    theirs = named(plan, elsewhere)
    with pytest.raises(UsageError, match="AP155") as caught:
        check_trusted(theirs, "plan.json", trust=False)
    assert caught.value.where == str(elsewhere)
    assert "--trust" in caught.value.fix
    check_trusted(theirs, "plan.json", trust=True)


def test_a_file_beside_a_plan_that_lies_elsewhere_is_elsewhere(plan: Plan, elsewhere: Path) -> None:
    beside = named(plan, "/gone/model.py")
    with pytest.raises(UsageError, match="AP155") as caught:
        check_trusted(beside, elsewhere.with_name("plan.json"), trust=False)
    assert caught.value.where == str(elsewhere)


@pytest.mark.parametrize(
    "target", ["os:system", "textwrap:dedent", "autoparallel.planning.plan:find"]
)
def test_a_module_elsewhere_runs_only_if_trusted(plan: Plan, elsewhere: Path, target: str) -> None:
    with pytest.raises(UsageError, match="AP155"):
        check_trusted(named(plan, target), "plan.json", trust=False)


def test_a_link_out_of_the_folder_is_followed(plan: Plan, elsewhere: Path) -> None:
    Path("model.py").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="AP155"):
        check_trusted(named(plan, "model.py"), "plan.json", trust=False)


def test_what_lies_in_the_current_folder_is_trusted(plan: Plan, elsewhere: Path) -> None:
    Path("package_here").mkdir()
    Path("package_here/__init__.py").write_text("raise SystemExit('imported')")
    for place in ("model_here.py", "package_here/model.py"):
        Path(place).write_text(MODEL)
    for target in (
        "model_here.py",
        "package_here/model.py:build_model",
        Path("model_here.py").absolute(),
        "package_here.model:build_model",
        "model_here:build_model",
        "hf:gpt2",
        "none.py",
        "no_such_module:build",
    ):
        check_trusted(named(plan, target), "plan.json", trust=False)
    assert not Path("has_run").exists()


def test_no_command_runs_a_target_that_is_elsewhere(
    plan: Plan, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_plan(named(plan, elsewhere), "plan.json")
    checkpoint = Path("run/step-00000001")
    checkpoint.mkdir(parents=True)
    save_plan(named(plan, elsewhere), "run/plan.json")
    for command in (
        ["run", "plan.json"],
        ["verify", "plan.json"],
        ["show", "program", "plan.json", "-o", "x.lp"],
        ["explain", "plan.json", "zero"],
        ["compare", "plan.json", "fsdp"],
    ):
        assert run_command(command) == 2
        assert f"--> {elsewhere}" in capfd.readouterr().err
    with pytest.raises(UsageError, match="AP155"):
        plan_program("plan.json", 0)
    assert run_command(["inspect", "plan.json", "--html", "page.html"]) == 0
    assert "is outside of the current folder" in Path("page.html").read_text()
    assert not elsewhere.with_name("has_run").exists()
    assert plan_program("plan.json", 0, trust=True).planned is not None
    assert elsewhere.with_name("has_run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_runs_a_plan_beside_the_checkpoint_only_if_trusted(
    plan: Plan, elsewhere: Path
) -> None:
    import torch
    from torch.distributed.checkpoint import save

    save(
        {"up.weight": torch.zeros(8, 8), "up.bias": torch.zeros(8)},
        checkpoint_id="run",
        no_dist=True,
    )
    save_plan(named(plan, elsewhere), "run/plan.json")
    with pytest.raises(UsageError, match="AP155"):
        autoparallel.export("run", "out")
    assert not elsewhere.with_name("has_run").exists()
    assert autoparallel.export("run", "out", trust=True).num_tensors == 2
    assert elsewhere.with_name("has_run").exists()


@pytest.mark.slow
def test_a_trusted_plan_runs_under_the_launcher_and_torchrun(plan: Plan, elsewhere: Path) -> None:
    save_plan(named(plan, elsewhere), "plan.json")
    arguments = ("run", str(Path("plan.json").absolute()), "--steps", "1")
    script = Path("join.py")
    script.write_text("from autoparallel.__main__ import main\nmain()\n")
    refused = run_torchrun(script, *arguments)
    assert refused.returncode == 2
    assert "AP155" in refused.stderr
    assert not elsewhere.with_name("has_run").exists()
    done = run_torchrun(script, *arguments, "--trust")
    assert done.returncode == 0, done.stderr
    done = run_python("-m", "autoparallel", *arguments, "--trust", folder=".")
    assert done.returncode == 0, done.stderr
    assert "step    1  loss" in done.stdout
    assert load_plan("plan.json").model.target == str(elsewhere)


def test_a_relative_target_is_found_from_the_plan_s_folder(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and a folder of Hugging Face: where the plan was made, or where it was copied with."""
    made = tmp_path / "made"
    (made / "models").mkdir(parents=True)
    (made / "models/model.py").touch()
    (made / "llama").mkdir()
    path = made / "plan.json"
    monkeypatch.chdir(tmp_path)
    found = target_name(named(plan, "models/model.py:build"), path)
    assert found == f"{made}/models/model.py:build"
    assert target_name(named(plan, "hf:llama"), path) == f"hf:{made}/llama"
    assert target_name(named(plan, "hf:elsewhere/llama"), path) == "hf:elsewhere/llama"
    (tmp_path / "llama").mkdir()
    assert target_name(named(plan, "hf:llama"), path) == "hf:llama"
