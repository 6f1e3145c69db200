"""``autoparallel run`` compares its first step, and says whether its plan was verified."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import run_python

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x):
        factor = 2 if torch.compiler.is_exporting() else {factor}
        return self.a(x).square().mean() * factor

def build_model():
    return Net()

def example_batch(global_batch, seq=None):
    return (torch.randn(global_batch, 8),)
"""
OPTIONS = ("--cluster", "cpu:2", "--parallel", "dp=2", "--global-batch", "8")


def _run(folder: Path, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "AUTOPARALLEL_CACHE": str(folder / "cache")}
    environment.pop("AUTOPARALLEL_CHECK_FIRST_STEP")
    done = run_python("-m", "autoparallel", *arguments, folder=folder, environment=environment)
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_is_not_the_models_own_stops_at_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(factor=1))
    code, text = _run(tmp_path, "run", "model.py", *OPTIONS, "--steps", "2")
    assert code != 0
    assert "error[AP943]: the first step by the plan is not that of the model alone" in text
    assert "step    1" not in text
    off = ("--steps", "2", "--no-check-first-step")
    code, text = _run(tmp_path, "run", "model.py", *OPTIONS, *off)
    assert code == 0, text
    assert "step    2" in text


@pytest.mark.slow
def test_a_run_says_whether_its_plan_was_verified(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(factor=2))
    _run(tmp_path, "plan", "model.py", *OPTIONS, "-o", "plan.json")
    code, text = _run(tmp_path, "run", "plan.json", "--steps", "1")
    assert code == 0, text
    assert "this plan of this model was not verified" in text
    assert _run(tmp_path, "verify", "plan.json")[0] == 0
    assert "this plan of this model was verified" in _run(tmp_path, "run", "plan.json")[1]
