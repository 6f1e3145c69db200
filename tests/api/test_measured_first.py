"""What a plan for this machine asks for is measured before it is chosen, once, and kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from autoparallel import __main__ as cli
from autoparallel import load_plan
from autoparallel.cache.database import default_database
from autoparallel.options.plan_options import plan_options
from autoparallel.planner.errors import UsageError

SECONDS = "AUTOPARALLEL_MEASURE_SECONDS"
FIXED = ("--parallel", "dp=2", "--global-batch", "8", "--cluster", "cpu:2")


def plan(model_file: Path, *options: str) -> float:
    """Plans; the share of the predicted time that is not from specifications."""
    path = model_file.with_name("plan.json")
    assert cli.run_command(["plan", str(model_file), *FIXED, "-o", str(path), *options]) == 0
    return 1 - load_plan(path).prediction.sources.get("spec", 0.0)


def times() -> list[tuple[str, float]]:
    with sqlite3.connect(default_database()) as opened:
        rows = opened.execute("SELECT key, measured_at FROM ops ORDER BY key").fetchall()
        return [(str(key), float(at)) for key, at in rows]


def test_a_first_plan_is_measured_and_the_next_measures_nothing(model_file: Path) -> None:
    assert plan(model_file, "--measure-seconds", "30") > 0.9
    first = times()
    assert first
    assert all(key.startswith("autoparallel.block") for key, _ in first)
    assert plan(model_file, "--measure-seconds", "30") > 0.9
    assert times() == first


TINY = """
import torch
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def build_model():
    return Net(8, 8)

def example_batch(rows):
    return {"x": torch.zeros(rows, 8)}
"""


def test_a_model_of_tiny_weights_is_measured_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(TINY)
    for said in (True, False):
        plan(tmp_path / "model.py", "--measure-seconds", "30")
        assert ("measuring" in capfd.readouterr().err) == said


@pytest.mark.parametrize("options", [("--profile", "analytic"), ("--measure-seconds", "0")])
def test_without_measuring_no_process_and_no_database_is_made(
    model_file: Path, options: tuple[str, ...]
) -> None:
    assert plan(model_file, *options) == pytest.approx(0.0)
    assert not default_database().exists()


def test_a_cluster_that_is_not_this_machine_is_not_measured(model_file: Path) -> None:
    path = model_file.with_name("plan.json")
    arguments = (*FIXED, "--cluster", "2xH100", "--measure-seconds", "10", "-o", str(path))
    assert cli.run_command(["plan", str(model_file), *arguments]) == 0
    assert not default_database().exists()


def test_the_environment_gives_the_seconds_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECONDS, "3")
    assert plan_options(8).measure_seconds == 3.0
    assert plan_options(8, None, **{"measure_seconds": 1.0}).measure_seconds == 1.0
    monkeypatch.delenv(SECONDS)
    assert plan_options(8).measure_seconds == 10.0


@pytest.mark.parametrize("text", ["soon", "-1"])
def test_seconds_that_are_none_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, text)
    with pytest.raises(UsageError) as caught:
        plan_options(8)
    assert caught.value.code == "AP840"
