"""What has been sent and may not have gone yet: kept alive, of each receiver the latest few.

In: the works of a message and its memory. Out: nothing; ``finish`` waits for all. A send to a rank
waits for an earlier one to the same rank once so many are kept. On a GPU the device waits and the
host goes on: it may run far ahead, and memory that it frees is used again in its own order. On gloo
the host waits, as its works only know after a wait whether they are done. So what a rank keeps
follows from its schedule (``planner.schedules.messages_held``), however fast its receivers are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from .pending_results import Progress


@dataclass(frozen=True, slots=True)
class _Sent:
    works: Sequence[dist.Work]
    tensors: tuple[Tensor, ...]
    what: str


@dataclass(slots=True)
class Outbox:
    """The messages of one rank that are on their way. ``most``: how many to one rank are kept."""

    most: int
    tell: Progress | None = None
    _held: dict[int, deque[_Sent]] = field(default_factory=dict)

    def add(
        self, peer: int, works: Sequence[dist.Work], tensors: tuple[Tensor, ...], what: str
    ) -> None:
        """Keeps ``tensors``, sent at once, until ``works`` are done; ``what`` names the message.

        Raises RuntimeError if a receiver is lost.
        """
        self._end_all_but(self.most - 1, peer)
        self._held[peer].append(_Sent(works, tensors, what))

    def finish(self) -> None:
        """Wait until everything has gone. Raises RuntimeError if a receiver is lost."""
        for peer in self._held:
            self._end_all_but(0, peer)

    def _end_all_but(self, count: int, peer: int) -> None:
        held = self._held.setdefault(peer, deque())
        while len(held) > count:
            sent = held.popleft()
            if self.tell is not None:
                self.tell(f"{sent.what}: waiting for rank {peer} to receive", (peer,))
            for work in sent.works:
                work.wait()
