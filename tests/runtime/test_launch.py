"""Launching: what workers return, and every way in which one can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoparallel.planner.errors import (
    AutoparallelError,
    DeviceMemoryError,
    HangError,
    UsageError,
    VerificationError,
    WorkerError,
)
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.watchdog import Watchdog

HERE = "test_launch"
ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


@pytest.fixture(autouse=True)
def workers_find_this_file(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def start(function: str, num_processes: int = 2, **options):
    arguments = options.pop("arguments", {})
    environment = options.pop("environment", ALONE)
    return launch(
        f"{HERE}:{function}",
        arguments,
        num_processes=num_processes,
        environment=environment,
        **options,
    )


def tells(worker: Worker, text: str) -> dict[str, object]:
    print(f"{text} from {worker.rank}")
    print(f"aside from {worker.rank}", file=sys.stderr)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return {"rank": worker.rank, "environment": [os.environ[name] for name in names]}


def identifies(worker: Worker) -> list[int]:
    return [os.getpid(), worker.rank, worker.world_size, worker.local_rank]


def sums(worker: Worker) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", **worker.meet())
    value = torch.full((), worker.rank + 1.0)
    dist.all_reduce(value)
    return value.item()


def raises(worker: Worker, rank: int) -> None:
    if worker.rank == rank:
        raise KeyError("no such thing")
    threading.Event().wait()


def raises_ours(worker: Worker) -> None:
    if worker.rank == 1:
        raise VerificationError("AP601", "the loss differs", why="by 3", where="block 2", fix="x")
    time.sleep(60)


def exits(worker: Worker) -> None:
    if worker.rank == 1:
        os._exit(3)
    time.sleep(60)


def is_killed(worker: Worker) -> None:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleeps(worker: Worker) -> None:
    """Only rank 1 hangs for long; the others have just told something."""
    if worker.rank != 1:
        for _ in range(600):
            worker.watchdog.progress("waiting for rank 1")
            time.sleep(0.1)
    worker.watchdog.progress(f"1F0: waiting for activations (stage {worker.rank}, micro-batch 0)")
    time.sleep(60)


def is_slow_but_alive(worker: Worker) -> int:
    for number in range(8):
        worker.watchdog.progress(f"step {number}")
        time.sleep(0.25)
    return 8


def runs_out_of_memory(worker: Worker) -> None:
    if worker.rank == 1:
        raise MemoryError("can't allocate 400 GB")
    time.sleep(60)


def allocates_too_much(worker: Worker) -> None:
    import torch

    torch.empty(1 << 50, dtype=torch.uint8)


def loses_its_peer(worker: Worker) -> None:
    """Rank 1 dies in silence; rank 0's collective then fails, which is not the cause."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", **worker.meet())
    dist.barrier()
    if worker.rank == 1:
        os._exit(9)
    dist.all_reduce(torch.zeros(1))


def leaves_its_pid(worker: Worker, folder: str) -> None:
    path = Path(folder) / f"{worker.rank}.partial"
    path.write_text(str(os.getpid()))
    path.rename(Path(folder) / f"{worker.rank}.pid")
    time.sleep(60)


def test_rank_0_returns_its_value_and_owns_stdout(capfd):
    value = start("tells", 3, arguments={"text": "hello"})
    assert value == {"rank": 0, "environment": ["0", "3", "0", "3", "1"]}
    out, err = capfd.readouterr()
    assert out == "hello from 0\n"
    for rank in (1, 2):
        assert f"[rank {rank}] hello from {rank}\n" in err
        assert f"[rank {rank}] aside from {rank}\n" in err
    assert "\naside from 0" in f"\n{err}"


def test_workers_find_each_other():
    assert start("sums") == 3.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_raises_ends_the_others_and_shows_its_traceback(rank):
    """The others would wait for ever."""
    with pytest.raises(WorkerError) as caught:
        start("raises", 3, arguments={"rank": rank})
    error = caught.value
    assert error.exit_code == 20
    assert error.what == f"rank {rank} of 3 failed: KeyError: 'no such thing'"
    assert "Traceback (most recent call last)" in error.why
    assert "test_launch.py" in error.where
    assert error.where.endswith("in raises")


def test_an_error_of_ours_keeps_its_kind_and_its_exit_code():
    with pytest.raises(VerificationError) as caught:
        start("raises_ours")
    error = caught.value
    assert error.exit_code == 7
    assert (error.code, error.what, error.why) == ("AP601", "the loss differs", "by 3")
    assert (error.where, error.fix) == ("block 2", "x")


