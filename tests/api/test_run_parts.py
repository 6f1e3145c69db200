"""Parts of a run and of a verification, each with the others stood in for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from handmade import pipeline_plan

from autoparallel.planner.errors import AutoparallelError, MachineError, VerificationError
from autoparallel.planner.plan_file import dumps
from autoparallel.runtime.checkpoint.folder import STATE, complete_checkpoints
from autoparallel.training import start as training
from autoparallel.training.callbacks import Callback
from autoparallel.training.restart import RECORD, Attempt, begin_attempt
from autoparallel.training.steps import RunSaves, Saving


def test_a_restart_goes_on_from_the_newest_checkpoint_of_its_own_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(step: int) -> str:
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        for name in (STATE, ".metadata", "checkpoint.json"):
            (folder / name).write_text("{}")
        assert str(folder) in map(str, complete_checkpoints(tmp_path))
        return str(folder)

    def begun(restarts: int) -> Attempt:
        worker = cast(Any, SimpleNamespace(restarts=restarts, rank=0))
        return begin_attempt(worker, str(tmp_path), "given")

    written(10)
    first = begun(0)
    assert (first.is_restart, first.resume) == (False, "given")
    assert first.begin_after(10, 20, rank=0) == 30
    assert json.loads((tmp_path / RECORD).read_text())["last_step"] == 30
    assert first.last_kept(10) is None
    again = begun(1)
    assert (again.is_restart, again.resume) == (True, "given")  # nothing of its own yet
    own = written(20)
    again = begun(1)
    assert (again.resume, again.last, again.last_kept(20)) == (own, 30, 20)
    assert again.begin_after(20, 20, rank=0) == 30
    assert capsys.readouterr().err == (f"autoparallel: the run goes on after step 20, from {own}\n")
    assert again.begin_after(30, 20, rank=0) == 30
    assert "all of its steps are done" in capsys.readouterr().err
    begun(0)
    assert not (tmp_path / RECORD).exists()
    no_folder = begin_attempt(cast(Any, SimpleNamespace(restarts=1, rank=0)), None, None)
    no_folder.begin_after(0, 5, rank=0)
    assert "at its first step: without --save there is no checkpoint" in capsys.readouterr().err


class Checkpoints:
    """Writes nothing; the saves of some steps fail, at once or in the background."""

    def __init__(self, failing: tuple[int, ...] = (), why: str = "the disk is full") -> None:
        self.failing, self.why = failing, why
        self.saved: list[int] = []
        self.pending: MachineError | None = None

    def save(self, folder: str, *, step: int, asynchronous: bool, **others: Any) -> None:
        if step not in self.failing:
            self.saved.append(step)
            return
        error = MachineError("AP886", "the checkpoint cannot be written", why=self.why)
        if not asynchronous:
            raise error
        self.pending = error

    def check(self) -> None:
        error, self.pending = self.pending, None
        if error is not None:
            raise error

    wait = check


def saves(checkpoints: Checkpoints, how: Saving, told: list[Any]) -> RunSaves:
    nothing = SimpleNamespace(finish=lambda: None, restart=lambda: None)
    trainer: Any = SimpleNamespace(
        checkpoints=checkpoints, save=checkpoints.save, optimizer=None, steps=nothing
    )
    worker: Any = SimpleNamespace(rank=0, watchdog=SimpleNamespace(progress=told.append))

    class Told(Callback):
        def on_checkpoint(self, step: int, path: Path) -> None:
            told.append((step, path.name))

    return RunSaves(how, trainer, worker, cast(Any, nothing), Told())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_in_a_run_is_shown_and_the_next_tries_again(
    asynchronous: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, told = Checkpoints(failing=(2,)), list[Any]()
    run = saves(checkpoints, Saving("saved", every=2, asynchronous=asynchronous), told)
    for step in range(1, 6):
        run.save_after(step, is_last=step == 5)
    assert checkpoints.saved == [4, 5]
    shown = capsys.readouterr().err
    assert shown.count("training goes on without a checkpoint") == 1
    assert f"step {3 if asynchronous else 2}: training goes on" in shown
    assert [each[0] for each in told if isinstance(each, tuple)][-2:] == [4, 5]
    assert "writing the checkpoint of step 4" in told
    assert told[-1] == "waiting for the last checkpoint"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_save_ends_the_run_if_it_fails(asynchronous: bool) -> None:
    run = saves(Checkpoints(failing=(4,)), Saving("saved", asynchronous=asynchronous), [])
    run.save_after(3, is_last=False)
    with pytest.raises(MachineError, match="AP886"):
        run.save_after(4, is_last=True)


def test_a_save_that_a_lost_rank_ends_is_not_one_to_go_on_from() -> None:
    checkpoints = Checkpoints(failing=(2,), why="Connection reset by peer")
    with pytest.raises(MachineError, match="AP886"):
        saves(checkpoints, Saving("saved", every=2), []).save_after(2, is_last=False)


FOUND = {
    "passed": True,
    "num_compared": 7,
    "dtype": "fp64",
    "tolerance": 1e-6,
    "worst": {"loss": 1e-12},
    "failures": [],
}


def verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """What the ranks of a verification are started with; they find ``found``."""
    started: dict[str, Any] = {}

    def launch(entry: str, given: Any, **how: Any) -> Any:
        started.update(given, entry=entry, **how)
        return found

    monkeypatch.setattr(training, "launch", launch)
    monkeypatch.setattr(training, "check_devices_here", lambda cluster: None)
    monkeypatch.setattr(training, "mark_verified", lambda plan: started.update(marked=True))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [os.getcwd()])
    (folder / "plan.json").write_text(dumps(pipeline_plan()))
    given = {"dtype": "fp64", "json_output": False, **options}
    try:
        training.start_verification(folder / "plan.json", **given)
    except AutoparallelError as error:
        started["error"] = error
    return started


def test_a_verification_that_passes_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = verified(tmp_path, monkeypatch, FOUND)
    assert started["entry"] == "autoparallel.training.worker:verify"
    assert started["num_processes"] == pipeline_plan().cluster.num_devices
    assert started["marked"]
    assert "error" not in started
    shown = capsys.readouterr().out
    assert "\nverified: 7 tensors compared with one device in fp64\n" in shown
    assert "loss 1.0e-12 (allowed 1e-06)" in shown
    verified(tmp_path, monkeypatch, FOUND, json_output=True)
    assert json.loads(capsys.readouterr().out)["result"] == FOUND


def test_a_verification_that_fails_names_the_first_tensor_and_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"quantity": "gradient", "name": "w", "relative": 0.5, "block": "layers.3"}
    started = verified(
        tmp_path, monkeypatch, {**FOUND, "passed": False, "failures": [failure, failure]}
    )
    assert "marked" not in started
    error = started["error"]
    assert isinstance(error, VerificationError)
    assert error.code == "AP601"
    assert error.what == "the gradient of w differs from one device"
    assert error.where == "block layers.3"
    assert "2 of 7 tensors differ" in error.fix
    assert "NOT verified" in capsys.readouterr().out


def test_a_verification_in_an_unknown_dtype_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = verified(tmp_path, monkeypatch, FOUND, dtype="int8")
    assert "entry" not in started
    assert started["error"].code == "AP119"
