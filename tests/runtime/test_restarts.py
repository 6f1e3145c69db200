"""Runs that are started again after SIGKILL at random points, as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from marks import slow

from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import (
    AutoparallelError,
    DeviceMemoryError,
    MachineError,
    UsageError,
    WorkerError,
)
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.plan_files import load_plan, save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.checkpoint.folder import complete_checkpoints
from autoparallel.runtime.launch.launch import can_mend, launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import gather_values
from autoparallel.target.load import load_target
from autoparallel.training.metrics import JsonLines
from autoparallel.training.worker import Saving

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
MODEL = Path(__file__).parents[1] / "support" / "dropout_model.py"
STEPS, SAVE_EVERY, POINTS = 9, 2, 20
EXECUTORS = {
    "dp": Forced(dp=2, zero=0),
    "zero1": Forced(dp=2, zero=1),
    "zero2": Forced(dp=2, zero=2),
    "zero3": Forced(dp=2, zero=3),
    "tp": Forced(tp=2),
    "1f1b": Forced(pp=2, schedule="1f1b", num_microbatches=2),
    "zb-h1": Forced(pp=2, schedule="zb-h1", num_microbatches=2),
    "interleaved": Forced(pp=2, schedule="interleaved", chunks=2, num_microbatches=2),
}

Kill = tuple[int, int]
"""A rank, and how many things it has told its watchdog when it is killed."""


@pytest.fixture(autouse=True)
def workers_find_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def plan_for(folder: Path, forced: Forced) -> Path:
    options = PlanOptions(global_batch=8, profile="analytic", forced=forced)
    plan: Plan = make_plan(load_target(str(MODEL)), "cpu:2", options)
    save_plan(plan, folder / "plan.json")
    return folder / "plan.json"


def dies_and_trains(worker: Worker, kills: Sequence[Kill], **arguments: Any) -> Any:
    """Trains; in attempt ``n`` the rank of ``kills[n]`` is killed at that point."""
    from autoparallel.training.worker import train

    rank, point = kills[worker.restarts] if worker.restarts < len(kills) else (0, sys.maxsize)
    tell, told = worker.watchdog.progress, []

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(what, waits_for)
        told.append(what)
        if len(told) == point and worker.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    outcome = train(worker, **arguments)
    return {**outcome, "points": gather_values(len(told))}


def trained(
    plan: Path, folder: Path, kills: Sequence[Kill] = (), **more: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The metrics of a run that saves in ``folder``, without what depends on the clock."""
    metrics = folder / "metrics.jsonl"
    saving = more.pop("saving", Saving(str(folder), every=SAVE_EVERY, keep=2))
    outcome = launch(
        f"{Path(__file__).stem}:dies_and_trains",
        {
            "kills": kills,
            "plan_path": str(plan),
            "steps": STEPS,
            "seed": 3,
            "saving": None if saving is None else asdict(saving),
            "options": {"metrics": str(metrics)},
            **more,
        },
        num_processes=2,
        environment=ALONE,
        max_restarts=len(kills),
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "skipped_steps")
    return [{name: line[name] for name in names} for line in lines], outcome


