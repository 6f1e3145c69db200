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
"""Callback before each wait, called with the reason and the ranks that are waited for."""


class Pending(Protocol):
    """Interface of a tensor whose values come later. ``value`` returns it once they are there; on a
    GPU the device waits, not the host. ``host_value`` waits on the host and returns a tensor to
    read there. An attribute ``tensor``, if present, is the tensor without its values."""

    def value(self) -> Tensor: ...
    def host_value(self) -> Tensor: ...


class Arrival:
    """A tensor that a collective is filling. ``value`` waits until it is filled (on a GPU, the GPU
    waits, not the host). ``host_value`` waits on the host and returns the tensor for reads
    there."""

    def __init__(
        self,
        tensor: Tensor,
        work: Waitable | None,
        *,
        tell: Callable[[], None] = lambda: None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an arrival; ``tell`` and ``told`` are called before and after each wait."""
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
    """A tensor with an autograd graph; a collective fills its memory until ``arrival`` is done."""

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
"""Functions that need only a tensor's shape, dtype or graph: they do not wait for values."""

READ_BY_HOST = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__format__,
    Tensor.__int__,
}
"""Functions that convert a tensor's values to Python numbers or text, on the host."""


class ArrivingTensor(Tensor):
    """A tensor whose values arrive later: its first use waits for them, except a use by a function
    in ``NEEDS_NO_VALUE``. Results of ops on it are ordinary tensors."""

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
        """Run an op that reaches this tensor without a Python function, such as a script's
        collective, on the arrived values."""
        given = tree_map_only(ArrivingTensor, lambda t: t.arrival.value().detach(), (args, kwargs))
        return function(*given[0], **(given[1] or {}))


def arriving_tensor(arrival: Pending, like: Tensor) -> Tensor:
    """Make a tensor on the device and with the autograd graph of ``like``. Its values come from
    ``arrival``, and are waited for when they are first used."""
    tensor = like.as_subclass(ArrivingTensor)
    tensor.arrival = arrival
    return tensor


def shared_sum(
    part: Tensor,
    *,
    others: Sequence[int],
    progress: Progress | None = None,
) -> Tensor:
    """Sum a loss over all ranks' parts of it, in the memory of ``part``; return the sum. A backward
    from the sum runs as a backward from ``part``. All ranks call it; it returns at once. ``others``
    are the ranks whose parts are not 0, for a watchdog."""
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
    """Make the ``Arrival`` of ``tensor``, filled by ``work``; before a wait it calls ``progress``
    with ``words`` and the ranks ``others``."""
    if progress is None:
        return Arrival(tensor, work)
    return Arrival(
        tensor,
        work,
        tell=partial(progress, words, tuple(others)),
        told=partial(progress, BETWEEN_STEPS, ()),
    )


def pending_figure(tensor: Tensor) -> Pending:
    """Return a handle by which the host reads a one-element tensor once its value is there."""
    return tensor.arrival if isinstance(tensor, ArrivingTensor) else Arrival(tensor, None)


def _as_made(tensor: Tensor) -> Tensor:
    """Return the plain tensor, with its autograd graph, that an ``ArrivingTensor`` stands for, if
    possible without waiting for its values. Return any other tensor unchanged."""
    if not isinstance(tensor, ArrivingTensor):
        return tensor
    known: Tensor | None = getattr(tensor.arrival, "tensor", None)
    return tensor.arrival.value() if known is None else known


def _arrived(value: Any) -> Any:
    """Wait for each ``ArrivingTensor`` in ``value`` (a tensor, list or tuple); return ``value``
    with plain tensors instead."""
    if isinstance(value, ArrivingTensor):
        return value.arrival.value()
    if type(value) in (list, tuple):
        return type(value)(_arrived(part) for part in value)
    return value


def end_before_exit(kind: str, arrival: Arrival) -> None:
    """Make the process wait for ``arrival`` before it exits: gloo's threads would abort it while
    the collective still runs. An earlier arrival of the same ``kind`` ("loss", "norm", …) is waited
    for now."""
    if not _LATEST:
        atexit.register(_end_all)
    if kind in _LATEST:
        _LATEST[kind].end()
    _LATEST[kind] = arrival


def _end_all() -> None:
    for arrival in _LATEST.values():
        arrival.end()


_LATEST: dict[str, Arrival] = {}
"""The newest result of each kind ("loss", "norm", …) on its way to the host, of any trainer."""
