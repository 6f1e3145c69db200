"""What happens to a run on several hosts whose network is cut, and whose scheduler ends it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from host_spaces import host_spaces, skip_without_spaces
from test_hosts import agents, planned

from autoparallel.planner.requests.request import Forced
from autoparallel.runtime.launch import rendezvous
from autoparallel.runtime.launch.rendezvous import StoreWatch

ENDLESS = ("run", "dropout_model.json", "--steps", "1000000", "--metrics", "metrics.jsonl")
TIMEOUT_SECONDS = 10
PORT = 29541


def test_a_question_that_stays_open_gives_up_and_one_that_is_answered_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.01)
    given_up = threading.Event()
    with StoreWatch(0.05, given_up.set) as watch:
        for _ in range(20):
            with watch.asking():
                pass
            time.sleep(0.01)
        assert not given_up.is_set()
        with watch.asking():
            assert given_up.wait(60.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hosts_whose_network_is_cut_end_and_say_what_they_waited_for(tmp_path: Path) -> None:
    """Both connections stay open, and nothing comes through them any more."""
    skip_without_spaces()
    planned(tmp_path, "2x1xcpu", Forced(dp=2))
    with host_spaces(2) as spaces, agents(tmp_path, spaces) as hosts:
        for host in range(2):
            hosts.start(
                host, *ENDLESS, "--nnodes", "2", "--timeout", str(TIMEOUT_SECONDS), port=PORT
            )
        hosts.wait_for_step(20)
        spaces[1].unplug()
        codes = hosts.codes(120.0)
        said = [hosts.said(number) for number in range(2)]
    assert codes == [21, 21], said
    for rank, text in enumerate(said):
        words = f"rank {rank} of 2 made no progress for {TIMEOUT_SECONDS} s"
        assert words in text
        assert f"rank {1 - rank} failed to come: it does not answer" in text
        assert re.search("completing the gradients|all_reduce", text), text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_to_one_host_ends_the_run_of_all_after_a_save(tmp_path: Path) -> None:
    planned(tmp_path, "2x1xcpu", Forced(dp=2))
    with agents(tmp_path) as hosts:
        for host in range(2):
            hosts.start(host, *ENDLESS, "--nnodes", "2", "--save", "run", port=PORT + 1)
        hosts.wait_for_step(5)
        os.kill(hosts.processes[1].pid, signal.SIGTERM)
        assert hosts.codes(120.0) == [0, 0], hosts.all_said()
        found = re.search(r"ended by SIGTERM after step (\d+), which is saved", hosts.all_said())
        assert found is not None, hosts.all_said()
    assert (tmp_path / "run" / f"step-{int(found[1]):08d}").is_dir()
