"""What has been sent and has not gone yet: kept alive, and freed soon when it has.

In: the works of a message and its memory. Out: nothing; ``finish`` waits for all. On a GPU the host
may run far ahead of its device, and memory that it frees is used again in the order of the host:
there a send waits, on the device, for an earlier one to the same rank, so that no more than some
are kept. Gloo's works only know after a wait whether they are done, so there a thread for each
receiver waits for them in order, and a slow receiver keeps nobody else's memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

LOOK_SECONDS = 0.05
MOST_KEPT = 4
"""A receiver's thread looks for messages that have gone this often, or after so many new ones.

Every look takes the processor and the interpreter's lock from the rank's computation: a look
for each message, and one every 5 ms, took 7 % of a rank's processor time in a small pipeline.
"""


@dataclass(frozen=True, slots=True)
class _Sent:
    works: Sequence[dist.Work]
    tensors: tuple[Tensor, ...]
    what: str


def _end(sent: _Sent) -> None:
    for work in sent.works:
        work.wait()


@dataclass(slots=True)
class Outbox:
    """The messages of one rank that are on their way.

    ``most``: how many to one rank are kept; None where a thread waits for them. ``tell`` is told
    the message and the rank before another one is kept instead, once it has gone.
    """

    most: int | None
    tell: Callable[[str, int], None] | None = None
    _held: dict[int, deque[_Sent]] = field(default_factory=dict)
    _lanes: dict[int, _Lane] = field(default_factory=dict)

    def add(
        self, peer: int, works: Sequence[dist.Work], tensors: tuple[Tensor, ...], what: str
    ) -> None:
        """Keeps ``tensors``, sent at once, until ``works`` are done; ``what`` names the message."""
        sent = _Sent(works, tensors, what)
        if self.most is not None:
            held = self._held.setdefault(peer, deque())
            while len(held) >= self.most:
                if self.tell is not None:
                    self.tell(held[0].what, peer)
                _end(held.popleft())
            held.append(sent)
            return
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = _Lane(peer)
        lane.add(sent)

    def waiting(self) -> tuple[str, tuple[int, ...]]:
        """The first message that is not known to have gone, and the ranks that such ones are to.

        An empty name and no ranks where all has gone.
        """
        if self.most is not None:
            kept = {peer: held[0].what for peer, held in self._held.items() if held}
            return next(iter(kept.values()), ""), tuple(kept)
        late = [lane for lane in self._lanes.values() if lane.first]
        return (late[0].first if late else ""), tuple(lane.peer for lane in late)

    def finish(self) -> None:
        """Wait until everything has gone. Raises RuntimeError if a receiver is lost."""
        for held in self._held.values():
            while held:
                _end(held.popleft())
        for lane in self._lanes.values():
            lane.finish()


class _Lane:
    """The messages to one rank in order, and the thread that waits for them.

    A message belongs to who takes it out of the queue: the thread, or at a step's end the rank
    itself, which waits for what is left without waking the thread.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._queue: deque[_Sent] = deque()
        self._under_way: _Sent | None = None
        self._changed = threading.Condition()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name=f"outbox {peer}", daemon=True).start()

    @property
    def first(self) -> str:
        """The name of the first message that is not known to have gone; empty for none."""
        with self._changed:
            sent = self._under_way or (self._queue[0] if self._queue else None)
            return "" if sent is None else sent.what

    def add(self, sent: _Sent) -> None:
        with self._changed:
            self._queue.append(sent)
            if len(self._queue) in (1, MOST_KEPT):
                self._changed.notify_all()

    def finish(self) -> None:
        while (sent := self._take()) is not None:
            self._wait(sent)
        with self._changed:
            self._changed.wait_for(lambda: self._under_way is None)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._queue) > 0)
                self._changed.wait_for(lambda: len(self._queue) >= MOST_KEPT, LOOK_SECONDS)
            while self._take(by_thread=True) is not None:
                self._wait_under_way()

    def _take(self, *, by_thread: bool = False) -> _Sent | None:
        with self._changed:
            sent = self._queue.popleft() if self._queue else None
            if by_thread:
                self._under_way = sent
            return sent

    def _wait_under_way(self) -> None:
        """For the message that the thread has taken, which is freed then."""
        assert self._under_way is not None
        self._wait(self._under_way)
        with self._changed:
            self._under_way = None
            self._changed.notify_all()

    def _wait(self, sent: _Sent) -> None:
        try:
            _end(sent)
        except RuntimeError as error:
            self._error = error
