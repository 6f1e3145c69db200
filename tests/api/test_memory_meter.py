"""Memory of a run on a CPU: what the process allocates, not what it keeps of the system's."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from autoparallel.training import step_log
from autoparallel.training.step_log import MemoryMeter

MIB = 2**20

pytestmark = pytest.mark.skipif(step_log._MALLINFO is None, reason="another C library than glibc")


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Free the tensors of earlier tests, which would otherwise be freed while memory is read."""
    gc.collect()


def test_the_peak_is_of_what_is_allocated_since_the_meter_began() -> None:
    before = torch.ones(16 * MIB)
    meter = MemoryMeter(torch.device("cpu"))
    held = [torch.ones(MIB // 64) for _ in range(512)]  # 32 MiB, in pieces that malloc keeps
    assert 32 * MIB <= meter.peak_bytes() < 40 * MIB
    held.clear()
    assert meter.peak_bytes() >= 32 * MIB
    meter.forget_peak()
    assert meter.peak_bytes() < 8 * MIB
    assert before.numel() == 16 * MIB


def test_a_peak_within_a_step_is_seen_and_the_thread_ends_with_its_meter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, read = threading.Event(), step_log._allocated_bytes

    def reading() -> int:
        seen.set()
        return read()

    before = set(threading.enumerate())
    meter = MemoryMeter(torch.device("cpu"))
    (thread,) = set(threading.enumerate()) - before
    held = torch.ones(8 * MIB)
    monkeypatch.setattr(step_log, "_allocated_bytes", reading)
    assert seen.wait(60.0)
    seen.clear()
    assert seen.wait(60.0)  # a reading has ended
    del held
    assert meter.peak_bytes() >= 32 * MIB
    del meter
    thread.join(60.0)
    assert not thread.is_alive()
