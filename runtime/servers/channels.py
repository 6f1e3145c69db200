"""Requests of workers to servers, over process groups of two ranks each.

In: a request and its payload. Out: the reply, or ``PeerLostError`` where the other process is gone.
A group of two ranks fails only with one of the two, so all other processes go on.

A worker pushes gradients and pulls weights in threads of their own (``Traffic``). Where a server is
lost, its requests go to the server that holds the replicas of its pieces, the unanswered request
first: a server ignores pushes that it has had.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.errors import RunError
from ..messages.all_reduces import TaskThread, ThreadTask

PUSH, COPY, PULL, GRADIENT, LOSS, READ_LOSS, BYE = range(7)
"""Kinds of requests: apply a gradient; apply it to a replica; return weights; return the gradient
of the last update; store the loss of a part of the batch; return a step's loss; end the
connection."""

READY, LOST = range(2)
"""Status of a reply: done; or not done, as workers are lost that the requesting worker does not
know of."""

NEVER = timedelta(days=100)
"""Time limit of a connection, in effect none: a server may wait for requests as long as a run
takes, and a process that ends closes its connections."""


class PeerLostError(Exception):
    """Error of a channel: the process at the other end is gone."""


class Request(NamedTuple):
    """Request to a parameter server, by a worker for batch part ``part`` in iteration ``clock``. It
    is about the weights of ``block`` that server ``home`` owns; ``operation`` is ``PUSH`` etc.
    ``known`` is a bit set of the lost workers that the sender knows of."""

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
    """Interface to send requests to one server, one at a time, and get its replies."""

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply: ...


@dataclass(frozen=True)
class LocalChannel:
    """A channel to a server in this process."""

    handle: Callable[[Request, Tensor | None], Reply]

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply:
        if request.operation == BYE:
            return Reply(READY)
        found = self.handle(request, payload)
        if into is not None and found.value is not None:
            into.copy_(found.value)
        return found


class PeerChannel:
    """One end of a connection between two processes: rank 0 of their group sends requests, rank 1
    replies."""

    def __init__(self, name: str, *, asks: bool) -> None:
        """Connect to the other end, which uses the same ``name``; ``asks``: this end sends the
        requests."""
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
        """Send a request and ``payload``; return the reply, whose value is received into the memory
        ``into``."""
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
        """Receive the next request, without its payload; the caller then receives the payload by
        ``receive``."""
        return Request(*self.receive(torch.zeros(6, dtype=torch.int64)).tolist())

    def answer(self, reply: Reply) -> None:
        self.send(torch.tensor([reply.status, reply.lost]))
        if reply.value is not None:
            self.send(reply.value)


Key = tuple[int, int]
"""Key of a piece of the weights: index of its home server, and position of its block."""


class Link:
    """Connection of a worker to server number ``home``, which owns some pieces of the weights. If
    that server is lost, requests go to the server that holds replicas of the pieces."""

    def __init__(self, home: int, targets: list[Channel]) -> None:
        self._home, self._targets = home, targets

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply:
        """Send a request to the first server of this link that is alive; return its reply. Raise
        RunError AP958 if none is alive."""
        while self._targets:
            try:
                return self._targets[0].call(request, payload, into)
            except PeerLostError:
                self._targets.pop(0)
        raise RunError(
            "AP958",
            f"parameter server {self._home} is lost, and no replica of its weights is left",
            fix="run again from the last checkpoint; replicas need two servers or more",
        )

    def close(self) -> None:
        for target in self._targets:
            try:
                target.call(Request(BYE), None, None)
            except PeerLostError:
                continue


class Traffic:
    """A worker's requests to all servers, made in the background. ``sizes`` has the number of
    elements of each piece of the weights. If a server without a replica fails, both pushes and
    pulls fail; the error of a pull is raised first."""

    def __init__(
        self,
        pushes: Mapping[int, Link],
        pulls: Mapping[int, Link],
        sizes: Mapping[Key, int],
        dtype: torch.dtype,
    ) -> None:
        self.arrived: dict[Key, tuple[int, Tensor]] = {}
        self.lost = 0
        self._known = 0
        self._pushes, self._pulls = pushes, pulls
        self._sizes, self._dtype = sizes, dtype
        self._changed = threading.Condition()
        self._lanes = {home: TaskThread() for home in pushes}
        self._last: dict[int, ThreadTask] = {}
        self._to_pull: dict[int, deque[Request]] = {home: deque() for home in pulls}
        self._busy = dict.fromkeys(pulls, False)
        self._loss: dict[int, float] = {}
        self._error: BaseException | None = None
        self._is_over = False
        self._threads = [self._start(home) for home in pulls]

    def _start(self, home: int) -> threading.Thread:
        def guarded() -> None:
            try:
                self._pull_all(home)
            except BaseException as error:  # noqa: BLE001 — raised again in the main thread
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def push(self, request: Request, payload: Tensor) -> None:
        """Send the gradient ``payload`` in the background to the server ``request.home``, after all
        earlier pushes to that server."""
        call = partial(self._pushes[request.home].call, request, payload, None)
        self._last[request.home] = self._lanes[request.home].submit(call)

    def pull(self, request: Request) -> None:
        """Request weights, a gradient or a loss from the server ``request.home`` in the background.
        The result is in ``arrived`` (by piece of the weights) or returned by ``loss``."""
        with self._changed:
            self._to_pull[request.home].append(request)
            self._changed.notify_all()

    def wait(self, is_there: Callable[[], bool], known: int) -> bool:
        """Wait until ``is_there()`` is true; return False if workers other than those in the bit
        set ``known`` are lost first."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_there() or self._error is not None or bool(self.lost & ~known)
            )
            if self._error is not None:
                raise self._error
            return is_there()

    def know(self, lost: int) -> None:
        """Record that the caller knows of the lost workers in the bit set ``lost``; pulls that
        stopped because of them continue."""
        with self._changed:
            self._known |= lost
            self._changed.notify_all()

    def has(self, key: Key, clock: int) -> bool:
        return self.arrived.get(key, (-1,))[0] == clock

    def loss(self, clock: int) -> float | None:
        return self._loss.get(clock)

    def forget_pulls(self) -> None:
        """Drop the queued pulls and all results, after the pull in progress has ended."""
        with self._changed:
            for queue in self._to_pull.values():
                queue.clear()
            self._changed.wait_for(lambda: self._error is not None or not any(self._busy.values()))
            self.arrived.clear()

    def flush(self) -> None:
        """Wait until the servers have acknowledged all pushes."""
        for work in self._last.values():  # earlier pushes are then done too
            work.wait()

    def close(self) -> None:
        """Tell all servers that no more requests come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for link in (*self._pushes.values(), *self._pulls.values()):
            link.close()

    def _pull_all(self, home: int) -> None:
        queue = self._to_pull[home]
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_over or (bool(queue) and not self.lost & ~self._known)
                )
                if not queue:
                    return
                request = queue[0]._replace(known=self._known)
                self._busy[home] = True
            into = self._memory(request)
            reply = self._pulls[home].call(request, None, into)
            with self._changed:
                self._took(queue, request, reply, into)
                self._busy[home] = False
                self._changed.notify_all()

    def _memory(self, request: Request) -> Tensor:
        if request.operation == READ_LOSS:
            return torch.zeros((), dtype=torch.float64)
        return torch.empty(self._sizes[request.home, request.block], dtype=self._dtype)

    def _took(self, queue: deque[Request], request: Request, reply: Reply, into: Tensor) -> None:
        """Store the reply to a pull; if it reports lost workers, leave the request first in the
        queue."""
        self.lost |= reply.lost
        if reply.status == LOST:
            return
        if queue and queue[0][:5] == request[:5]:
            queue.popleft()
        if request.operation == READ_LOSS:
            self._loss = {request.clock: float(into)}
        else:
            self.arrived[request.home, request.block] = (request.clock, into)
