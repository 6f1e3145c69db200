"""``make gpu``: what it does without a GPU, and the same commands on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_interpreters import ForkedInterpreter

from autoparallel.options.parse import parse_parallel
from autoparallel.planner.schedules.catalogue import SCHEDULES
from benchmarks.gpu.run import Part, run
from benchmarks.gpu.schedules import read, schedules
from benchmarks.gpu.schedules import run as run_cases

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "benchmarks" / "gpu" / "run.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    found = ForkedInterpreter([sys.executable, SCRIPT], env=os.environ, stdout=subprocess.PIPE)
    assert found.stdout is not None
    with found.stdout:
        said = found.stdout.read().decode()
    assert found.wait(timeout=60) == 5
    assert said == "no GPU: `make gpu` needs a machine with at least one\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_cpu_and_are_recorded(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--small", "-o", str(output)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    document = json.loads(output.read_text())
    assert document["versions"]["torch"] == torch.__version__
    figures = {part["name"]: part["figures"] for part in document["parts"]}
    assert list(figures)[:3] == ["tests", "verify gpt2", "step gpt2"]
    step = figures["step gpt2"]
    assert len(step["losses"]) == 4
    assert step["step_seconds"] > 0
    assert step["predicted_step_seconds"] > 0
    assert step["memory_bytes"] > 0
    assert step["predicted_memory_bytes"] > 0
    measured = figures["profile"]["measurements"]
    assert any("op" in line for line in measured)
    (case,) = figures["schedules"]["cases"]
    assert case["passed"]
    assert case["compared"] > 40


def _absent(folder: Path) -> dict[str, Any]:
    return {"figures": json.loads((folder / "absent.json").read_text())}


def test_a_part_that_fails_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    def part(name: str, script: str) -> Part:
        return Part(name, (sys.executable, "-c", script), 20.0)

    failed = run(part("fails", "print('said'); raise SystemExit(3)"), 20.0)
    assert (failed["passed"], failed["error"]) == (False, "exit code 3")
    assert failed["last_lines"] == ["said"]
    late = run(part("hangs", "import signal; signal.pause()"), 0.5)
    assert (late["passed"], late["error"]) == (False, "no answer within 0 s")
    unread = replace(part("writes nothing", ""), read=_absent)
    assert run(unread, 20.0)["error"].startswith("no figures: ")
    assert run(part("passes", ""), 20.0)["passed"]


def test_every_schedule_that_trains_is_tried() -> None:
    tried = {parse_parallel(parallel).schedule for parallel in schedules()}
    assert tried == {name for name, info in SCHEDULES.items() if info.trains}


def test_a_case_that_ends_its_processes_loses_no_other(tmp_path: Path) -> None:
    output = str(tmp_path / "cases.jsonl")
    launched = {"broken": str(tmp_path / "none.json"), "also broken": str(tmp_path / "none.json")}
    run_cases(launched, output)
    found = read(output)
    assert [each["case"] for each in found] == list(launched)
    assert not any(each["passed"] for each in found)
    assert all("none.json" in each["error"] for each in found)
