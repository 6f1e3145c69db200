"""Activations and gradients in host memory: the values that a block keeps for its backward, and the
sums of its gradients, moved beside compute.

In: the tensors that autograd, or recomputation, keeps of a block's forward. Out: the same tensors
in its backward; in between their memory on the device is free. A storage is moved once, however
many views of it are kept; parameters, buffers and constants stay.

Copies run in a queue of their own, in the order in which they are started. The values of a block
are sent when its forward ends, and fetched when the backward of the block after it begins. A device
holds the values of two blocks: of the running block, and of the block that is sent or fetched
meanwhile (``stage_cost`` prices them). A block whose backward comes before its
memory is given back is not fetched. Gradients are sent when their reduction ends, and the sums of
several micro-batches are made on the device, from the sum so far (``DeviceQueue.add``), as
DeepSpeed does.

Source: torch.autograd.graph.saved_tensors_hooks; Rajbhandari et al. 2021, "ZeRO-Infinity"
(arXiv:2104.07857), section 5; the window: torchtune's OffloadActivations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ...passes.ops.collectives import local_tensor
from ..messages.device_queue import DeviceQueue, Event

if TYPE_CHECKING:
    from ...passes.local.stage_program import StageProgram

LEAST_BYTES = 1024
"""Bytes of a storage at the least: smaller ones, such as scalars, stay on the device."""


class Kept(NamedTuple):
    """Tensor whose storage is in host memory: the storage's place in ``values``, and the dtype,
    shape, stride and offset of the tensor in it."""

    values: OffloadedValues
    place: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Offloader:
    """Copies between a device and host memory for the blocks of a stage. ``staying``: keys of
    parameters, buffers and constants, which stay on the device. ``last``: values of the last block
    that ran in the present forward, whose backward comes first."""

    queue: DeviceQueue
    staying: frozenset[str] = frozenset()
    last: OffloadedValues | None = None
    num_sent_bytes: int = 0
    _sending: deque[OffloadedValues] = field(default_factory=deque)
    _free: dict[int, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(program: StageProgram, queue: DeviceQueue) -> Offloader:
        """Return the offloader of a rank's program on the device of ``queue``."""
        staying = (*program.parameters, *program.buffers, *program.constants)
        return Offloader(queue, frozenset(staying))

    def begin(
        self, graph: Module, keys: Sequence[str], inputs: Sequence[Tensor]
    ) -> OffloadedValues:
        """Return a store for the values that the forward of a block keeps: of its ``graph`` on
        ``inputs``, the values with these keys."""
        own = map(local_tensor, (*graph.parameters(), *graph.buffers()))
        given = (own for key, own in zip(keys, inputs, strict=True) if key in self.staying)
        places = frozenset(each.untyped_storage().data_ptr() for each in (*own, *given))
        return OffloadedValues(self, places, self.last)

    def send(self, values: OffloadedValues) -> None:
        """Start to copy a block's values to the host, as its forward has ended; give back the
        memory of the block before it, once its copies are done."""
        values.send()
        self.last = values
        self._sending.append(values)
        while len(self._sending) > 1:
            self._sending.popleft().give_back()

    def give_back(self) -> None:
        """Give back the memory of all values that have been sent."""
        while self._sending:
            self._sending.popleft().give_back()

    def is_sending(self, values: OffloadedValues) -> bool:
        """Return whether the device still holds values that have been sent."""
        return any(each is values for each in self._sending)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return memory of the host to copy to; memory that was returned is used again."""
        free = self._free.get(num_bytes)
        return free.pop() if free else self.queue.host_memory(num_bytes)

    def take_back(self, memory: Tensor) -> None:
        """Take host memory whose values are no longer needed. Later copies to it follow the copies
        from it in the queue."""
        self._free.setdefault(memory.numel(), []).append(memory)


@dataclass(eq=False)
class HostSums:
    """Sums of a stage's gradients in host memory. The device holds the gradients of two blocks."""

    queue: DeviceQueue
    _sending: deque[tuple[int | None, Tensor, Event]] = field(default_factory=deque)
    _memory: dict[str, Tensor] = field(default_factory=dict)
    _sent: dict[str, Event] = field(default_factory=dict)

    def add(self, name: str, block: int | None, gradient: Tensor, total: Tensor | None) -> Tensor:
        """Start to add a gradient of parameter ``name``, in the dtype of the sum, to ``total``, or
        with None to begin the sum anew; return the sum in host memory. ``block``: the position of
        the parameter's block."""
        if total is None:
            total = self._host_memory(name, gradient)
            event = self.queue.copy([(gradient, total)])
        else:
            self.queue.wait_for(self._sent[name])
            event = self.queue.add([(gradient, total)])
        self._sent[name] = event
        self._sending.append((block, gradient, event))
        while len({block for block, *_ in self._sending}) > 2:
            self.queue.wait_for(self._sending.popleft()[2])
        return total

    def _host_memory(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._memory:
            memory = self.queue.host_memory(max(1, gradient.nbytes))[: gradient.nbytes]
            self._memory[name] = memory.view(gradient.dtype).view(gradient.shape)
        return self._memory[name]

    def finish(self) -> None:
        """Wait on the host until all sums are complete in its memory."""
        for _, _, event in self._sending:
            event.synchronize()
        self._sending.clear()


def share_window(offloaders: Iterable[Offloader | None]) -> None:
    """Let the stages of a rank, which run in turn, share host memory and the window of two blocks
    that the device holds."""
    own = [each for each in offloaders if each is not None]
    for each in own[1:]:
        each._sending, each._free = own[0]._sending, own[0]._free


@dataclass(eq=False)
class OffloadedValues:
    """Values that one forward of a block keeps. ``staying``: addresses of storages that are not
    moved; ``before``: values of the block whose backward comes next."""

    owner: Offloader
    staying: frozenset[int]
    before: OffloadedValues | None
    _places: dict[int, int] = field(default_factory=dict)
    _device: list[Tensor | None] = field(default_factory=list)
    _host: list[Tensor] = field(default_factory=list)
    _left: list[int] = field(default_factory=list)
    _copied: Event | None = None

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Kept | Tensor], Callable[[Kept | Tensor], Tensor]]:
        """Return the functions that store and restore a tensor, as for ``saved_tensors_hooks``."""
        return self.keep, self.restore

    def keep(self, tensor: Tensor) -> Kept | Tensor:
        """Store a tensor that the block's backward reads; return the argument of ``restore``."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        is_plain = type(tensor) in (Tensor, Parameter) and tensor.device.type == self._device_type
        if not is_plain or size < LEAST_BYTES or address in self.staying:
            return tensor
        place = self._places.setdefault(address, len(self._device))
        if place == len(self._device):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._device.append(whole.set_(storage, 0, (size,), (1,)))
            self._left.append(0)
        self._left[place] += 1
        offset = int(tensor.storage_offset())
        return Kept(self, place, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def restore(self, kept: Kept | Tensor) -> Tensor:
        """Return the tensor of ``kept`` on the device."""
        if isinstance(kept, Tensor):
            return kept
        storage = kept.values._on_device(kept.place).untyped_storage()
        whole = torch.empty(0, dtype=kept.dtype, device=self.owner.queue.device)
        return whole.set_(storage, kept.offset, kept.shape, kept.stride)

    @property
    def _device_type(self) -> str:
        return self.owner.queue.device.type

    def send(self) -> None:
        """Start to copy all values to the host."""
        self._places.clear()
        sizes = [each.numel() for each in self._device if each is not None]
        self._host = [self.owner.host_memory(size) for size in sizes]
        self._copied = self._copy(self._device, self._host)
        self.owner.num_sent_bytes += sum(sizes)

    def give_back(self) -> None:
        """Drop the device's values, once they have been copied."""
        if self._copied is not None:
            self.owner.queue.wait_for(self._copied)
        self._device = [None] * len(self._host)

    def fetch(self) -> None:
        """Start to copy the values to the device, unless it holds them."""
        missing = [place for place, each in enumerate(self._device) if each is None]
        missing = [place for place in missing if self._left[place]]
        if not missing or self.owner.is_sending(self):
            return
        self.owner.give_back()
        made = [torch.empty_like(self._host[at], device=self.owner.queue.device) for at in missing]
        self._copied = self._copy([self._host[at] for at in missing], made)
        for place, memory in zip(missing, made, strict=True):
            self._device[place] = memory

    def _copy(self, sources: Iterable[Tensor | None], targets: Iterable[Tensor]) -> Event:
        pairs = zip(sources, targets, strict=True)
        return self.owner.queue.copy([(a, b) for a, b in pairs if a is not None])

    def _on_device(self, place: int) -> Tensor:
        """Return a storage on the device as bytes, complete; the store drops it after the last
        tensor that was kept of it."""
        self._left[place] = max(self._left[place], 1)
        self.fetch()
        found = self._device[place]
        assert found is not None, "it was fetched"
        self._left[place] -= 1
        is_dropped = not self._left[place] and self._copied is not None
        if self._copied is not None and (is_dropped or not self.owner.is_sending(self)):
            self.owner.queue.wait_for(self._copied)
        if is_dropped:
            self._device[place] = None
        return found

    def __del__(self) -> None:
        if any(each is not None for each in self._device):
            self.give_back()  # a copy may still write there, if a backward failed
        for memory in self._host:
            self.owner.take_back(memory)
