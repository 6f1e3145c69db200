"""What is said when a rank of a running pipeline dies or stops, at an action of our choice.

Four ranks train a tiny GPT in four stages. One of them really ends (SIGKILL) or stops
(SIGSTOP) when it is about to compute a given action.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import HangError, WorkerError
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.failure_store import FailureReport, FolderStore, Ranks, blame
from autoparallel.target.load import load_target

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TINY = ("n_layer=4", "d_model=32", "n_head=2", "seq=16")
START_SECONDS, TIMEOUT_SECONDS = 90.0, 5.0
"""The timeout until the first step is done, when a rank is busy with itself, and then."""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    options = PlanOptions(
        global_batch=4,
        seq=16,
        micro_batch=1,
        profile="analytic",
        forced=Forced(pp=4, schedule="1f1b"),
    )
    target = load_target(str(GPT), parse_settings(TINY))
    save_plan(make_plan(target, "cpu:4", options), path)
    return path


def fails(
    worker: Worker, plan_path: str, pids: str, rank: int, at: str, sign: int, **options: Any
) -> dict[str, object]:
    """Trains; in its second step rank ``rank`` sends itself ``sign`` when it computes ``at``."""
    from autoparallel.training.worker import train

    (Path(pids) / str(worker.rank)).write_text(str(os.getpid()))
    tell, seen = worker.watchdog.progress, []

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(what, waits_for)
        if what == "between steps":
            worker.watchdog.timeout_seconds = TIMEOUT_SECONDS
        if worker.rank == rank and what.startswith(at):
            seen.append(what)
            if len(seen) == 2:
                time.sleep(1.0)  # a thread of gloo sends what was given to it before
                os.kill(os.getpid(), sign)

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    return train(worker, plan_path=plan_path, steps=1000, seed=0, **options)


def run_until_failure(plan_path: Path, folder: Path, monkeypatch, **fault):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder.mkdir()
    launch(
        "test_failures:fails",
        {"plan_path": str(plan_path), "pids": str(folder), **fault},
        num_processes=4,
        timeout_seconds=START_SECONDS,
        environment=ALONE,
    )


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def messages(err: str) -> dict[int, str]:
    """What each rank said at its end, by rank."""
    plain = re.sub(r"(?m)^\[rank \d\] ", "", err)
    found = re.split(r"error\[AP8\d\d\]: rank (\d) of 4 ", plain)
    return {int(rank): text for rank, text in zip(found[1::2], found[2::2], strict=True)}


def check_waits(found: dict[int, str], culprit: int) -> None:
    """Every other rank has named the action, stage and micro-batch it waited for."""
    assert sorted(found) == [rank for rank in range(4) if rank != culprit]
    for rank, text in found.items():
        wait = re.search(r"(\d)RECV_([FB])(\d): stage (\d) waits in micro-batch (\d) for", text)
        assert wait is not None, text
        stage, letter, microbatch, again, same = wait.groups()
        assert int(stage) == int(again) == rank
        assert microbatch == same
        sender = rank - 1 if letter == "F" else rank + 1
        assert f"for {sender}SEND_{letter}{microbatch} of rank {sender}" in text


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_every_other_one(plan_path, tmp_path, monkeypatch, capfd):
    with pytest.raises(HangError) as caught:
        run_until_failure(
            plan_path,
            tmp_path / "pids",
            monkeypatch,
            rank=1,
            at="1F2: computing",
            sign=signal.SIGSTOP,
        )
    found = messages(capfd.readouterr().err)
    check_waits(found, culprit=1)
    assert all("rank 1 failed to come: it does not answer" in text for text in found.values())
    assert "2RECV_F2: stage 2 waits in micro-batch 2 for 1SEND_F2 of rank 1" in found[2]
    assert "rank 1 failed to come" in caught.value.why
    assert "rank 3: 3RECV_F2" in caught.value.why
    assert caught.value.exit_code == 21
    pids = [int(path.read_text()) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 4
    assert not any(map(alive, pids))


def test_a_killed_rank_is_named_by_every_other_one(plan_path, tmp_path, monkeypatch, capfd):
    with pytest.raises(WorkerError, match="rank 2 of 4 died") as caught:
        run_until_failure(
            plan_path,
            tmp_path / "pids",
            monkeypatch,
            rank=2,
            at="2B0: computing",
            sign=signal.SIGKILL,
        )
    found = messages(capfd.readouterr().err)
    check_waits(found, culprit=2)
    assert all("rank 2 failed: SIGKILL ended it" in text for text in found.values())
    assert "1RECV_B0: stage 1 waits in micro-batch 0 for 2SEND_B0 of rank 2" in found[1]
    assert "SIGKILL ended it" in caught.value.why
    assert "rank 0: 0RECV_B0" in caught.value.why
    pids = [int(path.read_text()) for path in (tmp_path / "pids").iterdir()]
    assert not any(map(alive, pids))


def is_fed_longer_sequences(worker: Worker, plan_path: str, folder: str) -> None:
    """Every rank writes the error of its step, and whether it had begun to do anything."""
    import torch

    from autoparallel.planner.errors import UsageError
    from autoparallel.planning.plan_files import load_job
    from autoparallel.training.worker import make_trainer

    plan, target = load_job(plan_path)
    from autoparallel.runtime.launch.membership import join_as

    device = join_as(worker, plan.cluster)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=0)
    told: list[str] = []
    trainer.runner.progress = lambda what, waits_for=(): told.append(what)
    batch = {name: torch.zeros(4, 20, dtype=torch.long) for name in trainer.program.inputs}
    with pytest.raises(UsageError) as caught:
        trainer.step(batch)
    assert told == []
    assert worker.watchdog.last.what == "between steps"  # the batches were compared
    (Path(folder) / str(worker.rank)).write_text(str(caught.value))


@pytest.mark.slow
def test_sequences_of_another_length_are_refused_on_all_ranks_before_any_message(
    plan_path, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    launch(
        "test_failures:is_fed_longer_sequences",
        {"plan_path": str(plan_path), "folder": str(tmp_path)},
        num_processes=4,
        environment=ALONE,
    )
    for rank in range(4):
        text = (tmp_path / str(rank)).read_text()
        assert "batch input 'tokens' has shape (4, 20)" in text
        assert "the plan is for (1, 16) in each of 4 micro-batches" in text


@pytest.mark.slow
def test_the_command_ends_with_the_code_of_a_hang(plan_path):
    """A rank of ``autoparallel run`` is stopped from outside; nothing is left behind."""
    command = [
        sys.executable,
        "-m",
        "autoparallel",
        "run",
        str(plan_path),
        "--steps",
        "100000",
        "--timeout",
        "20",
    ]
    process = subprocess.Popen(
        command, env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step    3"):
        assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if _rank(int(pid)) is not None]
    assert sorted(map(_rank, workers)) == [0, 1, 2, 3]
    os.kill(next(pid for pid in workers if _rank(pid) == 3), signal.SIGSTOP)
    _, err = process.communicate(timeout=120)
    assert process.returncode == HangError.exit_code
    assert "rank 3 failed to come: it does not answer" in err
    assert not any(map(alive, workers))


def _rank(pid: int) -> int | None:
    values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [value for value in values if value.startswith(b"RANK=")]
    return int(found[0].removeprefix(b"RANK=")) if found else None


def test_an_error_of_its_own_is_blamed_before_silence():
    reports = {
        0: FailureReport(0, "0B0", (1,)),
        1: FailureReport(1, "1F0", cause="KeyError: 'x'"),
    }
    assert blame(reports, 3) == "rank 1 failed: KeyError: 'x'"


def test_where_all_answer_the_one_that_waits_for_nobody_is_blamed():
    reports = {
        0: FailureReport(0, "0B0", (1,)),
        1: FailureReport(1, "1B0", (2,)),
        2: FailureReport(2, "2F0: computing"),
    }
    assert blame(reports, 3) == "rank 2 failed to come: it was at 2F0: computing"


def test_several_silent_ranks_are_all_blamed():
    assert blame({0: FailureReport(0, "0B0", (1,))}, 3) == (
        "ranks 1, 2 failed to come: they do not answer"
    )


def test_reports_pass_through_a_folder(tmp_path):
    store = FolderStore(tmp_path)
    assert store.is_empty()
    report = FailureReport(3, "3F0: computing", (1, 2), "")
    store.tell(report)
    assert store.read() == {3: report}
    assert Ranks(0, 4, store).has_failure()
