"""An update in parts, of parameters whose gradients the optimizer gets as copies.

In: parameters whose gradients are held in half precision, or whose masters and optimizer states
are in the host's memory. A part after the other its gradients are brought to the masters (down
to the host, into their format), the optimizer steps, and the device's parameters get the new
values. So the copies of one part exist at a time; nothing of this runs beside anything else.

The optimizer's ``step`` is called once per part: parameters without a gradient are left alone by
the optimizers of ``torch.optim``. Source of the update on the host: Ren et al. 2021,
"ZeRO-Offload", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...passes.ops.collectives import local_tensor
from ..messages.device_queue import queue_of
from ..parameters.parameters import HOST, StageParameter
from .optimizer import published

PART_BYTES = 256_000_000
"""Of the masters of a part. On a GPU copies of less than some MB do not reach a link's rate."""


class PartedUpdate:
    """The updates of ``parameters`` on one rank."""

    def __init__(
        self, parameters: Iterable[StageParameter], device: torch.device, num_threads: int
    ) -> None:
        """``num_threads`` step the optimizer on the host of a GPU."""
        self.device, self.num_threads = device, num_threads
        self.parts = [tuple(part) for part in _parts(parameters)]
        self._staging: dict[torch.dtype, Tensor] = {}

    def __call__(
        self, prepare: Callable[[Sequence[Tensor]], None], step: Callable[[], object]
    ) -> None:
        """Step each part. ``prepare`` scales and clips gradients in place."""
        if self.device.type != "cpu":
            torch.set_num_threads(self.num_threads)
        for part in self.parts:
            self._publish(part)
            gradients = published(part)
            if gradients:
                prepare(gradients)
                step()
            for parameter in part:
                if parameter.casts_gradient:
                    parameter.master.grad = None
            self._refresh([p for p in part if p.formats.offloads and p.spec.requires_grad])

    def _publish(self, part: Sequence[StageParameter]) -> None:
        """Bring gradients to their masters. On a GPU they pass through pinned memory at once."""
        if self.device.type == "cpu":
            for parameter in part:
                parameter.publish()
            return
        gradients = {p.name: p.gradient for p in part if p.formats.offloads}
        copies = self._slices([g for g in gradients.values() if g is not None])
        given = {name: next(copies) for name, own in gradients.items() if own is not None}
        for name, copy in given.items():
            copy.copy_(gradients[name], non_blocking=True)  # type: ignore[arg-type]
        queue_of(self.device).mark().synchronize()
        for parameter in part:
            parameter.publish(given.get(parameter.name))

    def _refresh(self, part: Sequence[StageParameter]) -> None:
        """Bring new values to the device, cast on the host."""
        if self.device.type == "cpu":
            for parameter in part:
                parameter.refresh()
            return
        held = [local_tensor(parameter.held.detach()) for parameter in part]
        for parameter, own, copy in zip(part, held, self._slices(held), strict=True):
            own.copy_(copy.copy_(parameter.local), non_blocking=True)
            parameter.is_stale = False
        queue_of(self.device).mark().synchronize()

    def _slices(self, like: Sequence[Tensor]) -> Iterator[Tensor]:
        """Pinned memory for copies of tensors of a device, all of one dtype; kept for later."""
        total = sum(each.numel() for each in like)
        if not total:
            return iter(())
        dtype = like[0].dtype
        staging = self._staging.get(dtype)
        if staging is None or staging.numel() < total:
            staging = torch.empty(total, dtype=dtype, device=HOST, pin_memory=True)
            self._staging[dtype] = staging
        parts = torch.split(staging[:total], [each.numel() for each in like])
        return (part.view(each.shape) for part, each in zip(parts, like, strict=True))


def _parts(parameters: Iterable[StageParameter]) -> Iterator[list[StageParameter]]:
    part: list[StageParameter] = []
    size = 0
    for parameter in parameters:
        own = parameter.local.numel() * parameter.formats.master.itemsize
        if part and size + own > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += own
    if part:
        yield part
