"""Where figures of steps go, and a run with all of its options."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import run_python
from forced_plans import settled

from autoparallel.planner.errors import UsageError
from autoparallel.training.callbacks import StepRecord
from autoparallel.training.metrics import JsonLines, TensorBoard, WeightsAndBiases, check_installed

MODEL = """
import sys, torch, autoparallel
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))
                                    for _ in range(2))
        self.last = nn.Linear(16, 1)

    def forward(self, x, y):
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return (self.last(h) - y).square().mean()

def build_model():
    return Net()

def example_batch(global_batch):
    return {"x": torch.randn(global_batch, 8), "y": torch.randn(global_batch, 1)}

def build_optimizer(named_parameters):
    named = list(named_parameters)
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=1e-2)

def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)

class Say(autoparallel.Callback):
    def on_step(self, record):
        sys.stdout.write(f"told {record.step}\\n")
    def on_checkpoint(self, step, path):
        sys.stdout.write(f"saved {step}\\n")
    def on_end(self):
        sys.stdout.write("ended\\n")

def callbacks():
    return [Say()]
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        "-m",
        "autoparallel",
        "run",
        "model.py",
        "--cluster",
        "cpu:2",
        "--global-batch",
        "8",
        "--profile",
        "analytic",
        *arguments,
        folder=folder,
    )


@pytest.mark.slow
def test_a_run_tells_metrics_and_callbacks_and_resumes_its_schedule_under_another_plan(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    options = ("--clip-norm", "0.5", "--accumulate", "2", "--loss-scale", "1024")

    def lines(file: str, *arguments: str) -> list[dict[str, float]]:
        done = command(tmp_path, *options, "--metrics", file, *arguments)
        assert done.returncode == 0, done.stderr
        told = [int(step) for step in re.findall(r"^told (\d+)$", done.stdout, re.M)]
        found = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert [line["step"] for line in found][-len(told) :] == told
        assert done.stdout.count("ended\n") == 1
        assert ("saved 2\n" in done.stdout) == ("--save" in arguments)
        return found

    whole = lines("whole.jsonl", "--parallel", settled("pp=2"), "--steps", "4")
    lines("parts.jsonl", "--parallel", settled("dp=2,zero=3"), "--steps", "2", "--save", "saved")
    parts = lines("parts.jsonl", "--parallel", settled("tp=2"), "--steps", "2", "--resume", "saved")
    assert [line["lr"] for line in whole] == pytest.approx([0.001, 0.0028, 0.0046, 0.0064])
    for name in ("step", "loss", "grad_norm", "lr", "skipped_steps"):
        assert [line[name] for line in parts] == pytest.approx(
            [line[name] for line in whole], rel=1e-4
        )
    assert all(line["samples_per_second"] == pytest.approx(16 / line["seconds"]) for line in whole)
    assert all(line["memory_bytes"] > 0 for line in whole)


def test_bad_options_end_a_run_before_it_is_planned(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = command(tmp_path, "--on-nan", "hope")
    assert done.returncode == 2
    assert "error[AP900]" in done.stderr
    assert "capture" not in done.stderr


RECORD = StepRecord(3, float("nan"), 1.5, 10, 0.5, learning_rate=0.1, unit="tokens", throughput=8.0)


def test_a_figure_that_is_not_finite_is_null_in_a_line_of_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "new" / "metrics.jsonl")
    sink.on_step(RECORD)
    line = json.loads((tmp_path / "new" / "metrics.jsonl").read_text())
    sink.close()
    assert line == {
        "step": 3,
        "loss": None,
        "grad_norm": 1.5,
        "lr": 0.1,
        "tokens_per_second": 8.0,
        "memory_bytes": 10,
        "seconds": 0.5,
        "skipped_steps": 0,
        "loss_scale": None,
    }


def test_a_metrics_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="AP906"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")


@pytest.mark.parametrize("option", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_named(option: str) -> None:
    check_installed({option: None})
    if importlib.util.find_spec(option) is None:
        with pytest.raises(UsageError, match=f"AP905.*{option}"):
            check_installed({option: "place"})


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoard(tmp_path)
    sink.on_step(RECORD)
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "grad_norm" in events.Tags()["scalars"]
    assert events.Scalars("lr")[0].step == 3


def test_weights_and_biases_gets_each_steps_figures_but_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    run = SimpleNamespace(
        log=lambda named, step: told.append((step, named)), finish=lambda: told.append("finished")
    )
    wandb = SimpleNamespace(init=lambda **given: told.append(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logged = WeightsAndBiases("tuning", {"parallel": "dp=2"})
    logged.on_step(RECORD)
    logged.close()
    begun, (step, named), ended = told
    assert begun == {"project": "tuning", "config": {"parallel": "dp=2"}}
    assert step == 3
    assert named["lr"] == 0.1
    assert named["loss"] is None  # not finite
    assert "step" not in named
    assert ended == "finished"


def test_an_interrupted_line_and_later_steps_are_cut_off_and_earlier_runs_stay(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1}, {"step": 2}, {"step": 1}, {"step": 2}, {"step": 3}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 4, "lo')
    JsonLines(path, kept=1).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 1]
    with pytest.raises(UsageError, match="AP906"):
        JsonLines(tmp_path / "metrics.jsonl" / "inside.jsonl")
