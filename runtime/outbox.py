"""What has been sent and has not gone yet: kept alive, and freed at once when it has.

In: the works of a message and its memory. Out: nothing; ``finish`` waits for all. NCCL's
works tell when they are complete; gloo's only know after a wait, so there a thread for each
receiver waits for them in order, and a slow receiver keeps nobody else's memory.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

LOOK_SECONDS = 0.005
"""How long what has gone may be kept by a thread that does not know of it."""


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
    """The messages to one rank in order, and the thread that waits for them.

    While a step sends, the thread looks for new ones by itself: a rank that had to wake it for
    each would lose its turn on a busy processor to do so.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._sent: deque[_Sent] = deque()
        self._changed = threading.Condition()
        self._sleeps = True
        self._finishing = False
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name=f"outbox {peer}", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        return len(self._sent)

    @property
    def first(self) -> str:
        """The name of the first message that has not gone."""
        return next((sent.what for sent in self._sent.copy()), "")

    def add(self, sent: _Sent) -> None:
        self._finishing = False
        self._sent.append(sent)
        if self._sleeps:
            with self._changed:
                self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._sent)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            self._look()
            self._wait()

    def _look(self) -> None:
        """Until there is a message: after a step until it is woken, in one from time to time."""
        with self._changed:
            while not self._sent:
                self._sleeps = self._finishing
                if not self._sent:  # What is added from here on wakes a thread that sleeps.
                    self._changed.wait(None if self._sleeps else LOOK_SECONDS)
            self._sleeps = False

    def _wait(self) -> None:
        """For the first message, which is freed then."""
        sent = self._sent[0]
        try:
            sent.work.wait()
        except RuntimeError as error:
            self._error = error
        del sent
        with self._changed:
            self._sent.popleft()
            if not self._sent:
                self._changed.notify_all()
