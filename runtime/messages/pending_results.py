"""Results of a step that are still on their way: only a read of a result waits for it.

In: a running collective that brings a number to every rank. Out: a tensor that waits for it when it
is read. So a step has no wait for all ranks: the first stage begins the next step while the last
stage's loss travels.

A number that the host reads is copied to host memory as soon as it is made: a read of a GPU tensor
would wait for all work that the GPU was given since.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .device_queue import Waitable, queue_of
from .watchdog import BETWEEN_STEPS

Progress = Callable[[str, tuple[int, ...]], None]
"""Callback before each wait; it takes the reason, and the ranks that are waited for."""


class Pending(Protocol):
    """A tensor's value, computed or waited for at its first read, on its device or by the host. An
    object with an attribute ``tensor`` knows all but the value before."""

    def value(self) -> Tensor: ...
    def host_value(self) -> Tensor: ...


class Arrival:
    """A tensor that a collective fills; ``value`` waits for it where it is used: on a GPU the GPU
    does. ``host_value`` is for reads by the host, which then waits."""

    def __init__(
        self,
        tensor: Tensor,
        work: Waitable | None,
        *,
        tell: Callable[[], None] = lambda: None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an arrival; ``tell`` is called before a wait, ``told`` after it."""
        self._tensor, self._work = tensor, work
        self._tell, self._told = tell, told
        self._copy = queue_of(tensor.device).to_host(tensor, work)

    def value(self) -> Tensor:
        self.end()
        return self._tensor

    def host_value(self) -> Tensor:
        copy = self._copy
        if copy is None:
            return self.value()
        if not copy.event.query():
            self._tell()
            copy.event.synchronize()
            self._told()
        return copy.tensor

    def end(self) -> None:
        """Wait until the value has arrived; any thread may call this."""
        work = self._work  # another thread may read it too
        if work is None:
            return
        self._tell()
        work.wait()
        self._work = None
        self._told()


@dataclass(frozen=True, slots=True)
class _WithGraph:
    """A tensor with an autograd graph, whose memory ``arrival`` fills."""

    tensor: Tensor
    arrival: Arrival

    def value(self) -> Tensor:
        self.arrival.end()
        return self.tensor

    def host_value(self) -> Tensor:
        return self.arrival.host_value()


_PROPERTIES = ("device", "dtype", "grad_fn", "ndim", "requires_grad", "shape")
NEEDS_NO_VALUE = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.backward,
    Tensor.dim,
    Tensor.numel,
    Tensor.size,
    Tensor.is_floating_point,
}
"""Functions that need not wait for the value of the tensor in their first argument."""

READ_BY_HOST = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__format__,
    Tensor.__int__,
}
"""Functions that convert a tensor to Python numbers or text."""


class ArrivingTensor(Tensor):
    """A tensor whose value comes later: the first use of any kind waits for it, except uses in
    ``NEEDS_NO_VALUE``.

    Results of ops on it are ordinary tensors.
    """

    arrival: Pending

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in NEEDS_NO_VALUE:
            return function(_as_made(args[0]), *args[1:], **kwargs)
        if function in READ_BY_HOST and isinstance(args[0], ArrivingTensor):
            return function(args[0].arrival.host_value(), *args[1:], **kwargs)
        named = {name: _arrived(value) for name, value in kwargs.items()}
        return function(*(_arrived(value) for value in args), **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ops that reach the tensor by no Python function, such as a script's collectives."""
        given = tree_map_only(ArrivingTensor, lambda t: t.arrival.value().detach(), (args, kwargs))
        return function(*given[0], **(given[1] or {}))


def arriving_tensor(arrival: Pending, like: Tensor) -> Tensor:
    """Make a tensor with the device and graph of ``like`` that waits for ``arrival`` when used."""
    tensor = like.as_subclass(ArrivingTensor)
    tensor.arrival = arrival
    return tensor


def shared_sum(
    part: Tensor,
    *,
    others: Sequence[int],
    progress: Progress | None = None,
) -> Tensor:
    """Return the sum over all ranks of their parts of a loss, in the memory of ``part``.

    A backward from the sum runs as a backward from ``part``. All ranks call it; it returns at once.
    ``others`` are the ranks whose parts are not 0, for a watchdog.
    """
    memory = part.detach()
    work = dist.all_reduce(memory, async_op=True)
    names = " and ".join(f"rank {other}" for other in others)
    words = f"waiting for the loss of {names}" if names else "waiting until the loss has gone"
    arrival = arrival_of(memory, work, words, others=others, progress=progress)
    end_before_exit("loss", arrival)
    return arriving_tensor(_WithGraph(part, arrival), part)


def arrival_of(
    tensor: Tensor,
    work: dist.Work | None,
    words: str,
    *,
    others: Sequence[int],
    progress: Progress | None,
) -> Arrival:
    """Make an arrival that tells ``progress`` of its waits: ``words``, waiting for ``others``."""
    if progress is None:
        return Arrival(tensor, work)
    return Arrival(
        tensor,
        work,
        tell=partial(progress, words, tuple(others)),
        told=partial(progress, BETWEEN_STEPS, ()),
    )


def pending_figure(tensor: Tensor) -> Pending:
    """Return a number of a step for the host to read, arrived or not."""
    return tensor.arrival if isinstance(tensor, ArrivingTensor) else Arrival(tensor, None)


def _as_made(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with its graph, even if its value has not arrived."""
    if not isinstance(tensor, ArrivingTensor):
        return tensor
    known: Tensor | None = getattr(tensor.arrival, "tensor", None)
    return tensor.arrival.value() if known is None else known


def _arrived(value: Any) -> Any:
    """Return ``value`` after a wait for the arriving tensors in it."""
    if isinstance(value, ArrivingTensor):
        return value.arrival.value()
    if type(value) in (list, tuple):
        return type(value)(_arrived(part) for part in value)
    return value


def end_before_exit(kind: str, arrival: Arrival) -> None:
    """Register ``arrival`` to be waited for before the process exits, which gloo's threads would
    abort while the collective runs.

    The previous arrival of the same ``kind`` is waited for here: by now every rank that this rank
    exchanges messages with has begun it, as it has sent messages of a later step.
    """
    if not _LATEST:
        atexit.register(_end_all)
    if kind in _LATEST:
        _LATEST[kind].end()
    _LATEST[kind] = arrival


def _end_all() -> None:
    for arrival in _LATEST.values():
        arrival.end()


_LATEST: dict[str, Arrival] = {}
"""Arrival of the last step, of any trainer, by kind."""
