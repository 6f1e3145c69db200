"""``lagging``: a backend over gloo that emulates a device which runs behind its host.

Messages and collectives are queued, and a thread of the process executes them in order, like the
stream of a GPU: one that waits for another rank blocks all that were queued after it.

1. ``Work.wait`` returns after at most ``grace_seconds``, also if the work is not done. While every
   work ends within that time, what the host computes is right.
2. An event is reached when the work that was last waited for, and all work queued before it, is
   done.
3. Reading a figure of a step (``HostCopy``) blocks until its event is reached.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from strict_group import StrictGroup, register
from torch import Tensor

from autoparallel.runtime.messages import device_queue
from autoparallel.runtime.messages.device_queue import Event, HostCopy, Waitable

NAME = "lagging"


class Device:
    """The queue and its thread. Works are numbered from 1 in the order in which they are queued."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.num_begun = self.num_done = self.last_waited = 0
        self.grace_seconds = 120.0
        self._is_stuck = False
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def begin(self, work: Callable[[], None]) -> int:
        """Adds ``work`` to the queue and returns its number."""
        self.num_begun += 1
        self._works.put(work)
        return self.num_begun

    def wait(self, number: int) -> None:
        """Blocks until work ``number`` is done."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_done >= number)

    def give_time(self, number: int) -> None:
        """Blocks until work ``number`` is done, for ``grace_seconds`` at most.

        A queue that has used up this time once gets none until it moves again.
        """
        with self._changed:
            self._is_stuck = not self._changed.wait_for(
                lambda: self.num_done >= number, 0.0 if self._is_stuck else self.grace_seconds
            )

    def _run(self) -> None:
        while True:
            self._works.get()()
            with self._changed:
                self.num_done += 1
                self._is_stuck = False
                self._changed.notify_all()


DEVICE = Device()
"""Of this process."""


@dataclass
class Passed:
    """An event, which is done when a work is."""

    number: int

    def query(self) -> bool:
        return DEVICE.num_done >= self.number

    def synchronize(self) -> None:
        DEVICE.wait(self.number)


@dataclass(frozen=True)
class LaggingQueue:
    """The ``DeviceQueue`` of the emulated device, whose memory is the host's.

    ``events`` are all that were made; ``synchronized`` counts the waits of the host.
    """

    device: torch.device
    runs_behind: bool = True
    events: list[Passed] = field(default_factory=list)

    def mark(self, event: Event | None = None) -> Event:
        if event is None:
            event = Passed(0)
            self.events.append(event)
        assert isinstance(event, Passed)
        event.number = DEVICE.last_waited
        return event

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return device_queue.packed_copies(
            parts, lambda count, dtype: torch.empty(count, dtype=dtype), torch.clone
        )

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        if work is not None and not isinstance(work, LaggingWork):
            return None  # it is in host memory, and travels on gloo
        number = DEVICE.last_waited if work is None else work.number
        return HostCopy(tensor, Passed(number))


class LaggingWork(dist.Work):
    """See rule 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def wait(self, timeout: Any = None) -> bool:
        DEVICE.last_waited = max(DEVICE.last_waited, self.number)
        DEVICE.give_time(self.number)
        return True

    def is_completed(self) -> bool:
        return DEVICE.num_done >= self.number

    def get_future(self) -> Any:
        DEVICE.wait(self.number)
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class LaggingGroup(StrictGroup):
    """A ``StrictGroup`` whose work is done by the device."""

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _collective(
        self, outputs: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Any]
    ) -> LaggingWork:
        def work() -> None:
            self._begin()
            made = [each.clone() for each in outputs]
            run(made).wait()
            for each, value in zip(outputs, made, strict=True):
                each.detach().copy_(value)

        return LaggingWork(DEVICE.begin(work))

    def send(self, tensors: list[Tensor], target: int, tag: int) -> LaggingWork:
        def work() -> None:
            self._begin()
            copy = tensors[0].detach().clone()
            self._sends.append((self._inner.send([copy], target, 0), copy))

        return LaggingWork(DEVICE.begin(work))


def emulate() -> None:
    """Makes ``lagging`` known to this process, and the queue of its CPU one that lags."""
    register()
    dist.Backend.register_backend(NAME, LaggingGroup, devices=["cpu"])
    device_queue.QUEUES["cpu"] = LaggingQueue
    device_queue.queue_of.cache_clear()
