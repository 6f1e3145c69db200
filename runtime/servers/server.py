"""A parameter server: pieces of the weights, and a thread for each channel with requests.

In: requests. Out: replies. A push is forwarded to the server that holds the replica before it is
acknowledged, in the order in which it is applied; when that server is lost the run goes on without
a replica. A lost worker leaves the clocks of ssp and asp; under bsp workers that wait for its part
are told.

A piece is the elements that a server holds of one block, with their optimizer. Under bsp the
gradients of an iteration are summed in the order of the parts, so the sum does not depend on the
order of arrival, and the weights before the last update stay: a worker that takes over the part of
a lost worker computes with them. Otherwise each gradient is an update of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...cost_model.simulator.consistency import Clocks
from ...planner.errors import UsageError
from ...planner.variants.parameter_servers import Shard
from ..update.optimizer import ELEMENTWISE, BuildOptimizer, build_with, default_optimizer
from .channels import (
    BYE,
    COPY,
    GRADIENT,
    LOSS,
    LOST,
    PULL,
    PUSH,
    READ_LOSS,
    READY,
    Channel,
    PeerChannel,
    PeerLostError,
    Reply,
    Request,
)


class ServedPiece:
    """A piece of the weights on a server: the elements of one block that the server owns (or
    replicates), ``shards`` of parameters in one flat tensor ``weights``, with their optimizer."""

    def __init__(
        self,
        weights: Tensor,
        shards: Sequence[Shard],
        clocks: Clocks,
        *,
        shapes: Mapping[str, torch.Size],
        build: BuildOptimizer | None,
        optimizer: str,
    ) -> None:
        """Make the piece; ``shapes`` are the shapes of all trained parameters. Raises as
        ``served_optimizer``."""
        self.weights, self.clocks = weights, clocks
        self.previous = weights.clone() if clocks.bound == 0 else weights
        self.gradient = torch.zeros_like(weights)
        self.version = 0
        self._parts = clocks.workers
        self._pending: dict[int, Tensor] = {}
        slices: dict[str, list[nn.Parameter]] = {}
        start = 0
        for shard in shards:
            stop = start + shard.size
            part = nn.Parameter(weights[start:stop])
            part.grad = self.gradient[start:stop]
            slices.setdefault(shard.parameter, []).append(part)
            start = stop
        self._optimizer = served_optimizer(slices, shapes, build, name=optimizer)

    def push(self, clock: int, part: int, gradient: Tensor) -> bool:
        """Take the gradient of batch part ``part`` in iteration ``clock``. With synchronous workers
        (bsp) the weights are updated when all parts are there, else at once. Return False if the
        server has had this gradient."""
        if part in self.clocks.workers:  # a lost worker's push may still come from its home
            if clock != self.clocks.clock(part):
                return False
            self.clocks.push(part)
        if self.clocks.bound != 0:
            self._update((gradient,))
            return True
        self._pending[part] = gradient
        if len(self._pending) == len(self._parts):
            self.previous.copy_(self.weights)
            self._update([self._pending[each] for each in self._parts])
            self._pending.clear()
        return True

    def _update(self, gradients: Sequence[Tensor]) -> None:
        self.gradient.copy_(gradients[0])
        for other in gradients[1:]:
            self.gradient.add_(other)
        self._optimizer.step()
        self.version += 1

    def is_ready(self, clock: int, worker: int) -> bool:
        """Tell whether these weights are new enough for a worker to begin iteration ``clock``. Its
        own earlier pushes must have come, since pushes and pulls have separate connections."""
        if self.clocks.bound == 0:
            return self.version >= clock
        return self.clocks.may_begin(worker) and self.clocks.clock(worker) >= clock

    def read(self, clock: int) -> Tensor:
        """Return the weights with which iteration ``clock`` is computed if workers run in lockstep
        (bsp), else the newest weights."""
        if self.clocks.bound == 0 and clock < self.version:
            assert clock == self.version - 1
            return self.previous
        return self.weights


def served_optimizer(
    slices: Mapping[str, Sequence[nn.Parameter]],
    shapes: Mapping[str, torch.Size],
    build: BuildOptimizer | None,
    *,
    name: str,
) -> Optimizer:
    """Make an optimizer over the ``slices`` of parameters that a server holds, with the parameter
    groups that the optimizer of the whole model has.

    It is built with stand-ins for all parameters, with their ``shapes`` but without memory; the
    slices then replace them. Raises UsageError AP955 for optimizers that do not update each element
    independently.
    """
    first = next(part for parts in slices.values() for part in parts)
    stand_ins = {
        each: nn.Parameter(torch.zeros((), dtype=first.dtype).expand(shape))
        for each, shape in shapes.items()
    }
    if build is None:
        optimizer = default_optimizer(stand_ins.values(), name)
    else:
        optimizer = build_with(build, stand_ins.items())
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise UsageError(
            "AP955",
            f"parameter servers cannot run the optimizer {type(optimizer).__name__}",
            why="a server holds parts of parameters, and only optimizers that step each element "
            "by itself do the same with parts as with whole parameters",
            where="build_optimizer",
            fix=f"one of {kinds}; or a plan without servers",
        )
    names = {id(parameter): each for each, parameter in stand_ins.items()}
    for group in optimizer.param_groups:
        held: Iterable[str] = [names[id(parameter)] for parameter in group["params"]]
        group["params"] = [part for each in held for part in slices.get(each, ())]
    return optimizer


TICK_SECONDS = 1.0
"""Time between two reports of progress by a server that waits for requests."""


class Server:
    """A parameter server. ``pieces`` are the pieces of the weights that it owns and the replicas of
    another server's pieces, by home server and block. ``replica`` is the connection to the server
    that holds replicas of the pieces that this server owns."""

    def __init__(
        self,
        index: int,
        pieces: Mapping[tuple[int, int], ServedPiece],
        num_parts: int,
        replica: Channel | None,
    ) -> None:
        self.index, self.pieces = index, pieces
        self._num_parts, self._replica = num_parts, replica
        self._changed = threading.Condition()
        self._forwarding = threading.Lock()
        self._lost = 0
        self._losses: dict[int, dict[int, Tensor]] = {}
        self._of_workers: list[threading.Thread] = []
        self._of_servers: list[threading.Thread] = []

    def serve(self, channel: PeerChannel, worker: int | None) -> None:
        """Answer the requests of a connection in a new thread; ``worker`` is None if another server
        sends them."""
        thread = threading.Thread(target=self._answer_all, args=(channel, worker), daemon=True)
        thread.start()
        (self._of_workers if worker is not None else self._of_servers).append(thread)

    def finish(self, progress: Callable[[str], None] | None = None) -> None:
        """Wait until all workers are done or lost, then until the other server that sends updates
        to the replicas held here is done."""
        _join(self._of_workers, progress)
        if self._replica is not None:
            try:
                self._replica.call(Request(BYE), None, None)
            except PeerLostError:
                self._replica = None
        _join(self._of_servers, progress)

    def _answer_all(self, channel: PeerChannel, worker: int | None) -> None:
        try:
            while (request := channel.next_request()).operation != BYE:
                payload = self._memory(request)
                if payload is not None:
                    channel.receive(payload)
                channel.answer(self.handle(request, payload))
        except PeerLostError:
            if worker is not None:
                self.lose(worker)

    def _memory(self, request: Request) -> Tensor | None:
        if request.operation == LOSS:
            return torch.zeros((), dtype=torch.float64)
        if request.operation in (PUSH, COPY):
            return torch.empty_like(self.pieces[request.home, request.block].weights)
        return None

    def lose(self, worker: int) -> None:
        """Record that a worker is lost, and go on without it."""
        with self._changed:
            self._lost |= 1 << worker
            for piece in self.pieces.values():
                if piece.clocks.bound != 0:
                    piece.clocks.leave(worker)
            self._changed.notify_all()

    def handle(self, request: Request, payload: Tensor | None) -> Reply:
        """Execute a request and return the reply. Waits until the requested weights or loss exist,
        or until a worker is lost that the sender does not know of."""
        if request.operation == LOSS:
            assert payload is not None
            with self._changed:
                self._losses.setdefault(request.clock, {})[request.part] = payload
                self._changed.notify_all()
            return Reply(READY)
        if request.operation == READ_LOSS:
            return self._read_loss(request)
        piece = self.pieces[request.home, request.block]
        if request.operation == PULL:
            return self._pull(request, piece)
        if request.operation == GRADIENT:
            with self._changed:
                return Reply(READY, self._lost, piece.gradient.clone())
        assert payload is not None
        if request.operation == COPY or request.home != self.index:
            with self._changed:
                self._apply(piece, request, payload)
            return Reply(READY)
        with self._forwarding:  # replicas see pushes in the order of their home
            with self._changed:
                is_new = self._apply(piece, request, payload)
            if is_new:
                self._forward(request, payload)
        return Reply(READY)

    def _apply(self, piece: ServedPiece, request: Request, gradient: Tensor) -> bool:
        is_new = piece.push(request.clock, request.part, gradient)
        self._changed.notify_all()
        return is_new

    def _forward(self, request: Request, payload: Tensor) -> None:
        if self._replica is None:
            return
        try:
            self._replica.call(request._replace(operation=COPY), payload, None)
        except PeerLostError:
            self._replica = None

    def _pull(self, request: Request, piece: ServedPiece) -> Reply:
        with self._changed:
            self._changed.wait_for(
                lambda: piece.is_ready(request.clock, request.part) or self._is_news(request)
            )
            if piece.is_ready(request.clock, request.part):
                return Reply(READY, self._lost, piece.read(request.clock).clone())
            return Reply(LOST, self._lost)

    def _read_loss(self, request: Request) -> Reply:
        with self._changed:
            losses = self._losses.setdefault(request.clock, {})
            self._changed.wait_for(lambda: len(losses) == self._num_parts or self._is_news(request))
            if len(losses) < self._num_parts:
                return Reply(LOST, self._lost)
            total = torch.stack([losses[part] for part in sorted(losses)]).sum()
            for old in [clock for clock in self._losses if clock < request.clock]:
                del self._losses[old]
            return Reply(READY, self._lost, total)

    def _is_news(self, request: Request) -> bool:
        return bool(self._lost & ~request.known)


def _join(threads: Iterable[threading.Thread], progress: Callable[[str], None] | None) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(TICK_SECONDS)
            if progress is not None:
                progress("serving weights")
