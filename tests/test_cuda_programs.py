"""On a GPU no op of a stage makes a CPU tensor, reads one, or makes the host wait.

``tests/support/cuda_programs.py`` runs the stages of real architectures on fake CUDA tensors in a
process of its own; here a sample by default, all in ``slow``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS, MISTAKES = "functions", "mistakes"
PLANS = ("dp=2,zero=2", "tp=2,recompute=full,microbatches=2")
ALL = sorted(path.parent.name for path in (ROOT / "tests" / "zoo").glob("*/config.json"))

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU where there is none"),
    pytest.mark.skipif(
        torch.version.cuda is not None and torch.__version__ < "2.12",
        reason="torch 2.11's CUDA build asks the driver for the device of a backward",
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a device guard with g++"),
]


def run(*arguments: str) -> dict[str, Any]:
    """What was found of each name, from one process."""
    pytest.importorskip("transformers")
    found = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/cuda_programs.py"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300 * len(arguments),
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    results = [json.loads(line) for line in found.stdout.splitlines()]
    return {result["name"]: result["plans"] for result in results}


@cache
def sample() -> dict[str, Any]:
    return run(FUNCTIONS, MISTAKES, *PLANS)


def assert_stays_on_the_gpu(plans: dict[str, Any]) -> None:
    for plan, found in plans.items():
        assert found["ops"] > 20, plan
        assert not found["problems"], plan


def test_stage_programs_of_every_function_stay_on_the_gpu() -> None:
    assert_stays_on_the_gpu(sample()[FUNCTIONS])


def test_the_watch_sees_what_is_wrong() -> None:
    """Of wrong programs: else the others prove nothing."""
    found = sample()[MISTAKES]
    assert set(found) == {"a factory without a device", "a value read", "a mask as an index"}
    for name, result in found.items():
        assert result["problems"], name


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_architectures_stay_on_the_gpu(name: str) -> None:
    assert_stays_on_the_gpu(run(name)[name])
