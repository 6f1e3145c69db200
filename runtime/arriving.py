"""Results of a step that are still on their way: who reads one waits for it, nobody else.

In: the collective that brings a number to every rank, under way. Out: a tensor that waits for
it when it is read. So a step has no wait for all ranks: the first stage begins the next step
while the last one's loss travels.
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

from .watchdog import BETWEEN_STEPS


class Arrival:
    """A tensor that a collective fills; ``value`` waits for it."""

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work | None,
        *,
        tell: Callable[[], None] = lambda: None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """``tell`` is called before a wait, ``told`` after it."""
        self._tensor, self._work = tensor, work
        self._tell, self._told = tell, told

    def value(self) -> Tensor:
        self.end()
        return self._tensor

    def end(self) -> None:
        """Waits until it has arrived, whoever reads it."""
        work = self._work  # another thread may read it too
        if work is None:
            return
        self._tell()
        work.wait()
        self._work = None
        self._told()


@dataclass(frozen=True, slots=True)
class _WithGraph:
    """A tensor with autograd's graph, whose memory ``arrival`` fills."""

    tensor: Tensor
    arrival: Arrival

    def value(self) -> Tensor:
        self.arrival.end()
        return self.tensor


class Pending(Protocol):
    """A tensor's value, which is made or waited for when it is first read."""

    def value(self) -> Tensor: ...


_PROPERTIES = ("device", "dtype", "grad_fn", "ndim", "requires_grad", "shape")
NEEDS_NO_VALUE = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.backward, Tensor.dim, Tensor.numel, Tensor.size, Tensor.is_floating_point,
}  # fmt: skip
"""What a tensor may be asked, as its first argument, while its value is on its way."""


class ArrivingTensor(Tensor):
    """A tensor whose value comes later: the first use of any kind waits for it, but for those
    that ``NEEDS_NO_VALUE``.

    What is made of it is an ordinary tensor.
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
        """What reaches the tensor by no function of Python's: collectives of a script, for one."""
        given = tree_map_only(ArrivingTensor, lambda t: t.arrival.value().detach(), (args, kwargs))
        return function(*given[0], **(given[1] or {}))


def arriving(arrival: Pending, like: Tensor) -> Tensor:
    """A tensor, on the device and with the graph of ``like``, that waits for ``arrival`` when it
    is used."""
    tensor = like.as_subclass(ArrivingTensor)
    tensor.arrival = arrival
    return tensor


def shared_sum(
    part: Tensor,
    *,
    others: Sequence[int],
    progress: Callable[[str, tuple[int, ...]], None] | None = None,
) -> Tensor:
    """The sum over all ranks of their parts of a loss, in the memory of ``part``.

    A backward from it is one from ``part``. All ranks call it; it returns at once. ``others``
    are the ranks whose parts are not 0, for a watchdog.
    """
    memory = part.detach()
    work = dist.all_reduce(memory, async_op=True)
    arrival = Arrival(memory, work)
    if progress is not None:
        names = " and ".join(f"rank {other}" for other in others)
        words = f"waiting for the loss of {names}" if names else "waiting until the loss has gone"
        arrival = Arrival(
            memory, work,
            tell=partial(progress, words, tuple(others)), told=partial(progress, BETWEEN_STEPS, ()),
        )  # fmt: skip
    end_before_exit("loss", arrival)
    return arriving(_WithGraph(part, arrival), part)


def _as_made(tensor: Tensor) -> Tensor:
    """``tensor`` with its graph, though its value may be on its way."""
    if not isinstance(tensor, ArrivingTensor):
        return tensor
    pending = tensor.arrival
    return pending.tensor if isinstance(pending, _WithGraph) else pending.value()


def _arrived(value: Any) -> Any:
    """``value`` with the tensors in it that were on their way."""
    if isinstance(value, ArrivingTensor):
        return value.arrival.value()
    if type(value) in (list, tuple):
        return type(value)(_arrived(part) for part in value)
    return value


def end_before_exit(kind: str, arrival: Arrival) -> None:
    """A collective that nobody waits for until the end would abort the process, in gloo's threads.

    The one of the same ``kind`` before is ended here: by now every rank that this one exchanges
    messages with has begun it, as it has sent what belongs to a later step.
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
"""The last step's, of any trainer."""
