"""A device's queue of work, which the host fills ahead of it.

In: what the host has given a device to do. Out: how far the device has come, and copies between
its memory and the host's that neither of them waits for. On a GPU every call returns before its
work is done, ``Work.wait`` of a message or a collective too: it only has the device wait. On a CPU
the host does the work itself.

``QUEUES`` has a class for each type of device. Only ``CudaQueue`` calls ``torch.cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in the queue of a device, as ``torch.cuda.Event`` is."""

    def query(self) -> bool:
        """Whether the device has passed it; never waits."""

    def synchronize(self) -> None:
        """Has the host wait until the device has passed it."""


class Waitable(Protocol):
    """What a collective returns that is under way, as ``torch.distributed.Work`` is."""

    def wait(self) -> Any: ...


class HostCopy(NamedTuple):
    """A copy in host memory, which is there once ``event`` is done."""

    tensor: Tensor
    event: Event


class DeviceQueue(Protocol):
    """The queue of one device. ``runs_behind``: its host may be ahead of it."""

    @property
    def device(self) -> torch.device: ...
    @property
    def runs_behind(self) -> bool: ...

    def mark(self, event: Event | None = None) -> Event:
        """An event that is done when all is that the device was given to do so far.

        ``event`` is one of this queue that is used again.
        """

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors on the device, of those in host memory copies that nobody waits for."""

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        """A copy of ``tensor``, which ``work`` fills, if any; None where it is host memory."""


class _Passed:
    """An event of a device that is never behind."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


PASSED = _Passed()


@dataclass(frozen=True, slots=True)
class HostQueue:
    """Of a device that works while its host calls it: a CPU."""

    device: torch.device
    runs_behind: bool = False

    def mark(self, event: Event | None = None) -> Event:
        return PASSED

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(part.to(self.device) for part in parts)

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        return None


@dataclass(frozen=True, slots=True)
class CudaQueue:
    """Of a GPU. Inputs and figures are copied on streams of their own, beside its computation."""

    device: torch.device
    runs_behind: bool = True
    _inputs: Any = field(init=False)
    _figures: Any = field(init=False)

    def __post_init__(self) -> None:
        for name in ("_inputs", "_figures"):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            object.__setattr__(self, name, stream)

    def mark(self, event: Event | None = None) -> Event:
        found: Any = _cuda_event() if event is None else event
        found.record(torch.cuda.current_stream(self.device))
        return found  # type: ignore[no-any-return]

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._inputs):
            on_host = [part for part in parts if part.device.type == "cpu"]
            made = packed_copies(on_host, self._pinned, self._copy)
        current.wait_stream(self._inputs)
        for each in made:
            each.record_stream(current)
        copies = iter(made)
        return tuple(next(copies) if part.device.type == "cpu" else part for part in parts)

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        if tensor.device.type == "cpu":
            return None
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._figures.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._figures):
            if work is not None:
                work.wait()
            pinned.copy_(tensor, non_blocking=True)
            event = _cuda_event()
            event.record(self._figures)
        tensor.record_stream(self._figures)
        return HostCopy(pinned, event)

    def _pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def _cuda_event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def packed_copies(
    parts: Sequence[Tensor],
    empty: Callable[[int, torch.dtype], Tensor],
    copy: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """``copy`` of every tensor, called once for each dtype: they lie in one piece of memory.

    ``empty(num_elements, dtype)`` makes the memory that ``copy`` reads. Tensors that are the same
    memory are copied once.

    >>> parts = [torch.tensor([1, 2]), torch.tensor([[3.0]]), torch.tensor([4])]
    >>> packed_copies(parts, lambda n, dtype: torch.empty(n, dtype=dtype), torch.clone)
    (tensor([1, 2]), tensor([[3.]]), tensor([4]))
    """
    places: dict[tuple[Any, ...], int] = {}
    which = [places.setdefault(_memory(part), at) for at, part in enumerate(parts)]
    copies: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        own = [at for at in places.values() if parts[at].dtype == dtype]
        whole = empty(sum(parts[at].numel() for at in own), dtype)
        for at, slot in zip(own, _slots(whole, [parts[at] for at in own]), strict=True):
            slot.copy_(parts[at])
        for at, slot in zip(own, _slots(copy(whole), [parts[at] for at in own]), strict=True):
            copies[at] = slot
    return tuple(copies[at] for at in which)


def _memory(part: Tensor) -> tuple[Any, ...]:
    """What two tensors share that are the same values in the same memory."""
    return part.data_ptr(), part.dtype, tuple(part.shape), part.stride()


def _slots(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of flat memory in the shapes of ``like``."""
    sizes = [each.numel() for each in like]
    pieces = torch.split(whole, sizes) if sizes else ()
    return [piece.view(each.shape) for piece, each in zip(pieces, like, strict=True)]


QUEUES: Mapping[str, Callable[[torch.device], DeviceQueue]] = {
    "cpu": HostQueue,
    "cuda": CudaQueue,
}


@cache
def queue_of(device: torch.device) -> DeviceQueue:
    """The queue of a device of this process, of which there is one."""
    return QUEUES[device.type](device)