def test_a_worker_that_exits_without_a_word_is_named():
    with pytest.raises(WorkerError, match="rank 1 of 2 exited with code 3"):
        start("exits")


def test_a_worker_that_is_killed_is_named_with_its_signal():
    with pytest.raises(WorkerError, match="rank 1 of 2 died") as caught:
        start("is_killed")
    assert "SIGKILL" in caught.value.why


def test_the_rank_that_died_is_blamed_not_the_one_that_lost_its_connection():
    with pytest.raises(WorkerError, match="rank 1 of 2 exited with code 9"):
        start("loses_its_peer")


def test_a_hang_is_ended_and_says_what_each_rank_waited_for():
    with pytest.raises(HangError) as caught:
        start("sleeps", timeout_seconds=1.0)
    error = caught.value
    assert error.exit_code == 21
    assert "made no progress for 1 s" in error.what
    assert "rank 1: 1F0: waiting for activations (stage 1, micro-batch 0)" in error.why
    assert error.where.endswith("in sleeps")


def test_progress_keeps_a_slow_worker_alive():
    assert start("is_slow_but_alive", timeout_seconds=1.5) == 8


@pytest.mark.parametrize("function", ["runs_out_of_memory", "allocates_too_much"])
def test_running_out_of_memory_has_its_own_exit_code(function):
    with pytest.raises(DeviceMemoryError, match=r"rank \d of 2 ran out of memory") as caught:
        start(function)
    assert caught.value.exit_code == 22


def test_no_such_function_is_a_failed_worker():
    with pytest.raises(AutoparallelError, match="nothing_of_this_name"):
        start("nothing_of_this_name", 1)


def torchrun(rank: int, world_size: int) -> dict[str, str]:
    return {**ALONE, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "1"}


def test_under_torchrun_the_function_runs_in_this_process():
    assert start("identifies", 4, environment=torchrun(2, 4)) == [os.getpid(), 2, 4, 1]


def test_under_torchrun_errors_are_raised_here():
    with pytest.raises(WorkerError, match="rank 1 of 2 failed: KeyError"):
        start("raises", 2, arguments={"rank": 1}, environment=torchrun(1, 2))


def test_torchrun_with_another_number_of_processes_is_a_usage_error():
    with pytest.raises(UsageError, match="needs 2 processes, torchrun started 3"):
        start("tells", 2, environment=torchrun(0, 3))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_workers_end_with_the_launcher(tmp_path, sign):
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from autoparallel.runtime.launch.launch import launch\n"
        f"launch('{HERE}:leaves_its_pid', {{'folder': {str(tmp_path)!r}}}, num_processes=2)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], env=ALONE, stderr=subprocess.DEVNULL
    )
    paths = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(path.read_text()) for path in paths]
    assert all(map(alive, pids))
    launcher.send_signal(sign)
    assert launcher.wait(20) != 0
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def test_the_watchdog_reports_the_last_thing_told_and_then_ends_the_process():
    reports: list[HangError] = []
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with Watchdog(0.2, name="rank 3 of 4", report=reports.append, end=end) as watchdog:
        watchdog.progress("2B1: waiting for gradients")
        assert ended.wait(10)
    assert codes == [21]
    assert reports[0].what == "rank 3 of 4 made no progress for 0.2 s"
    assert reports[0].why == "2B1: waiting for gradients"


def test_the_time_of_a_watchdog_begins_again_with_all_progress(monkeypatch):
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr("autoparallel.runtime.messages.watchdog.time", clock)
    watchdog = Watchdog(1.0, name="rank 0")
    for number in range(12):
        clock.seconds = 0.9 * number
        watchdog.progress("going on")
    clock.seconds += 0.9
    assert watchdog._left_seconds() == pytest.approx(0.1)


def test_a_watchdog_whose_block_has_ended_ends_no_process():
    codes: list[int] = []
    with Watchdog(0.2, name="rank 0", end=codes.append) as watchdog:
        watchdog.progress("going on")
    assert not watchdog._thread.is_alive()
    assert codes == []


def fails_while_others_wait(worker: Worker) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", **worker.meet())
    if worker.rank == 1:
        raise ValueError("the disk is gone")
    dist.barrier()


def test_an_error_comes_once_and_names_the_ranks_that_stopped(capfd) -> None:
    with pytest.raises(WorkerError) as caught:
        start("fails_while_others_wait", 3)
    lines = str(caught.value).splitlines()
    assert "ValueError: the disk is gone" in lines[0]
    assert lines[-1] == "  ranks 0, 2 stopped because of it"
    assert "error[" not in capfd.readouterr().err
