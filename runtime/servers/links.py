"""What a worker has for each server: pushes and pulls in threads of their own, with failover.

In: gradients to push, weights to get, in order. Out: the weights that have come. Where a server is
lost its requests go to the server that holds the replicas of its pieces, the one without an answer
first: a server knows which pushes it had.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.errors import RunError
from .channels import BYE, LOST, READ_LOSS, Channel, PeerLostError, Reply, Request

Key = tuple[int, int]
"""A home server, and a block."""


class Link:
    """Requests to the pieces of one home server, which its replica answers after it."""

    def __init__(self, home: int, targets: list[Channel]) -> None:
        self._home, self._targets = home, targets

    def call(self, request: Request, payload: Tensor | None, into: Tensor | None) -> Reply:
        """Raises RunError AP958 where no server with these pieces is left."""
        while self._targets:
            try:
                return self._targets[0].call(request, payload, into)
            except PeerLostError:
                self._targets.pop(0)
        raise RunError(
            "AP958",
            f"parameter server {self._home} is lost, and no replica of its weights is left",
            fix="run again from the last checkpoint; replicas need two servers or more",
        )  # fmt: skip

    def close(self) -> None:
        for target in self._targets:
            try:
                target.call(Request(BYE), None, None)
            except PeerLostError:
                continue


class Pushed(NamedTuple):
    request: Request
    payload: Tensor


class Traffic:
    """All links of a worker. ``sizes`` are the elements of every piece."""

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
        self._to_push: dict[int, deque[Pushed]] = {home: deque() for home in pushes}
        self._to_pull: dict[int, deque[Request]] = {home: deque() for home in pulls}
        self._busy = {(kind, home): False for kind in ("push", "pull") for home in pushes}
        self._loss: dict[int, float] = {}
        self._error: BaseException | None = None
        self._is_over = False
        self._threads = [
            *(self._start(self._push_all, home) for home in pushes),
            *(self._start(self._pull_all, home) for home in pulls),
        ]

    def _start(self, run: Callable[[int], None], home: int) -> threading.Thread:
        def guarded() -> None:
            try:
                run(home)
            except BaseException as error:  # noqa: BLE001 — raised again in the main thread
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def push(self, request: Request, payload: Tensor) -> None:
        """Have a server get ``payload``, after what was given before."""
        with self._changed:
            self._to_push[request.home].append(Pushed(request, payload))
            self._changed.notify_all()

    def pull(self, request: Request) -> None:
        """Have a piece's weights, or a step's loss, come from a server."""
        with self._changed:
            self._to_pull[request.home].append(request)
            self._changed.notify_all()

    def wait(self, is_there: Callable[[], bool], known: int) -> bool:
        """Until something is there; False where workers beyond ``known`` were lost before."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_there() or self._error is not None or bool(self.lost & ~known)
            )
            if self._error is not None:
                raise self._error
            return is_there()

    def know(self, lost: int) -> None:
        """Go on asking, without the ``lost`` workers."""
        with self._changed:
            self._known |= lost
            self._changed.notify_all()

    def has(self, key: Key, clock: int) -> bool:
        return self.arrived.get(key, (-1,))[0] == clock

    def loss(self, clock: int) -> float | None:
        return self._loss.get(clock)

    def forget_pulls(self) -> None:
        """Drop what is still to be asked for, and wait for what is being asked."""
        with self._changed:
            for queue in self._to_pull.values():
                queue.clear()
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or not any(self._busy["pull", home] for home in self._pulls)
                )
            )
            self.arrived.clear()

    def flush(self) -> None:
        """Wait until all that was pushed has been acknowledged."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None
                or not (any(self._to_push.values()) or
                        any(self._busy["push", home] for home in self._pushes))
            )  # fmt: skip
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Say to all servers that nothing more comes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for link in (*self._pushes.values(), *self._pulls.values()):
            link.close()

    def _push_all(self, home: int) -> None:
        queue = self._to_push[home]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(queue) or self._is_over)
                if not queue:
                    return
                request, payload = queue.popleft()
                self._busy["push", home] = True
            self._pushes[home].call(request, payload, None)
            with self._changed:
                self._busy["push", home] = False
                self._changed.notify_all()

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
                self._busy["pull", home] = True
            into = self._memory(request)
            reply = self._pulls[home].call(request, None, into)
            with self._changed:
                self._took(queue, request, reply, into)
                self._busy["pull", home] = False
                self._changed.notify_all()

    def _memory(self, request: Request) -> Tensor:
        if request.operation == READ_LOSS:
            return torch.zeros((), dtype=torch.float64)
        return torch.empty(self._sizes[request.home, request.block], dtype=self._dtype)

    def _took(self, queue: deque[Request], request: Request, reply: Reply, into: Tensor) -> None:
        """A pull that is told of lost workers stays first in the queue."""
        self.lost |= reply.lost
        if reply.status == LOST:
            return
        if queue and queue[0][:5] == request[:5]:
            queue.popleft()
        if request.operation == READ_LOSS:
            self._loss = {request.clock: float(into)}
        else:
            self.arrived[request.home, request.block] = (request.clock, into)
