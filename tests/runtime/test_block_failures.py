"""A rank that hangs: the others say in which block and collective they wait, and what it is at.

Two ranks without a pipeline; one of them stops (SIGSTOP) in a block of our choice, or waits for its
data for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import HangError
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TINY = ("n_layer=2", "d_model=32", "n_head=2", "seq=16")
START_SECONDS, TIMEOUT_SECONDS = 90.0, 4.0


def plan_file(folder: Path, parallel: str) -> Path:
    path = folder / "plan.json"
    forced = parse_parallel(parallel)
    options = PlanOptions(global_batch=4, seq=16, profile="analytic", forced=forced)
    save_plan(make_plan(load_target(str(GPT), parse_settings(TINY)), "cpu:2", options), path)
    return path


def hangs(worker: Worker, plan_path: str, at: str) -> dict[str, Any]:
    """Trains; in its second step rank 1 stops in block ``at``, in the backward of that block where
    ``at`` ends with "'", or for its data."""
    from autoparallel.runtime.parameters import zero
    from autoparallel.runtime.parameters.stage import StageBlock
    from autoparallel.training.data import TrainingData
    from autoparallel.training.worker import train

    zero.GROUP_BYTES = zero.TINY_BYTES = 0  # each block is gathered alone, however small
    tell, begun = worker.watchdog.progress, [0]

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(what, waits_for)
        if what == "between steps":
            worker.watchdog.timeout_seconds = TIMEOUT_SECONDS
            begun[0] += 1

    def stop() -> None:
        time.sleep(0.5)  # what it has sent arrives before
        os.kill(os.getpid(), signal.SIGSTOP)

    forward, begin_backward = StageBlock.forward, StageBlock._begin_backward
    take = TrainingData.__next__

    def stopping(self: StageBlock, *inputs: Any) -> Any:
        if begun[0] and self.name == at:
            stop()
        return forward(self, *inputs)

    def stopping_backward(self: StageBlock, *values: Any) -> None:
        begin_backward(self, *values)
        if begun[0] and f"{self.name}'" == at:
            stop()

    def never(self: TrainingData) -> Any:
        if begun[0] and at == "data":
            worker.watchdog.progress("loading batch 2")
            threading.Event().wait()
        return take(self)

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    if worker.rank == 1:
        StageBlock.forward = stopping  # type: ignore[method-assign]
        StageBlock._begin_backward = stopping_backward  # type: ignore[method-assign]
        TrainingData.__next__ = never  # type: ignore[method-assign]
    return train(worker, plan_path=plan_path, steps=1000, seed=0)


def why_it_hung(folder: Path, monkeypatch: Any, parallel: str, at: str) -> str:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(HangError) as caught:
        launch(
            "test_block_failures:hangs",
            {"plan_path": str(plan_file(folder, parallel)), "at": at},
            num_processes=2,
            timeout_seconds=START_SECONDS,
            environment=ALONE,
        )
    assert caught.value.exit_code == 21
    return caught.value.why


@pytest.mark.slow
def test_a_rank_whose_data_never_comes_says_so(tmp_path, monkeypatch):
    """Where a data loader waits for ever, the main thread is in it; ours is in the test."""
    why = why_it_hung(tmp_path, monkeypatch, "dp=2,zero=0", "data")
    assert "in block head, all_reduce over dp; rank 1: loading batch 2" in why
    assert "rank 1 failed to come: it was at loading batch 2" in why


@pytest.mark.parametrize(
    ("parallel", "at", "words"),
    [
        # rank 1 has begun to gather the block after the one in which it stops, but not the next
        ("dp=2,zero=3", "layers.0", "in block head, all-gather of its parameters"),
        pytest.param(
            "tp=2", "layers.1", "in block layers.1, all_gather over tp", marks=pytest.mark.slow
        ),
        pytest.param(
            "tp=2", "layers.1'", "in the backward of block layers.1, all_", marks=pytest.mark.slow
        ),
        pytest.param(
            "dp=2,zero=3",
            "head'",
            "in the backward of block head, all-gather",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_block_and_the_collective_are_named(tmp_path, monkeypatch, parallel, at, words):
    why = why_it_hung(tmp_path, monkeypatch, parallel, at)
    assert words in why
    assert "rank 1 failed to come: it does not answer" in why
