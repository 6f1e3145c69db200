"""A rank that runs out of memory: what it held, what was predicted, and what to try next."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run_python

from autoparallel import Plan, load_plan
from autoparallel.cost_model.cluster.figures import parse_bytes
from autoparallel.planner.errors import DeviceMemoryError
from autoparallel.planner.plan import Alternative
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.failure_store import Ranks
from autoparallel.runtime.messages.watchdog import Watchdog
from autoparallel.training.memory_error import comparison, explained_memory_errors, next_plan

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = (
    "--set",
    "n_layer=2",
    "--set",
    "d_model=256",
    "--set",
    "n_head=4",
    "--seq",
    "64",
    "--global-batch",
    "8",
    "--cluster",
    "cpu:2",
    "--profile",
    "analytic",
)
PIPELINE = "pp=2,microbatches=4,schedule=1f1b"
STARVED = """
import ctypes, os, resource
import gpt
from gpt import build_model, build_optimizer, example_batch

M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)


def build_data(rank, world, *, global_batch=8, seq=64, seed=0, start=0):
    batches = gpt.build_data(
        rank, world, global_batch=global_batch, seq=seq, seed=seed, start=start
    )
    for step, batch in enumerate(batches, start):
        if step == 1 and os.environ["RANK"] == "1":
            pages = int(open("/proc/self/statm").read().split()[0])
            used = pages * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 100_000, used + 100_000))
        yield batch
"""
"""The example, in which rank 1 may allocate nothing more from its second step on. What it frees
goes back to the system: no step can do with the memory of the one before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("starved")
    (path / "gpt.py").write_text((ROOT / "examples" / "gpt.py").read_text())
    (path / "model.py").write_text(STARVED)
    planned = run_python(
        "-m",
        "autoparallel",
        "plan",
        "model.py",
        *SIZES,
        "--parallel",
        f"{PIPELINE},recompute=none",
        "-o",
        "plan.json",
        folder=path,
    )
    assert planned.returncode == 0, planned.stderr
    return path


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return load_plan(folder / "plan.json")


@pytest.mark.slow
def test_a_run_says_what_was_held_and_its_advice_gives_a_smaller_plan(folder: Path) -> None:
    done = run_python("-m", "autoparallel", "run", "plan.json", "--steps", "4", folder=folder)
    assert done.returncode == 22, done.stdout + done.stderr
    assert re.search(r"error\[AP803\]: rank 1 of 2 ran out of memory \(\d", done.stderr), (
        done.stderr
    )
    row = re.search(r"optimizer states +([\d.]+) MiB +([\d.]+) MiB", done.stderr)
    assert row is not None, done.stderr
    assert float(row[1]) == pytest.approx(float(row[2]), rel=0.01)
    limit = re.search(r"--memory-limit (\d+MiB)", done.stderr)
    assert limit is not None, done.stderr
    again = run_python(
        "-m",
        "autoparallel",
        "plan",
        "model.py",
        *SIZES,
        "--memory-limit",
        limit[1],
        "--parallel",
        "pp=2,schedule=1f1b",
        "-o",
        "smaller.json",
        folder=folder,
    )
    assert again.returncode == 0, again.stderr
    smaller = load_plan(folder / "smaller.json")
    assert smaller.prediction.peak_memory_bytes <= parse_bytes(limit[1])


def test_the_fastest_alternative_below_the_limit_is_named(plan: Plan) -> None:
    peak = plan.prediction.peak_memory_bytes
    sizes = {"too large": (1.0, 1.0), "fast": (2.0, 0.8), "slow": (3.0, 0.5)}
    alternatives = tuple(
        Alternative(name, seconds, round(part * peak), "")
        for name, (seconds, part) in sizes.items()
    )
    text = next_plan(replace(plan, alternatives=alternatives), 0, 10 * peak)
    assert f"--memory-limit {0.9 * peak / 2**20:.0f}MiB" in text
    assert "keeps it is fast (2.00 s a step" in text
    none = next_plan(replace(plan, alternatives=alternatives[:1]), 0, 10 * peak)
    assert none.endswith("no alternative in this plan keeps it")


def test_where_less_was_available_than_planned_the_limit_is_below_that(plan: Plan) -> None:
    half = plan.prediction.peak_memory_bytes // 2
    assert f"--memory-limit {0.9 * half / 2**20:.0f}MiB" in next_plan(plan, 1, half)


def test_what_is_held_beside_states_is_in_one_row_and_rows_add_up(plan: Plan) -> None:
    states = {"parameters": 2 * 2**20, "master": 2**20, "gradients": 2**20}
    rows = comparison(plan, 0, states, 10 * 2**20).splitlines()
    assert rows[1].split()[:3] == ["parameters", "3.00", "MiB"]
    assert rows[-2].split()[:6] == ["activations", "and", "the", "rest", "6.00", "MiB"]
    assert rows[-1].split()[:3] == ["total", "10.0", "MiB"]


def test_other_errors_pass_unchanged(plan: Plan) -> None:
    ranks = Ranks(0, 2, store=None)  # type: ignore[arg-type]  # never asked
    worker = Worker(0, 2, 0, Watchdog(1.0, name="rank 0 of 2", ranks=ranks))
    watched = explained_memory_errors(plan, worker, dict, lambda: 0)
    with pytest.raises(KeyError, match="a name"), watched:
        raise KeyError("a name")
    watched = explained_memory_errors(plan, worker, dict, lambda: 5)
    with pytest.raises(DeviceMemoryError, match="ran out of memory"), watched:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
