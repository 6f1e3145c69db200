"""``autoparallel compare``: what is named, what is priced, and what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.analysis.compare import baseline, load_items, read_run
from autoparallel.cache.plan_cache import NO_CACHE
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build_model(width=2048, depth=4):
    return Net(width, depth)

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 2048), "y": torch.zeros(global_batch, 2048)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""
SETTING = ("--cluster", "4xA100-80GB", "--global-batch", "64", "--precision", "bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compared")
    (path / "deep.py").write_text(MODEL)
    arguments = ["plan", str(path / "deep.py"), *SETTING, "-o", str(path / "plan.json")]
    assert run_command([*arguments, "--parallel", "dp=4,zero=1,microbatches=2"]) == 0
    records = [
        {"step": 1, "seconds": 9.0, "samples_per_second": 7.0, "memory_bytes": 10, "loss": 3.0},
        {"step": 2, "seconds": 8.0, "samples_per_second": 8.0, "memory_bytes": 15, "loss": 2.5},
        {"step": 3, "seconds": 0.2, "samples_per_second": 320.0, "memory_bytes": 20, "loss": 2.0},
        {"step": 4, "seconds": 0.4, "samples_per_second": 160.0, "memory_bytes": 30, "loss": 1.0},
    ]
    (path / "run.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return path


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    assert run_command(["compare", *words, "--trust", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_a_baseline_is_priced_as_simulate_prices_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "zero=2,recompute=full,microbatches=4"
    _, found = compared(capsys, str(folder / "plan.json"), f"tp2:{parallel}")
    assert (
        run_command(
            [
                "simulate",
                str(folder / "deep.py"),
                *SETTING,
                "--parallel",
                f"tp=2,{parallel}",
                "--json",
            ]
        )
        == 0
    )
    simulated = json.loads(capsys.readouterr().out)["result"]
    assert found["step_seconds"] == pytest.approx(simulated["step_seconds"], rel=1e-9)
    assert found["choices"]["parallel"] == "dp=2 tp=2"
    assert found["choices"]["ZeRO"] == "2"


@pytest.mark.slow
def test_a_baseline_is_the_fastest_of_what_its_name_leaves_open(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brute force over micro-batches and recomputation, all of which fit here."""
    words = [
        f"fsdp:recompute={mode},microbatches={count}"
        for mode in ("none", "selective", "full")
        for count in (1, 2, 4, 8, 16)
    ]
    plan, found, *others = compared(capsys, str(folder / "plan.json"), "fsdp", *words)
    best = min(each["step_seconds"] for each in others)
    assert found["step_seconds"] == pytest.approx(best, rel=1e-9)
    expected = found["step_seconds"] / plan["step_seconds"] - 1
    assert found["difference"]["step_seconds"] == pytest.approx(expected)


def test_a_baseline_that_fits_is_taken_before_a_faster_one_that_does_not(folder: Path) -> None:
    from autoparallel.analysis.plan_model import load_plan_model

    plan = autoparallel.load_plan(folder / "plan.json")
    plan = replace(plan, model=replace(plan.model, global_batch=2**16))
    model = load_plan_model(plan, str(folder / "plan.json"), trust=True)

    def best(like: Plan) -> Plan:
        return replace(model, plan=like).configured(baseline("fsdp:microbatches=1"))

    free = best(plan)
    limit = free.prediction.peak_memory_bytes - 1
    device = replace(plan.cluster.hosts[0].device, usable_memory_bytes=limit)
    hosts = tuple(replace(host, device=device) for host in plan.cluster.hosts)
    tight = best(replace(plan, cluster=replace(plan.cluster, hosts=hosts)))
    assert tight.prediction.peak_memory_bytes <= limit
    assert tight.prediction.step_seconds > free.prediction.step_seconds


def test_a_run_is_the_median_of_its_steps_after_the_first_two(folder: Path) -> None:
    found = read_run(folder / "run.jsonl")
    assert (found.num_steps, found.memory_bytes, found.loss) == (4, 30, 1.0)
    assert found.step_seconds == pytest.approx(0.3)
    assert found.throughput == pytest.approx(240.0)


def test_the_page_fits_80_columns_and_marks_differences(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, run = str(folder / "plan.json"), str(folder / "run.jsonl")
    assert (
        run_command(["compare", plan, "ddp:microbatches=1", "tp4", "3d:pp=2,tp=2", run, "--trust"])
        == 0
    )
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert "*dp=2 tp=2 pp=2" not in page  # the first of the degrees that differ is alone here
    assert "*tp=2 pp=2" in page
    assert "measured over 4 steps" in page
    assert page.count("Figures") == 2  # five items: three beside the first, then one
    assert run_command(["compare", plan, plan]) == 0
    page = capsys.readouterr().out
    assert "%" not in page.split("step ")[1].splitlines()[0]
    assert "What differs" not in page


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        (["PLAN"], "AP356", "compare plan.json fsdp"),
        (["PLAN", "fsdb"], "AP353", "did you mean fsdp?"),
        (["PLAN", "3d"], "AP353", "3d:tp=8,pp=4"),
        (["PLAN", "fsdp:tp=x"], "AP112", "--parallel"),
        (["PLAN", "tp3"], "AP127", "degrees"),
        (["PLAN", "ddp:microbatches=3"], "AP124", "dp"),
        (["ddp", "fsdp"], "AP354", "plan file"),
        (["PLAN", "EMPTY"], "AP355", "--metrics"),
    ],
)
def test_words_that_name_nothing_are_refused(
    folder: Path, words: list[str], code: str, fix: str
) -> None:
    (folder / "empty.jsonl").write_text("{}\n")
    named = {"PLAN": str(folder / "plan.json"), "EMPTY": str(folder / "empty.jsonl")}

    with pytest.raises(UsageError) as raised:
        load_items([named.get(word, word) for word in words], NO_CACHE, trust=True)
    assert raised.value.code == code
    assert fix in raised.value.fix
