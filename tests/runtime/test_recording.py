"""Clocks of several machines, compared."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from processes import run_processes

AHEAD_SECONDS = 100.0


def offset_of_other_machine() -> float:
    """Each rank on a machine of its own, whose clock is ahead by its rank's multiple."""
    import torch.distributed as dist

    from autoparallel.runtime.profile import recording

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_machine", lambda: f"machine {rank}")
        clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + rank * AHEAD_SECONDS)
        patch.setattr(recording, "time", clock)
        return recording.clock_offset()


def offset_of_one_machine() -> float:
    from autoparallel.runtime.profile.recording import clock_offset

    return clock_offset()


def test_clocks_of_other_machines_are_compared_by_messages() -> None:
    found = run_processes(3, offset_of_other_machine)
    expected = [rank * AHEAD_SECONDS for rank in range(3)]
    assert found == pytest.approx(expected, abs=5.0)  # however busy this machine is
    assert found[0] == 0.0


def test_processes_of_one_machine_have_one_clock() -> None:
    assert run_processes(2, offset_of_one_machine) == [0.0, 0.0]
