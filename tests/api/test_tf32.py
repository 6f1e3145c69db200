"""TF32 as a user asks for it: what a plan costs, says and runs with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from commands import run_python
from torch import Tensor, nn

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.cost_model.cluster.tf32 import FAMILIES, torch_computing, torch_families
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import CHECKSUMS, _checksums, dumps, loads
from autoparallel.planning.tf32 import set_as_planned, tell_difference
from autoparallel.report.page import describe

SETTLED = "microbatches=1,zero=0,recompute=none"
"""What a search would decide besides."""

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Conv2d(64, 256, 3), nn.Flatten(), nn.Linear(256 * 36, 4096))

def example_batch(global_batch, seq=None):
    return {"input": torch.zeros(global_batch, 64, 8, 8)}

def loss_fn(outputs, batch):
    return outputs.square().mean()
"""


class Products(nn.Module):
    """A convolution and a matrix product, both large."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(64, 256, 3), nn.Linear(256 * 36, 4096)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.conv(x).flatten(1))
        return found.square().mean()


def planned(cluster: str = "1xA100", **options: object) -> Plan:
    batch = {"x": torch.empty((512, 64, 8, 8), device="meta")}
    found = autoparallel.plan(
        Products(),
        batch,
        cluster=cluster,
        profile="analytic",
        parallel=SETTLED,
        **options,  # type: ignore[arg-type]
    )
    return found


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {choice: planned(tf32=choice) for choice in FAMILIES}


def test_a_step_takes_less_by_what_its_products_take_less(plans: dict[str, Plan]) -> None:
    """On an A100 at 0.55 (convolutions) and 0.8 (matmuls) of 19.5 TFLOP/s, or of 156.

    The convolution's forward is 512 · 36 · 256 outputs of 64 · 9 products; its input has no
    gradient, so it runs twice. The matmul's is 512 × 9216 × 4096, three times.
    """
    conv = 2 * 2 * 512 * 36 * 256 * 64 * 9
    matmul = 3 * 2 * 512 * 9216 * 4096
    saved_per_flop = 1 / 19.5e12 - 1 / 156e12
    none, some, every = (plans[each].prediction for each in ("none", "convolutions", "all"))
    first = none.step_seconds - some.step_seconds
    second = some.step_seconds - every.step_seconds
    assert first == pytest.approx(conv / 0.55 * saved_per_flop, rel=0.1)
    assert second == pytest.approx(matmul / 0.8 * saved_per_flop, rel=0.2)
    for prediction in (none, some, every):
        assert 0 < prediction.model_flops_utilization < 1


@pytest.mark.slow
def test_nothing_else_is_faster_in_tf32() -> None:
    half = [planned(precision="bf16", tf32=each) for each in ("none", "all")]
    assert half[0].prediction.step_seconds == half[1].prediction.step_seconds
    old = [planned("1xV100", tf32=each) for each in ("none", "convolutions")]
    assert old[0].prediction.step_seconds == old[1].prediction.step_seconds


def test_the_plan_and_its_report_say_what_is_in_tf32(plans: dict[str, Plan]) -> None:
    for choice, families in FAMILIES.items():
        plan = loads(dumps(plans[choice]))
        assert plan == plans[choice]
        assert plan.tf32 == families
        (host,) = json.loads(dumps(plan))["cluster"]["hosts"]
        assert host["device"]["tf32"] == list(families)
    lines = {choice: describe(plan).splitlines()[1] for choice, plan in plans.items()}
    assert "fp32 (no TF32), eager" in lines["none"]
    assert "fp32 (TF32 convolutions), eager" in lines["convolutions"]
    assert "fp32 (TF32 convolutions and matmuls)" in lines["all"]
    old = planned("1xV100")
    assert old.tf32 is None
    assert "TF32" not in describe(old)


def test_a_plan_file_that_does_not_say_loads_and_leaves_torch_as_it_is(
    plans: dict[str, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(dumps(plans["none"]))
    del table["cluster"]["hosts"][0]["device"]["tf32"]
    del table[CHECKSUMS]
    old = loads(json.dumps({**table, CHECKSUMS: _checksums(table)}))
    assert old.tf32 is None
    assert ", fp32, eager, " in describe(old)
    before = torch_families()
    set_as_planned(old, 0)
    tell_difference(old, 0)
    assert torch_families() == before
    assert capsys.readouterr().err == ""


def test_where_nothing_is_said_a_plan_is_for_what_torch_is_set_to() -> None:
    for families in ((), ("conv",), ("matmul",), ("conv", "matmul")):
        with torch_computing(families):
            assert planned().tf32 == families


def test_a_run_sets_torch_as_planned_and_rank_0_says_so(
    plans: dict[str, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    with torch_computing(("conv",)):
        set_as_planned(plans["convolutions"], 0)
        assert capsys.readouterr().err == ""
        set_as_planned(plans["all"], 0)
        assert torch_families() == ("conv", "matmul")
        said = "convolutions and matmuls in TF32, as planned; torch was set to convolutions\n"
        assert capsys.readouterr().err == f"autoparallel: {said}"
        set_as_planned(plans["none"], 1)
        assert torch_families() == ()
        assert capsys.readouterr().err == ""


def test_a_script_keeps_its_settings_and_is_told_of_others(
    plans: dict[str, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    with torch_computing(("conv",)):
        tell_difference(plans["convolutions"], 0)
        tell_difference(plans["all"], 1)
        assert capsys.readouterr().err == ""
        tell_difference(plans["all"], 0)
        assert torch_families() == ("conv",)
    said = capsys.readouterr().err
    assert "priced with convolutions and matmuls in TF32" in said
    assert "this script's torch computes convolutions in it" in said


@pytest.mark.parametrize("cluster", ["cpu:1", "1xV100"])
def test_tf32_for_all_is_refused_where_no_device_has_it(cluster: str) -> None:
    with pytest.raises(UsageError, match="does not compute in TF32") as caught:
        planned(cluster, tf32="all")
    assert caught.value.code == "AP129"
    assert "--tf32 none" in caught.value.fix


def test_the_command_line_takes_the_choice_and_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    common = [
        str(model),
        "--cluster",
        "1xA100",
        "--profile",
        "analytic",
        "--json",
        "--parallel",
        SETTLED,
    ]
    seconds = {}
    for choice in FAMILIES:
        assert run_command(["simulate", *common, "--tf32", choice]) == 0
        seconds[choice] = json.loads(capsys.readouterr().out)["result"]["step_seconds"]
    assert seconds["none"] > seconds["convolutions"] > seconds["all"]
    assert run_command(["plan", *common, "--no-cache", "--tf32", "all"]) == 0
    assert loads(capsys.readouterr().out).tf32 == ("conv", "matmul")
    assert run_command(["plan", *common, "--tf32", "sometimes"]) == 2
    assert "AP113" in capsys.readouterr().err


def test_a_model_file_that_sets_torch_is_planned_as_it_sets_it(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL + "\ntorch.set_float32_matmul_precision('high')\n")
    done = run_python(
        "-m",
        "autoparallel",
        "plan",
        str(model),
        "--cluster",
        "1xA100",
        "--profile",
        "analytic",
        "--json",
        "--no-cache",
        "--parallel",
        SETTLED,
    )
    assert done.returncode == 0, done.stderr
    assert loads(done.stdout).tf32 == ("conv", "matmul")


CLUSTER = """
[[hosts]]
num_devices = 2
link = "loopback"
device = { preset = "cpu", peak_flops = { tfloat32 = 120e9 } }
"""
"""CPUs with a figure for TF32, so that a machine without GPUs goes the same way as one with."""

SCRIPT = """
import sys, torch, autoparallel
from torch import nn

