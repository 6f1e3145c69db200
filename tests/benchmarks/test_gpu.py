"""``make gpu``: what it does without a GPU, and the same commands on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "benchmarks" / "gpu" / "run.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    found = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 5
    assert found.stdout == "no GPU: `make gpu` needs a machine with at least one\n"


def test_a_part_is_run_and_recorded(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--small", "-o", str(output)]
    subprocess.run([*command, "--parts", "step gpt2"], check=True)
    document = json.loads(output.read_text())
    assert document["versions"]["torch"] == torch.__version__
    (part,) = document["parts"]
    assert part["passed"]
    assert any("measured" in line and "predicted" in line for line in part["figures"])
