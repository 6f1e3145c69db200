"""A SIGTERM ends a run that saves checkpoints after a step that all ranks agree on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import run_torchrun
from forked_interpreters import ForkedInterpreter
from processes import run_processes

from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch import membership
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.membership import Stop
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.watchdog import Watchdog
from autoparallel.target.load import load_target

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
ALONE["OMP_NUM_THREADS"] = "1"
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TINY = ("n_layer=2", "d_model=32", "n_head=2", "seq=16")
ASKED = 3
"""The step in which a rank gets the signal."""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    forced = parse_parallel("pp=2,microbatches=2,schedule=1f1b")
    options = PlanOptions(global_batch=4, seq=16, profile="analytic", forced=forced)
    save_plan(make_plan(load_target(str(GPT), parse_settings(TINY)), "cpu:2", options), path)
    return path


def is_asked(worker: Worker, **arguments: Any) -> dict[str, Any]:
    """Trains; rank 1 alone gets SIGTERM in the middle of its step ``ASKED``."""
    from autoparallel.training.worker import train

    tell, seen = worker.watchdog.progress, []

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(what, waits_for)
        if worker.rank == 1 and what.startswith("1B0: computing"):
            seen.append(what)
            if len(seen) == ASKED:
                stop = worker.watchdog.before_ending.__self__  # type: ignore[union-attr]
                os.kill(os.getpid(), signal.SIGTERM)
                while stop._asked_seconds is None:  # a thread asks
                    time.sleep(0.01)

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    return train(worker, **arguments)


def losses(plan_path: Path, entry: str, **arguments: Any) -> list[float]:
    found: dict[str, Any] = launch(
        entry,
        {"plan_path": str(plan_path), "seed": 0, **arguments},
        num_processes=2,
        environment=ALONE,
    )
    values: list[float] = found["losses"]
    return values


@pytest.mark.slow
def test_a_rank_s_signal_ends_the_step_of_all_and_a_resumed_run_goes_on_exactly(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    saving = {"folder": str(tmp_path / "run")}
    stopped = losses(plan_path, "test_stopping:is_asked", steps=1000, saving=saving)
    assert f"ended by SIGTERM after step {len(stopped)}, which is saved" in capfd.readouterr().err
    assert len(stopped) == ASKED
    assert (tmp_path / "run" / f"step-{ASKED:08d}").is_dir()
    entry = "autoparallel.training.worker:train"
    resumed = losses(plan_path, entry, steps=2, resume=str(tmp_path / "run"))
    whole = losses(plan_path, entry, steps=ASKED + 2)
    assert stopped + resumed == whole


class Command:
    """``autoparallel run`` in a process of its own, until its first step is done."""

    def __init__(
        self, plan_path: Path, folder: Path, *options: str, start: Any = ForkedInterpreter
    ) -> None:
        self.out, self.err = folder / "out", folder / "err"
        arguments = [sys.executable, "-m", "autoparallel", "run", str(plan_path)]
        arguments += ["--steps", "1000000", *options]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = start(arguments, env=ALONE, stdout=out, stderr=err)
        deadline = time.monotonic() + 120
        while "step    1" not in self.out.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Its exit code and stderr."""
        return self.process.wait(60), self.err.read_text()


def test_a_signal_to_the_command_ends_it_well(plan_path: Path, tmp_path: Path) -> None:
    command = Command(plan_path, tmp_path, "--save", str(tmp_path / "run"))
    os.kill(command.process.pid, signal.SIGTERM)
    code, err = command.ended()
    assert code == 0, err
    found = re.search(r"ended by SIGTERM after step (\d+), which is saved", err)
    assert found is not None
    assert (tmp_path / "run" / f"step-{int(found[1]):08d}").is_dir()


@pytest.mark.slow
def test_without_checkpoints_a_signal_ends_the_command_at_once(
    plan_path: Path, tmp_path: Path
) -> None:
    command = Command(plan_path, tmp_path)
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.ended()[0] == 128 + signal.SIGTERM


def status_of(pid: str, field: str) -> str:
    """Returns the first word of ``field`` in the kernel's status of a process."""
    found = re.search(rf"^{field}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def is_stopped(pid: str) -> bool:
    return status_of(pid, "State") == "T"


def waits_for_sigterm(pid: str) -> bool:
    """Whether a stopped process has got SIGTERM, which it handles when it goes on."""
    return bool(int(status_of(pid, "ShdPnd"), 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once(plan_path: Path, tmp_path: Path) -> None:
    """The ranks are stopped, so that no step ends any more."""
    saves = str(tmp_path / "run")
    command = Command(plan_path, tmp_path, "--save", saves, start=subprocess.Popen)
    pid = command.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    while not all(map(is_stopped, children)):  # before it stops, a process would take SIGTERM first
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    while not any(map(waits_for_sigterm, children)):
        assert command.process.poll() is None
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert command.ended()[0] == 128 + signal.SIGTERM


def signalled(seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], bool]:
    """The exit codes of a process that gets two signals, ``seconds`` apart, and whether it stops
    after its step."""
    now, heard = [100.0], threading.Semaphore(0)
    codes: list[int] = []
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watchdog = Watchdog(60.0, name="rank 0 of 1", report=lambda error: None, end=codes.append)
    terminate = watchdog.terminate

    def terminate_and_tell() -> None:
        terminate()
        heard.release()

    watchdog.terminate = terminate_and_tell  # type: ignore[method-assign]
    with Stop(watchdog, is_behind=False) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard.acquire(timeout=60.0)
            now[0] += seconds
        return codes, stop.is_agreed()


@pytest.fixture
def default_handling():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_signals_that_come_together_are_one(default_handling, monkeypatch) -> None:
    assert signalled(membership.SAME_SECONDS - 0.1, monkeypatch) == ([], True)
    assert signalled(membership.SAME_SECONDS + 0.1, monkeypatch)[0] == [21]


def votes(is_behind: bool) -> list[bool]:
    """What five steps end with, where rank 1 is asked in the third."""
    import torch.distributed as dist

    stop = Stop(Watchdog(60.0, name="a rank"), is_behind=is_behind)
    found = []
    for step in range(1, 6):
        if step == 3 and dist.get_rank() == 1:
            stop.ask()
        found.append(stop.is_agreed())
    return found


@pytest.mark.parametrize("is_behind", [False, True])
def test_all_ranks_end_after_the_same_step(is_behind: bool) -> None:
    late = [False, False, not is_behind, True, True]
    assert run_processes(2, votes, is_behind) == [late, late]


def test_under_torchrun_a_signal_to_every_rank_ends_them_well(
    plan_path: Path, tmp_path: Path
) -> None:
    script = Path(__file__).parents[1] / "support" / "rank_of_torchrun.py"
    saving = {"folder": str(tmp_path / "run")}
    arguments = {"plan_path": str(plan_path), "seed": 0, "steps": 1000, "saving": saving}
    done = run_torchrun(script, "test_stopping:is_asked", json.dumps(arguments), "60")
    assert done.returncode == 0, done.stderr
    assert f"ended by SIGTERM after step {ASKED}, which is saved" in done.stderr
    assert (tmp_path / "run" / f"step-{ASKED:08d}").is_dir()
