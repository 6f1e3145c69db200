"""What has been sent and has not gone yet: kept alive, and freed at once when it has.

In: the works of a message and its memory. Out: nothing; ``finish`` waits for all. NCCL's
works tell when they are complete; gloo's only know after a wait, so there a thread for each
receiver waits for them in order, and a slow receiver keeps nobody else's memory.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Sent:
    work: dist.Work
    tensors: tuple[Tensor, ...]
    what: str


@dataclass(slots=True)
class Outbox:
    """The messages of one rank that are on their way.

    ``polls``: works tell when they are complete.
    """

    polls: bool
    _held: list[_Sent] = field(default_factory=list)
    _lanes: dict[int, _Lane] = field(default_factory=dict)

    def add(self, peer: int, work: dist.Work, tensors: tuple[Tensor, ...], what: str) -> None:
        """Keeps ``tensors`` until ``work`` is done; ``what`` names the message."""
        sent = _Sent(work, tensors, what)
        if self.polls:
            self._held = [held for held in self._held if not held.work.is_completed()]
            self._held.append(sent)
            return
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = _Lane(peer)
        lane.add(sent)

    def waiting(self) -> tuple[str, tuple[int, ...]]:
        """The first message that has not gone, if any, and the ranks that still are to get one."""
        late = [lane for lane in self._lanes.values() if lane.num_waiting]
        return (late[0].first if late else ""), tuple(lane.peer for lane in late)

    def finish(self) -> None:
        """Wait until everything has gone. Raises RuntimeError if a receiver is lost."""
        for sent in self._held:
            sent.work.wait()
        self._held.clear()
        for lane in self._lanes.values():
            lane.finish()


class _Lane:
    """The messages to one rank, and the thread that waits for them."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.num_waiting = 0
        self.first = ""
        self._queue: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name=f"outbox {peer}", daemon=True).start()

    def add(self, sent: _Sent) -> None:
        with self._idle:
            self.num_waiting += 1
        self._queue.put(sent)

    def finish(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self.num_waiting == 0)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            sent = self._queue.get()
            self.first = sent.what
            try:
                sent.work.wait()
            except RuntimeError as error:
                self._error = error
            del sent
            with self._idle:
                self.num_waiting -= 1
                self._idle.notify_all()
