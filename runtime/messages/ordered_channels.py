"""Lanes: the messages from one rank to another, which keep their order.

In: pairs of ranks. Out: sends and receives without tags. On gloo a lane is a pair of ranks in the
default group. NCCL runs the messages of a communicator one after the other in both directions, so
there each lane has a communicator of two ranks of its own, made and tried before the first step (a
first message would else wait for its peer inside the send).

Both sides of each lane must know the same messages in the same order (``check_lanes``): a
difference would cause a hang, or, between messages of one size, a wrong gradient.

Messages that may not have gone yet are kept alive (``PendingSends``), a fixed number for each
receiver: beyond it, a send first waits for the oldest message to that rank. On a GPU the device
waits and the host goes on: it may run far ahead, and memory that it frees is reused in stream
order. On gloo the host waits, as its works only know after a wait whether they are done. So the
schedule determines the memory (``planner.schedules.messages_held``), however fast the receivers
are.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.errors import PlanError
from .groups import new_group
from .pending_results import Progress
from .shared_objects import control_group, gather_values

TAG = 2**30 - 1
"""Message tag that tells these messages from a script's own in the default process group."""

Lane = tuple[int, int]
"""One direction between two ranks: (sending rank, receiving rank)."""


@dataclass(slots=True)
class Lanes:
    """Connections (lanes) of this process, each from one rank to one other; messages of a lane keep
    their order. All exchanges of a trainer share them. If ``has_groups`` (by default if the backend
    is not gloo), each lane has its own process group."""

    device: torch.device
    has_groups: bool | None = None
    _groups: dict[Lane, dist.ProcessGroup] = field(default_factory=dict)
    _known: set[Lane] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.has_groups is None:
            self.has_groups = self.device.type != "cpu" or control_group() is not None

    def join(self, rank: int, lanes: Set[Lane]) -> None:
        """Make the process groups of the ``lanes`` that this rank needs, and take part in making
        the other ranks' groups. Collective over all ranks."""
        if not self.has_groups:
            return
        for lane in sorted(set[Lane]().union(*gather_values(lanes - self._known)) - self._known):
            self._known.add(lane)
            group = new_group(sorted(lane))
            if rank in lane:
                self._groups[lane] = group
                token = torch.zeros(1, device=self.device)
                start = self.send if rank == lane[0] else self.receive
                for work in start([token], *lane):
                    work.wait()

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> Sequence[dist.Work]:
        """Start to send ``tensors``; return a ``Work`` for each, or one for all (as NCCL does)."""
        return self._start(dist.isend, tensors, (source, target), target)

    def receive(self, tensors: Sequence[Tensor], source: int, target: int) -> Sequence[dist.Work]:
        """Start to receive into ``tensors``; return a ``Work`` for each, or one for all."""
        return self._start(dist.irecv, tensors, (source, target), source)

    def _start(
        self, operation: Callable[..., Any], tensors: Sequence[Tensor], lane: Lane, peer: int
    ) -> Sequence[dist.Work]:
        group = self._groups.get(lane)
        tag = TAG if group is None else 0
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, each, peer, group=group, tag=tag) for each in tensors]
        )


T = TypeVar("T")

Messages = Mapping[Lane, Sequence[str]]
"""Texts that describe a step's messages, in order, by (sending rank, receiving rank)."""


def check_lanes(sent: Messages, taken: Messages) -> None:
    """Compare, for each pair of ranks, the messages that the first rank sends in a step (``sent``)
    with the messages that the second rank expects (``taken``). Raise PlanError AP542 on all ranks
    if they differ. Collective over all ranks."""
    if dist.get_world_size() == 1:
        return
    digests = [_merged(found) for found in _gathered((_digests(sent), _digests(taken)))]
    lanes = digests[0].keys() | digests[1].keys()
    wrong = sorted(lane for lane in lanes if digests[0].get(lane) != digests[1].get(lane))
    if not wrong:
        return
    lane = wrong[0]
    ends = [_merged(found) for found in _gathered((_only(sent, lane), _only(taken, lane)))]
    pairs = zip_longest(ends[0].get(lane, ()), ends[1].get(lane, ()), fillvalue="nothing")
    number, (own, other) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    raise PlanError(
        "AP542",
        f"rank {lane[0]} sends rank {lane[1]} messages that rank {lane[1]} does not expect",
        why=f"message {number} is {own} on rank {lane[0]}, and {other} on rank {lane[1]}",
        where="schedule",
        fix="all ranks must run one plan file; otherwise report it as a bug",
    )


def _digests(found: Messages) -> dict[Lane, str]:
    return {
        lane: hashlib.sha256("\n".join(messages).encode()).hexdigest()
        for lane, messages in found.items()
        if messages
    }


def _only(found: Messages, lane: Lane) -> Messages:
    return {lane: found[lane]} if lane in found else {}


def _gathered(own: tuple[T, T]) -> list[tuple[T, ...]]:
    """Gather a pair of values from every rank; return the first values and the second, by rank."""
    return list(zip(*gather_values(own), strict=True))


def _merged(parts: Sequence[Mapping[Lane, T]]) -> dict[Lane, T]:
    """Merge dicts by lane (sender, receiver) into one; each lane is in one of the dicts only."""
    return {lane: value for part in parts for lane, value in part.items()}


@dataclass(frozen=True, slots=True)
class _Sent:
    works: Sequence[dist.Work]
    tensors: tuple[Tensor, ...]
    words: str


@dataclass(slots=True)
class PendingSends:
    """Messages of one rank that may not have left yet, at most ``most`` for each receiver; their
    tensors are kept alive. ``tell`` is called before each wait."""

    most: int
    tell: Progress | None = None
    _held: dict[int, deque[_Sent]] = field(default_factory=dict)

    def add(
        self, peer: int, works: Sequence[dist.Work], tensors: tuple[Tensor, ...], words: str
    ) -> None:
        """Keep ``tensors``, whose sends are ``works``, alive until these are done; ``words``
        describe the message. Raises RuntimeError if a receiver is lost."""
        self._end_all_but(self.most - 1, peer)
        self._held[peer].append(_Sent(works, tensors, words))

    def finish(self) -> None:
        """Wait until all messages have left. Raises RuntimeError if a receiver is lost."""
        for peer in self._held:
            self._end_all_but(0, peer)

    def _end_all_but(self, count: int, peer: int) -> None:
        held = self._held.setdefault(peer, deque())
        while len(held) > count:
            sent = held.popleft()
            if self.tell is not None:
                self.tell(f"{sent.words}: waiting for rank {peer} to receive", (peer,))
            for work in sent.works:
                work.wait()
