"""A slow rank of a run is named on stderr whatever the plan, and no rank of a healthy run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from script_ranks import group_of_one

from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import gather_values
from autoparallel.runtime.profile.stragglers import (
    StragglerWatch,
    find_straggler,
    is_waiting,
)
from autoparallel.target.load import load_target

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TINY = ("n_layer=4", "d_model=64", "n_head=2", "seq=64")
PLANS = {
    "data": "dp=4,zero=0",
    "zero3": "dp=4,zero=3",
    "tensor": "tp=4",
    "pipeline": "pp=4,microbatches=4,schedule=1f1b",
    "both": "dp=2,pp=2,microbatches=4,schedule=1f1b",
    "chimera": "pp=4,microbatches=4,schedule=chimera",
}
SLOW = 1
SLOW_CASES = [(plan, kind) for plan in PLANS for kind in ("data", "ops", "stops")]
WINDOW_SECONDS = 0.5
HEALTHY_WINDOWS, MOST_WINDOWS = 8, 30
"""For so many windows a healthy run goes on, and one with a slow rank unless it is named."""


def plan_file(folder: Path, plan: str, num_ranks: int = 4) -> Path:
    path = folder / "plan.json"
    forced = parse_parallel(PLANS.get(plan, plan))
    options = PlanOptions(global_batch=8, seq=64, profile="analytic", forced=forced)
    target = load_target(str(GPT), parse_settings(TINY))
    save_plan(make_plan(target, f"cpu:{num_ranks}", options), path)
    return path


def trains_with_a_slow_rank(
    worker: Worker, plan_path: str, folder: str, kind: str, windows: int
) -> list[int]:
    """Trains until a rank is named, or so many windows are over; the ranks named."""
    from autoparallel.training import steps as straggler_check
    from autoparallel.training import worker as entries

    straggler_check.WINDOW_SECONDS = WINDOW_SECONDS
    found: list[int] = []
    seen: list[Any] = []
    compare, is_over = StragglerWatch.compare, threading.Event()

    def recorded(self: StragglerWatch, times: list[tuple[float, float]]) -> Any:
        seen.append(times)
        named = compare(self, times)
        if named is not None:
            found.append(named.rank)
        if named is not None or len(seen) == windows:
            is_over.set()
        return named

    StragglerWatch.compare = recorded  # type: ignore[method-assign]
    (Path(folder) / str(worker.rank)).write_text(str(os.getpid()))
    if worker.rank == SLOW and kind in ("data", "ops"):
        _slow_down(kind)
    if worker.rank == 0 and kind == "stops":
        threading.Thread(target=_stop_again_and_again, args=(Path(folder), is_over)).start()
    tell = worker.watchdog.progress

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(what, waits_for)
        if is_over.is_set() and what == "between steps":
            raise StopIteration

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    try:
        entries.train(worker, plan_path=plan_path, steps=100_000, seed=0)
    except StopIteration:
        is_over.set()
    return found


def _slow_down(kind: str) -> None:
    """From now on this process waits for each batch as long as all the rest takes, or takes 4 times
    as long for each block."""
    from autoparallel.runtime.parameters.stage import StageBlock
    from autoparallel.training.data import TrainingData

    take, forward = TrainingData.__next__, StageBlock.forward
    last = time.perf_counter()

    def late(self: TrainingData) -> Any:
        nonlocal last
        time.sleep(min(1.0, time.perf_counter() - last))
        last = time.perf_counter()
        return take(self)

    def slow(self: StageBlock, *inputs: Any) -> Any:
        began = time.perf_counter()
        outputs = forward(self, *inputs)
        time.sleep(3 * (time.perf_counter() - began))
        return outputs

    if kind == "data":
        TrainingData.__next__ = late  # type: ignore[method-assign]
    else:
        StageBlock.forward = slow  # type: ignore[method-assign]


def _stop_again_and_again(folder: Path, is_over: threading.Event) -> None:
    path = folder / str(SLOW)
    while not path.exists():
        time.sleep(0.1)
    slow = int(path.read_text())
    try:
        while not is_over.wait(0.05):
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(slow, signal.SIGCONT)
    finally:
        os.kill(slow, signal.SIGCONT)


def run(
    folder: Path, monkeypatch: Any, plan: str, kind: str, windows: int, num_ranks: int = 4
) -> list[int]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (folder / "pids").mkdir()
    found: list[int] = launch(
        "test_stragglers:trains_with_a_slow_rank",
        {
            "plan_path": str(plan_file(folder, plan, num_ranks)),
            "folder": str(folder / "pids"),
            "kind": kind,
            "windows": windows,
        },
        num_processes=num_ranks,
        environment=ALONE,
        timeout_seconds=120.0,
    )
    return found


def check_named(
    folder: Path, monkeypatch: Any, capfd: Any, plan: str, kind: str, num_ranks: int = 4
) -> None:
    assert run(folder, monkeypatch, plan, kind, MOST_WINDOWS, num_ranks) == [SLOW]
    assert f"rank {SLOW} is slow: it waits for others " in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_waits_for_its_data_is_named(tmp_path, monkeypatch, capfd):
    check_named(tmp_path, monkeypatch, capfd, "dp=2,zero=0", "data", num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "kind"), SLOW_CASES)
def test_a_slow_rank_is_named_whatever_the_plan(tmp_path, monkeypatch, capfd, plan, kind):
    check_named(tmp_path, monkeypatch, capfd, plan, kind)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_no_rank_of_a_healthy_run_is_named(tmp_path, monkeypatch, capfd, plan):
    """Four ranks on however many cores there are, which others may use as well."""
    assert run(tmp_path, monkeypatch, plan, "healthy", HEALTHY_WINDOWS) == []
    assert "is slow" not in capfd.readouterr().err


def test_ranks_of_a_stage_are_compared_with_each_other():
    """Stage 0 works twice as long as planned on both ranks: it is not a rank that is slow."""
    works, planned = [0.9, 0.9, 0.3, 0.3], [0.5, 0.5, 0.4, 0.4]
    assert find_straggler(works, planned, [0, 0, 1, 1]) is None
    found = find_straggler([0.4, 0.9, 0.3, 0.3], planned, [0, 0, 1, 1])
    assert found is not None
    assert (found.rank, found.is_of_stage) == (1, True)


def test_a_rank_alone_in_its_stage_is_compared_with_what_is_planned():
    planned = [0.4, 0.8, 0.4]
    assert find_straggler([0.4, 0.8, 0.4], planned, [0, 1, 2]) is None
    found = find_straggler([0.9, 0.3, 0.15], planned, [0, 1, 2])
    assert found is not None
    assert (found.rank, found.is_of_stage) == (0, False)


def test_ranks_that_the_plan_leaves_idle_are_not_compared():
    assert find_straggler([0.9, 0.9, 0.0], [0.9, 0.9, 0.0], [0, 0, ()]) is None
    assert find_straggler([0.9, 0.0], [0.9, 0.0], [0, ()]) is None


def test_a_rank_is_named_in_the_second_window_and_then_ever_more_seldom():
    watch = StragglerWatch([1.0] * 3, [0] * 3)
    slow, even = [(0.3, 1.0), (0.9, 1.0), (0.3, 1.0)], [(0.3, 1.0)] * 3
    named = [watch.compare(slow) is not None for _ in range(9)]
    assert [window for window, each in enumerate(named, 1) if each] == [2, 4, 8]
    assert watch.compare(even) is None
    assert watch.compare(slow) is None
    other = [(0.9, 1.0), (0.3, 1.0), (0.3, 1.0)]
    assert watch.compare(other) is None
    assert watch.compare(other) is not None


def test_a_rank_is_compared_with_its_stage_or_else_with_the_others() -> None:
    """As planned the first stage works half as long as the second; here it works as long."""
    planned, stages = [0.4, 0.4, 0.8, 0.8], [0, 0, 1, 1]
    assert find_straggler([0.4, 0.4, 0.8, 0.8], planned, stages) is None
    of_stage = find_straggler([0.4, 0.9, 0.5, 0.5], planned, stages)
    assert of_stage is not None
    assert (of_stage.rank, of_stage.is_of_stage) == (1, True)
    assert str(of_stage) == (
        "rank 1 is slow: it waits for others 10% of the time, the other ranks of its stage wait 60%"
    )
    alone = find_straggler([0.95, 0.3, 0.3], [0.5, 0.5, 0.5], [0, 1, 2])
    assert alone is not None
    assert (alone.rank, alone.is_of_stage) == (0, False)
    assert str(alone).endswith("the other ranks wait 70%")


def test_a_rank_that_the_plan_leaves_idle_or_that_is_alone_is_not_compared() -> None:
    assert find_straggler([0.9, 0.4], [0.5, 0.0], [0, 0]) is None


def test_a_rank_that_works_twice_as_long_as_others_that_hardly_work_is_not_slow() -> None:
    assert find_straggler([0.04, 0.02, 0.02], [0.5, 0.5, 0.5], [0, 0, 0]) is None
    assert find_straggler([0.8, 0.4, 0.4], [0.5, 0.5, 0.5], [0, 0, 0]) is not None


def test_a_wait_is_told_from_the_line_and_the_file_that_a_thread_is_in() -> None:
    """A line that waits for a collective's work waits; a line that computes does not."""

    class Work:
        def wait(self) -> bool:
            return is_waiting(sys._getframe(1))

    assert Work().wait()
    work = Work.wait
    assert not work(Work())


def test_the_times_of_one_rank_are_its_own() -> None:
    with group_of_one():
        assert gather_values((1.5, 3.0)) == [(1.5, 3.0)]
