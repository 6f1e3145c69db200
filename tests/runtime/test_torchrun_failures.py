"""What the ranks of torchrun say when one of them dies or stops, at an action of our choice.

As ``test_failures``, but nobody of ours has started the ranks: they leave their notes in
torchrun's store, and torchrun ends them when it sees that one is gone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from test_failures import (
    ALONE,
    START_SECONDS,
    alive,
    check_waits,
    messages,
    plan_path,  # noqa: F401
)

from autoparallel.runtime.messages.watchdog import on_termination


def run_until_failure(
    plan: Path, folder: Path, *, rank: int, at: str, sign: int, **options: Any
) -> str:
    """What the ranks and torchrun wrote to stderr; every process has ended."""
    arguments = {
        "plan_path": str(plan),
        "pids": str(folder),
        "rank": rank,
        "at": at,
        "sign": int(sign),
        **options,
    }
    script = Path(__file__).parents[1] / "support" / "rank_of_torchrun.py"
    return torchrun_words(
        folder, script, "test_failures:fails", json.dumps(arguments), str(START_SECONDS)
    )


def torchrun_words(folder: Path, script: Path, *arguments: str) -> str:
    """What four ranks of a script and torchrun wrote to stderr; every process has ended."""
    folder.mkdir()
    done = run_python(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=4",
        "--standalone",
        str(script),
        *arguments,
        environment={**ALONE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        timeout_seconds=400.0,
    )
    assert done.returncode != 0, done.stderr
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert len(pids) == 4, done.stderr
    assert not any(map(alive, pids))
    return done.stderr


def said(err: str) -> dict[int, str]:
    """What each rank said at its end, without torchrun's own words."""
    return messages(err.partition("torch.distributed.elastic.multiprocessing.errors")[0])


@pytest.mark.slow
def test_a_killed_rank_is_named_by_every_other_one(plan_path, tmp_path):  # noqa: F811
    err = run_until_failure(
        plan_path, tmp_path / "pids", rank=2, at="2B0: computing", sign=signal.SIGKILL
    )
    found = said(err)
    check_waits(found, culprit=2)
    assert all("rank 2 failed to come: it does not answer" in text for text in found.values())
    assert "1RECV_B0: stage 1 waits in micro-batch 0 for 2SEND_B0 of rank 2" in found[1]


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_every_other_one(plan_path, tmp_path):  # noqa: F811
    """torchrun waits 30 seconds before it kills a rank that does not end."""
    err = run_until_failure(
        plan_path, tmp_path / "pids", rank=1, at="1F2: computing", sign=signal.SIGSTOP
    )
    found = said(err)
    check_waits(found, culprit=1)
    assert all("rank 1 failed to come: it does not answer" in text for text in found.values())
    assert "2RECV_F2: stage 2 waits in micro-batch 2 for 1SEND_F2 of rank 1" in found[2]


@pytest.mark.slow
def test_of_a_run_that_saves_a_killed_rank_ends_the_others_at_torchrun_s_signal(
    plan_path,  # noqa: F811
    tmp_path,
):
    """They get SIGTERM from torchrun, and do not wait for the end of a step that never ends."""
    saves = tmp_path / "run"
    err = run_until_failure(
        plan_path,
        tmp_path / "pids",
        rank=2,
        at="2B0: computing",
        sign=signal.SIGKILL,
        saving={"folder": str(saves), "every": 1000},
    )
    check_waits(said(err), culprit=2)
    assert "ended by SIGTERM after step" not in err
    assert not list(saves.glob("step-*"))


BLOCKED = """
import os, signal, sys, threading, time
from autoparallel.runtime.messages.watchdog import on_termination

def act():
    print("heard", flush=True)
    os._exit(7)

with on_termination(act):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


FORKED = """
import os, signal, time
from autoparallel.runtime.messages.watchdog import on_termination

with on_termination(lambda: os._exit(7)):
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)
    time.sleep(0.5)
    signal.signal(signal.SIGTERM, lambda number, frame: print("own", flush=True))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
"""


@pytest.fixture
def default_handling():
    """SIGTERM as a new process has it, whatever came before."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


FAILED = """
import os, signal, time
from autoparallel.runtime.messages import watchdog

watchdog.END_SECONDS = 0.5
try:
    with watchdog.on_termination(lambda: None):
        raise ValueError
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)
    print("last words", flush=True)
    time.sleep(60)
"""


def test_a_process_that_has_failed_says_so_before_it_is_ended(default_handling) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "last words\n")


def test_a_process_that_is_blocked_hears_that_it_is_to_end(default_handling) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (7, "heard\n")


def test_a_forked_process_ends_by_the_signal_and_a_later_handler_is_the_programs(
    default_handling,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM)}\nown\n")


def test_afterwards_and_in_a_program_that_handles_it_the_signal_is_as_it_was(
    default_handling,
) -> None:
    with on_termination(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def own(number: int, frame: object) -> None:
        return None

    signal.signal(signal.SIGTERM, own)
    try:
        with on_termination(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
