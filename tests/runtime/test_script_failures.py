"""A user's own script under torchrun: what its ranks say when one of them dies or stalls.

As ``test_torchrun_failures``, but the ranks run ``Step`` or ``loss.backward()`` in a script of
the user's, which knows nothing of watchdogs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_failures import ALONE, check_waits, messages
from test_torchrun_failures import torchrun_words

SCRIPT = Path(__file__).parents[1] / "support" / "script_of_torchrun.py"


def run_until_failure(folder: Path, rank: int, at: str, what: str, *loop: str) -> str:
    """What the ranks wrote to stderr."""
    err = torchrun_words(folder, SCRIPT, str(folder), str(rank), at, what, *loop)
    print(err)  # of a test that fails
    return err.partition("torch.distributed.elastic.multiprocessing.errors")[0]


@pytest.mark.slow
def test_of_a_killed_rank_every_other_one_says_what_it_waited_for(tmp_path):
    found = messages(run_until_failure(tmp_path / "pids", 2, "2B0: computing", "SIGKILL"))
    check_waits(found, culprit=2)
    assert all("rank 2 failed to come: it does not answer" in text for text in found.values())
    assert "1RECV_B0: stage 1 waits in micro-batch 0 for 2SEND_B0 of rank 2" in found[1]


@pytest.mark.slow
def test_of_a_stopped_rank_every_other_one_says_what_it_waited_for(tmp_path):
    """torchrun waits 30 seconds before it kills a rank that does not end."""
    found = messages(run_until_failure(tmp_path / "pids", 1, "1F2: computing", "SIGSTOP"))
    check_waits(found, culprit=1)
    assert all("rank 1 failed to come: it does not answer" in text for text in found.values())
    assert "2RECV_F2: stage 2 waits in micro-batch 2 for 1SEND_F2 of rank 1" in found[2]


@pytest.mark.slow
def test_of_a_rank_that_stays_in_the_script_all_say_so_itself_included(tmp_path):
    found = messages(run_until_failure(tmp_path / "pids", 1, "between steps", "sleep"))
    assert sorted(found) == [0, 1, 2, 3]
    assert all("rank 1 failed to come: it was at between steps" in t for t in found.values())
    assert "time.sleep(1000)" in found[1] or "script_of_torchrun.py" in found[1]
    assert "2RECV_F0: stage 2 waits in micro-batch 0 for 1SEND_F0 of rank 1" in found[2]


@pytest.mark.slow
def test_an_error_in_the_script_is_shown_by_the_other_ranks(tmp_path):
    err = run_until_failure(tmp_path / "pids", 3, "3F1: computing", "raise")
    assert "ValueError: no data left" in err
    found = messages(err)
    assert sorted(found) == [0, 1, 2]
    assert all("rank 3 failed: " in t and "no data left" in t for t in found.values()), err


@pytest.mark.slow
def test_without_a_pipeline_a_killed_rank_ends_the_others(tmp_path):
    at = "computing the backward of all micro-batches"
    found = messages(run_until_failure(tmp_path / "pids", 2, at, "SIGKILL", "loop"))
    assert sorted(found) == [0, 1, 3]
    assert all("rank 2 failed to come: it does not answer" in text for text in found.values())
    assert all(at in text for text in found.values())


ENDING = """
import os, time
import torch.distributed as dist
from autoparallel.runtime.messages import watchdog
from autoparallel.runtime.launch.watched_script import watch_script

watchdog.POLL_SECONDS = 0.0  # asks the store without a pause, at the end too
dist.init_process_group("gloo")
watch_script(os.environ)
time.sleep(0.2)
dist.destroy_process_group()
"""


LAST_COLLECTIVE = """
import torch
import torch.distributed as dist
from autoparallel.runtime.launch.membership import join

join("cpu", 0)
total = torch.ones(1)
for _ in range(20):
    dist.all_reduce(total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [ENDING, LAST_COLLECTIVE], ids=["watchdog", "collective"])
def test_a_script_may_end_while_a_thread_is_at_work(tmp_path, text):
    """A thread that takes the lock of an ending interpreter aborted a third of the processes."""
    script = tmp_path / "ending.py"
    script.write_text(text)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(script),
    ]
    env = {**ALONE, "GLOO_SOCKET_IFNAME": "lo"}
    for _ in range(2):
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
