"""The result of a command is all that stands on stdout, whatever a model's file prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run_python

MODEL = """
import os
import torch
from torch import nn

print("printed by the file")
os.write(1, b"written by the file\\n")

class Net(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.layer = nn.Linear(8, d)

    def forward(self, x):
        print("printed by the forward")
        return self.layer(x).square().mean()

def build_model(d: int = 8):
    return Net(d)

def example_batch(rows):
    return (torch.randn(rows, 8),)
"""
PLAN = "model.py --cluster cpu:2 --global-batch 8"


@pytest.mark.parametrize(
    "line",
    [
        f"plan {PLAN} --json --no-cache",
        "inspect plan.json --json",
        "explain plan.json zero --json",
        "compare plan.json plan.json --json",
        "simulate model.py --cluster cpu:2 --global-batch 8 --json --parallel dp=2",
        "show cluster cpu:2 --json",
        "show ops --json",
        "show schedules --json",
        "show cache --json",
    ],
)
def test_json_is_all_of_stdout(line: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    if "plan.json" in line:
        made = run_python(
            "-m", "autoparallel", *f"plan {PLAN} -o plan.json".split(), folder=tmp_path
        )
        assert made.returncode == 0, made.stderr
        assert "file" not in made.stdout
    done = run_python("-m", "autoparallel", *line.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    if "model.py" in line:
        assert "printed by the file" in done.stderr
        assert "written by the file" in done.stderr