if "high" in sys.argv:
    torch.set_float32_matmul_precision("high")
model = autoparallel.parallelize(
    nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)),
    example_batch=(torch.zeros(8, 16),), loss_fn=lambda out, batch: out.square().mean(),
    cluster="cluster.toml", profile="analytic", tf32="all",
    parallel="dp=2,microbatches=1,zero=0,recompute=none",
)
autoparallel.Step(model)((torch.ones(8, 16),))
print(f"matmuls {torch.backends.cuda.matmul.allow_tf32}\\n", end="", flush=True)
"""
SMALL = """
import torch
from torch import nn

def build_model():
    return nn.Linear(16, 64)

def example_batch(global_batch, seq=None):
    return {"input": torch.zeros(global_batch, 16)}

def loss_fn(outputs, batch):
    return outputs.square().mean()
"""


def outputs_of(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "cluster.toml").write_text(CLUSTER)
    done = run_python("-m", *command, folder=folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_processes_of_a_run_are_set_as_planned(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SMALL)
    common = (
        "model.py",
        "--cluster",
        "cluster.toml",
        "--profile",
        "analytic",
        "--parallel",
        f"dp=2,{SETTLED}",
    )
    done = outputs_of(tmp_path, "autoparallel", "run", *common, "--tf32", "all", "--steps", "1")
    said = "convolutions and matmuls in TF32, as planned; torch was set to convolutions"
    assert done.stderr.count(said) == 1
    assert "fp32 (TF32 convolutions and matmuls)" in done.stdout
    done = outputs_of(tmp_path, "autoparallel", "run", *common, "--steps", "1")
    assert "as planned" not in done.stderr


@pytest.mark.parametrize("setting", ["default", pytest.param("high", marks=pytest.mark.slow)])
def test_a_script_under_torchrun_keeps_its_settings(tmp_path: Path, setting: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = outputs_of(
        tmp_path,
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "script.py",
        setting,
    )
    said = "priced with convolutions and matmuls in TF32, this script's torch computes convolutions"
    assert done.stderr.count(said) == (1 if setting == "default" else 0)
    assert done.stdout.split() == ["matmuls", str(setting == "high")] * 2
