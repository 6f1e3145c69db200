"""What a process is at when its device is behind, and copies in one piece."""

from __future__ import annotations

import threading
from threading import Semaphore
from types import SimpleNamespace

import pytest
import torch

from autoparallel.runtime.messages.device_queue import HostQueue, packed_copies
from autoparallel.runtime.messages.watchdog import BETWEEN_STEPS, MOST_AHEAD, Watchdog


class ByHand:
    """An event that is done when the test says so."""

    def __init__(self, waits: Semaphore) -> None:
        self.done = threading.Event()
        self.waits = waits

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.waits.release()
        self.done.wait()


class SlowQueue(HostQueue):
    """A device that passes events when it is let."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), True)
        object.__setattr__(self, "ahead", [])
        object.__setattr__(self, "made", [])
        object.__setattr__(self, "waits", Semaphore(0))

    def mark(self, event=None):
        if event is None:
            event = ByHand(self.waits)
            self.made.append(event)
        event.done.clear()
        self.ahead.append(event)
        return event

    def passes(self, count: int) -> None:
        for _ in range(count):
            self.ahead.pop(0).done.set()


def test_a_process_is_at_what_its_device_is_at_and_rests_when_that_is_done() -> None:
    queue = SlowQueue()
    watchdog = Watchdog(60.0, name="rank 0", resting=(BETWEEN_STEPS,))
    watchdog.progress(BETWEEN_STEPS)
    watchdog.follow(queue)
    watchdog.progress("0F0: computing")
    watchdog.progress("0RECV_B0: waiting", (1,))
    watchdog.progress(BETWEEN_STEPS)
    assert watchdog.last.what == BETWEEN_STEPS  # of the step before
    queue.passes(2)
    assert (watchdog.last.what, watchdog.last.waits_for) == ("0RECV_B0: waiting", (1,))
    assert watchdog._left_seconds() < 60.0
    queue.passes(1)
    assert watchdog.last.what == BETWEEN_STEPS
    assert watchdog._left_seconds() == float("inf")


def test_the_time_counts_from_when_the_device_has_come_to_an_action(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr("autoparallel.runtime.messages.watchdog.time", clock)
    queue = SlowQueue()
    watchdog = Watchdog(60.0, name="rank 0")
    watchdog.follow(queue)
    watchdog.progress("0F0: computing")
    clock.seconds = 20.0
    queue.passes(1)
    assert watchdog._left_seconds() == 60.0


def test_a_device_that_hangs_ends_the_process_though_its_host_is_between_steps() -> None:
    queue, reports, ended = SlowQueue(), [], threading.Event()
    with Watchdog(
        0.3,
        name="rank 3 of 4",
        resting=(BETWEEN_STEPS,),
        report=reports.append,
        end=lambda code: ended.set(),
    ) as watchdog:
        watchdog.follow(queue)
        watchdog.progress("0RECV_B0: waiting")
        watchdog.progress(BETWEEN_STEPS)
        queue.passes(1)
        assert ended.wait(10)
    assert reports[0].why == "0RECV_B0: waiting"


def test_a_host_is_ahead_by_a_bounded_number_of_events_which_are_used_again() -> None:
    queue = SlowQueue()
    watchdog = Watchdog(60.0, name="rank 0")
    watchdog.follow(queue)
    told = []

    def host() -> None:
        for index in range(MOST_AHEAD + 5):
            watchdog.progress(f"action {index}")
            told.append(index)

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    for number in range(5):
        queue.waits.acquire()  # until the host waits for its device
        assert len(told) == MOST_AHEAD + number
        queue.passes(1)
    thread.join()
    assert len(told) == MOST_AHEAD + 5
    assert len(queue.made) == MOST_AHEAD
    assert watchdog.last.what == "action 4"


def test_parts_of_several_shapes_and_dtypes_are_copied_once_for_each_dtype() -> None:
    whole = torch.arange(24.0).view(4, 6)
    parts = [whole[:2], torch.arange(5), whole[1:3, ::2], whole[:2], torch.zeros(0, 3)]
    copied: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor.clone()

    made = packed_copies(parts, lambda count, dtype: torch.empty(count, dtype=dtype), copy)
    assert all(torch.equal(one, other) for one, other in zip(made, parts, strict=True))
    assert [each.numel() for each in copied] == [12 + 6, 5]
    assert made[3] is made[0]