@pytest.mark.parametrize("executor", [slow("zero3"), slow("zb-h1")])
def test_a_killed_run_gives_the_losses_of_an_unbroken_one(
    executor: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_kills(plan_for(tmp_path, EXECUTORS[executor]), tmp_path, capfd, 1, seed=executor)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_runs_killed_at_many_points_give_the_losses_of_an_unbroken_one(
    executor: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_kills(plan_for(tmp_path, EXECUTORS[executor]), tmp_path, capfd, POINTS, seed=executor)


def check_kills(
    plan: Path, folder: Path, capfd: pytest.CaptureFixture[str], number: int, *, seed: str
) -> None:
    """Runs are killed at ``number`` points and go on; each gives the unbroken run's figures."""
    unbroken, outcome = trained(plan, folder / "unbroken")
    assert [line["step"] for line in unbroken] == list(range(1, STEPS + 1))
    choose = random.Random(seed)
    ranks = [choose.randrange(2) for _ in range(number)]
    left = [(rank, choose.randint(1, outcome["points"][rank])) for rank in ranks]
    runs = 0
    while left:
        runs += 1
        found, _ = trained(plan, folder / f"run{runs}", left)
        assert found == unbroken
        err = capfd.readouterr().err
        used = len(re.findall(r"autoparallel: restart \d+ of \d+", err))
        assert used > 0
        assert "autoparallel: the run goes on" in err
        del left[:used]


def dies_in_its_second_save(worker: Worker, **arguments: Any) -> Any:
    """Trains; rank 1 of the first attempt is killed when it has written its files."""
    from autoparallel.runtime.checkpoint import writer as checkpoint_writer
    from autoparallel.training.worker import train

    write, saves = checkpoint_writer._write_tensors, []

    def written(tensors: Any, folder: Path, group: Any) -> None:
        saves.append(folder)
        if worker.restarts == 0 and worker.rank == 1 and len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(tensors, folder, group)

    checkpoint_writer._write_tensors = written
    return train(worker, **arguments)


@pytest.mark.slow
def test_a_rank_lost_while_a_checkpoint_is_written_is_no_full_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(
        f"{Path(__file__).stem}:dies_in_its_second_save",
        {
            "plan_path": str(plan_for(tmp_path, EXECUTORS["dp"])),
            "steps": 3,
            "seed": 3,
            "saving": asdict(Saving(str(tmp_path / "run"), every=1)),
        },
        num_processes=2,
        environment=ALONE,
        max_restarts=1,
    )
    err = capfd.readouterr().err
    assert "error[AP801]: rank 1 of 2 died" in err
    assert "AP886" not in err
    assert "autoparallel: the run goes on after step 1, from " in err
    assert [path.name[-1] for path in complete_checkpoints(tmp_path / "run")] == ["1", "2", "3"]


@pytest.mark.slow
def test_a_restart_passes_over_checkpoints_of_an_earlier_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first run's last checkpoint is of a later step than any of the second one's."""
    plan = plan_for(tmp_path, EXECUTORS["dp"])
    folder = tmp_path / "run"
    unbroken, outcome = trained(plan, folder)
    assert [path.name for path in complete_checkpoints(folder)][-1] == "step-00000009"
    (folder / "metrics.jsonl").unlink()
    capfd.readouterr()
    kill = (1, int(outcome["points"][1] * 0.2))
    again, _ = trained(plan, folder, [kill], saving=Saving(str(folder)))
    assert again == unbroken
    err = capfd.readouterr().err
    assert "autoparallel: restart 1 of 1" in err
    assert "autoparallel: the run goes on at its first step" in err


def raises_once(worker: Worker, folder: str) -> int:
    if worker.rank == 1 and worker.restarts < 2:
        raise KeyError(f"no such thing in attempt {worker.restarts}")
    print(f"attempt {worker.restarts}")
    return worker.restarts


def exits_with(worker: Worker, kind: str, code: str) -> None:
    from autoparallel.planner import errors

    (Path(os.environ["ATTEMPTS"]) / str(worker.restarts)).touch()
    raise getattr(errors, kind)(code, "as asked")


def test_attempts_follow_one_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = {"folder": str(tmp_path)}
    entry = f"{Path(__file__).stem}:raises_once"
    found = launch(entry, arguments, num_processes=2, environment=ALONE, max_restarts=2)
    assert found == 2
    err = capfd.readouterr().err
    for number in (1, 2):
        assert f"no such thing in attempt {number - 1}" in err
        assert f"autoparallel: restart {number} of 2\n" in err
    assert "[rank 1] attempt 2\n" in err
    with pytest.raises(WorkerError, match="AP801"):
        launch(entry, arguments, num_processes=2, environment=ALONE, max_restarts=1)


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        (UsageError("AP118", ""), 1),
        (MachineError("AP886", ""), 1),
        (WorkerError("AP910", ""), 1),
        (DeviceMemoryError("AP803", ""), 1),
        (WorkerError("AP801", ""), 2),
    ],
)
def test_only_what_a_restart_can_mend_is_started_again(
    error: AutoparallelError, starts: int, tmp_path: Path
) -> None:
    assert can_mend(error) == (starts == 2)
    arguments = {"kind": type(error).__name__, "code": error.code}
    environment = {**ALONE, "ATTEMPTS": str(tmp_path)}
    with pytest.raises(type(error), match=error.code):
        launch(
            f"{Path(__file__).stem}:exits_with",
            arguments,
            num_processes=1,
            environment=environment,
            max_restarts=1,
        )
    assert len(list(tmp_path.iterdir())) == starts


def test_a_restart_removes_the_metrics_of_steps_that_come_again(tmp_path: Path) -> None:
    """Derived by hand: an earlier run of 5 steps, then this one's 3 to 6, the last cut off."""
    path = tmp_path / "metrics.jsonl"
    steps = [1, 2, 3, 4, 5, 3, 4, 5]
    text = "".join(f'{{"step": {step}}}\n' for step in steps)
    for kept, left in ((4, 7), (3, 6), (2, 5), (0, 5), (6, 8)):
        path.write_text(text + '{"step": 6, "lo')
        JsonLines(path, kept=kept).close()
        assert path.read_text().splitlines() == text.splitlines()[:left]
    JsonLines(path).close()
    assert path.read_text().splitlines() == text.splitlines()


KILLED = """
import os, signal
from dropout_model import *
from dropout_model import build_data as whole

def build_data(rank, world, *, global_batch, seed, start):
    for number, each in enumerate(whole(rank, world, global_batch=global_batch, seed=seed,
                                        start=start), start):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if number == 3 and is_first and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        yield each
"""


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "killed_model.py").write_text(KILLED)
    for file in (MODEL,):
        (tmp_path / file.name).write_text(file.read_text())
    plan = plan_for(tmp_path, EXECUTORS["dp"])
    text = plan.read_text()
    unbroken, _ = trained(plan, tmp_path / "unbroken")
    document = load_plan(plan)
    target = str(tmp_path / "killed_model.py")
    save_plan(replace(document, model=replace(document.model, target=target)), plan)
    assert plan.read_text() != text
    done = run_python(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "--max-restarts=1",
        "-m",
        "autoparallel",
        "run",
        "plan.json",
        "--steps",
        str(STEPS),
        "--seed",
        "3",
        "--save",
        "run",
        "--save-every",
        str(SAVE_EVERY),
        "--metrics",
        "metrics.jsonl",
        folder=tmp_path,
        environment={**ALONE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert "autoparallel: the run goes on after step 2, from run/step-00000002" in (
        done.stderr.replace(f"{tmp_path}/", "")
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == [line["loss"] for line in unbroken]
