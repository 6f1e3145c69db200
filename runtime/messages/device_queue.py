"""The queue of a device: events that tell its progress, and copies that do not block the host.

On a GPU a call returns when its work is queued, not when it is done. This holds for ``Work.wait``
of a message or a collective too, which only makes the device wait. On a CPU the host does the
work itself, within the call.

``QUEUES`` has one class for each type of device. Only ``CudaQueue`` calls ``torch.cuda``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from mmap import PAGESIZE
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the queue of a device, like ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the device has reached this point. Does not block."""

    def synchronize(self) -> None:
        """Block the host until the device has reached this point."""


class Waitable(Protocol):
    """A collective that has been started, like ``torch.distributed.Work``."""

    def wait(self) -> Any: ...


class HostCopy(NamedTuple):
    """A copy of a device's tensor in host memory. It is complete when ``event`` is reached."""

    tensor: Tensor
    event: Event


class DeviceQueue(Protocol):
    """The work queue of one device. ``runs_behind``: calls return before their work is done."""

    @property
    def device(self) -> torch.device: ...
    @property
    def runs_behind(self) -> bool: ...

    def mark(self, event: Event | None = None) -> Event:
        """Record an event in the queue, which is reached when all work queued so far is done.
        ``event`` is an earlier event of this queue to record again, instead of a new one."""

    def moment(self) -> Any:
        """Return a timestamp of the queue's present end; ``seconds`` compares two timestamps."""

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds from one ``moment`` to another. Blocks until both are reached."""

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return ``parts`` on the device. Tensors in host memory are copied without blocking."""

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        """Start to copy ``tensor`` to host memory once ``work``, the collective that fills it, is
        done. Return None if ``tensor`` is in host memory already."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return bytes in host memory for ``copy``, which are never given back to the host."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Start to copy each first tensor to the second, between device and host, once all work
        queued so far is done, and after the copies in the same direction that were started before;
        return an event that is reached when they are done. The caller holds the tensors until
        ``wait_for`` it."""

    def add(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Start to add each first tensor, on the device, to the second in host memory, as ``copy``
        does. The sums so far are fetched beside copies to the host."""

    def wait_for(self, event: Event) -> None:
        """Let all work that is queued from now on wait for ``event``. Does not block the host."""


class _Passed:
    """Event that counts as reached at all times."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once: the host's work is always done."""


PASSED = _Passed()


@dataclass(frozen=True, slots=True)
class HostQueue:
    """Queue of a CPU: the work is done when the call returns."""

    device: torch.device
    runs_behind: bool = False

    def mark(self, event: Event | None = None) -> Event:
        return PASSED

    def moment(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(part.to(self.device) for part in parts)

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        return None

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        for source, target in pairs:
            target.copy_(source)
        return PASSED

    def add(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        for source, target in pairs:
            target += source
        return PASSED

    def wait_for(self, event: Event) -> None:
        event.synchronize()


@dataclass(frozen=True, slots=True)
class CudaQueue:
    """Queue of a GPU. Inputs, results, and copies to and from the host are on their own streams,
    beside other work."""

    device: torch.device
    runs_behind: bool = True
    _inputs: Any = field(init=False)
    _figures: Any = field(init=False)
    _sends: Any = field(init=False)
    _fetches: Any = field(init=False)

    def __post_init__(self) -> None:
        for name in ("_inputs", "_figures", "_sends", "_fetches"):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            object.__setattr__(self, name, stream)

    def mark(self, event: Event | None = None) -> Event:
        found: Any = _cuda_event() if event is None else event
        found.record(torch.cuda.current_stream(self.device))
        return found  # type: ignore[no-any-return]

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, first: Any, second: Any) -> float:
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

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

    def host_memory(self, num_bytes: int) -> Tensor:
        # pin_memory=True would round the size up to a power of two; whole pages are pinned
        size = -(-num_bytes // PAGESIZE) * PAGESIZE
        memory = torch.empty(size + PAGESIZE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGESIZE
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.data_ptr() + start, size, 0)
        torch.cuda.check_error(int(status))
        return memory[start : start + num_bytes]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        is_sent = any(target.device.type == "cpu" for _, target in pairs)
        stream = self._sends if is_sent else self._fetches
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return _recorded(stream)

    def add(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        self._fetches.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._fetches):
            sums = [target.to(self.device, non_blocking=True) for _, target in pairs]
        self._sends.wait_stream(self._fetches)
        with torch.cuda.stream(self._sends):
            for (source, target), total in zip(pairs, sums, strict=True):
                target.copy_(total.add_(source), non_blocking=True)
                total.record_stream(self._sends)
        return _recorded(self._sends)

    def wait_for(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)  # type: ignore[arg-type]

    def _pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def _cuda_event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _recorded(stream: Any) -> Event:
    event: Event = _cuda_event()
    event.record(stream)  # type: ignore[attr-defined]
    return event


def packed_copies(
    parts: Sequence[Tensor],
    empty: Callable[[int, torch.dtype], Tensor],
    copy: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """Copy tensors by one call of ``copy`` per dtype, on a flat tensor that has all their values.

    ``empty(num_elements, dtype)`` allocates that flat tensor. Tensors that share their memory are
    copied once.

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
    """Return a key that is equal for two tensors of the same values in the same memory."""
    return part.data_ptr(), part.dtype, tuple(part.shape), part.stride()


def _slots(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into consecutive views that have the shapes of ``like``."""
    sizes = [each.numel() for each in like]
    pieces = torch.split(whole, sizes) if sizes else ()
    return [piece.view(each.shape) for piece, each in zip(pieces, like, strict=True)]


QUEUES: Mapping[str, Callable[[torch.device], DeviceQueue]] = {
    "cpu": HostQueue,
    "cuda": CudaQueue,
}


@cache
def queue_of(device: torch.device) -> DeviceQueue:
    """Return the queue of a device; each process has one queue per device."""
    return QUEUES[device.type](device)
