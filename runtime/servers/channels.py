"""Requests of workers to servers, over process groups of two ranks each.

In: a request and what goes with it. Out: the reply, or ``PeerLostError`` where the other process is
gone. A group of two ranks fails only with one of the two, so all others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

PUSH, COPY, PULL, GRADIENT, LOSS, READ_LOSS, BYE = range(7)
"""What is asked: apply a gradient, the same for a replica, give weights, give the gradient of the
last update, note a part's loss, give the loss of a step, nothing more."""

READY, LOST = range(2)
"""The reply: done; or, workers were lost of whom the asking one does not know."""

NEVER = timedelta(days=100)
"""A server waits for requests as long as a run takes; a process that ends closes its channels."""


class PeerLostError(Exception):
    """The process at the other end is gone."""


class Request(NamedTuple):
    """``home`` is the server that the piece belongs to, ``known`` the lost workers as bits."""

    operation: int
    home: int = 0
    block: int = 0
    clock: int = 0
    part: int = 0
    known: int = 0


class Reply(NamedTuple):
    status: int
    lost: int = 0
    value: Tensor | None = None


class Channel(Protocol):
    """Where requests go, one at a time."""

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply: ...


@dataclass(frozen=True)
class LocalChannel:
    """To a server of this process."""

    handle: Callable[[Request, Tensor | None], Reply]

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply:
        if request.operation == BYE:
            return Reply(READY)
        found = self.handle(request, payload)
        if into is not None and found.value is not None:
            into.copy_(found.value)
        return found


class PeerChannel:
    """One end of a channel between two processes: rank 0 of its group asks, rank 1 answers."""

    def __init__(self, name: str, *, asks: bool) -> None:
        """Both ends make it, under the same name."""
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._group: Any = dist.ProcessGroupGloo(store, 0 if asks else 1, 2, NEVER)
        self._other = 1 if asks else 0

    def send(self, tensor: Tensor) -> None:
        try:
            self._group.send([tensor], self._other, 0).wait()
        except RuntimeError as error:
            raise PeerLostError from error

    def receive(self, tensor: Tensor) -> Tensor:
        try:
            self._group.recv([tensor], self._other, 0).wait()
        except RuntimeError as error:
            raise PeerLostError from error
        return tensor

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply:
        """Ask; a value of the reply is written ``into`` memory of its size."""
        self.send(torch.tensor(request))
        if payload is not None:
            self.send(payload)
        if request.operation == BYE:
            return Reply(READY)
        status, lost = self.receive(torch.zeros(2, dtype=torch.int64)).tolist()
        if status == READY and into is not None:
            self.receive(into)
        return Reply(status, lost, into)

    def next_request(self) -> Request:
        """Wait for a request; who answers reads its payload next."""
        return Request(*self.receive(torch.zeros(6, dtype=torch.int64)).tolist())

    def answer(self, reply: Reply) -> None:
        self.send(torch.tensor([reply.status, reply.lost]))
        if reply.value is not None:
            self.send(reply.value)
