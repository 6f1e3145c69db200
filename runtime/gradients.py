"""Summing gradients over the mesh axes on which a parameter is held whole.

In: the local gradients of one rank. Out: the same, summed over each parameter's
``reduce_axes``, in buckets of a block or of several small ones. Buckets whose parameters are not
ZeRO-sharded are launched during the last backward as soon as their gradients are there,
and run beside it; the others after it.

Every rank of a group runs the same graph, so all launch their buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from .parameters import StageParameter, attach_gradient_hook

BUCKET_BYTES = 32_000_000
FULL_BYTES = 20_000_000
"""A bucket of more takes no further block. Of 8, 20 and 30 MB, two CPU ranks took the least for 20
with 19 M parameters; DistributedDataParallel has 25."""
BUCKETS, LEAST_BYTES = 8, 1_000_000
"""Where so many buckets of at least so many bytes can be filled, they are: the last one's sum has
no compute beside it."""
PLACED_BYTES = 65_536
"""A gradient of more is copied as it comes, while it is in the processor's cache."""

ALONE = 2
"""Users of a storage, by torch's count, that are always there: the tensor, and who asks."""

NEVER = ""
"""No parameter's name: a bucket that waits for it is launched after the last backward."""

_users_of: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(eq=False)
class Bucket:
    """Parameters reduced together over ``axes``, in one piece of memory.

    ``waiting`` are those with no gradient yet. While it ``is_open`` their gradients go into
    ``slots``, the parts of ``flat``.
    """

    axes: tuple[int, ...]
    parameters: list[StageParameter]
    waiting: set[str] = field(default_factory=set)
    flat: Tensor | None = None
    slots: dict[str, Tensor] = field(default_factory=dict)
    is_open: bool = False
    work: Any = None

    def open(self) -> None:
        """Memory for a step's gradients: the last step's, if nobody has any of it.

        On a CPU new memory costs more than writing to it: 2 ms for 4 MB, which the kernel gives
        page by page. What a caching allocator gives is not kept.
        """
        self.is_open = True
        if self.flat is not None and _users_of is not None:
            users = _users_of(self.flat.untyped_storage()._cdata)
            # A slot of no elements is a tensor of its own.
            ours = ALONE + sum(slot.numel() > 0 for slot in self.slots.values())
            if self.flat.device.type == "cpu" and users == ours:
                return
        locals_ = [parameter.local for parameter in self.parameters]
        first = self.parameters[0]
        self.flat = torch.empty(
            sum(local.numel() for local in locals_),
            dtype=first.formats.gradient, device=first.held.device,
        )  # fmt: skip
        views = _unflatten_dense_tensors(self.flat, locals_)  # type: ignore[no-untyped-call]
        names = (parameter.name for parameter in self.parameters)
        self.slots = dict(zip(names, views, strict=True))

    def place(self, parameters: Sequence[StageParameter]) -> None:
        """Have the gradients of ``parameters`` in their slots, zeros for those that have none."""
        missing, slots, gradients = [], [], []
        for parameter in parameters:
            slot, gradient = self.slots[parameter.name], parameter.gradient
            if gradient is None:
                missing.append(slot)
            elif gradient.data_ptr() != slot.data_ptr():
                slots.append(slot)
                gradients.append(gradient)
                parameter.gradient = slot.detach()
        if missing:
            torch._foreach_zero_(missing)
        if slots:
            torch._foreach_copy_(slots, gradients)


class GradientReducer:
    """The gradient reductions of one stage on one rank."""

    def __init__(self, parameters: Iterable[StageParameter], device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.buckets = _make_buckets(parameters)
        self._bucket_of = {
            parameter.name: bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self._is_last = False

    def attach(self, parameters: Iterable[StageParameter]) -> None:
        """Watch the gradients come that are to be reduced, or moved into the master dtype."""
        for parameter in parameters:
            if parameter.name in self._bucket_of or parameter.sums_apart:
                attach_gradient_hook(parameter, self._arrived)

    def begin_backward(self, *, last: bool, among: Container[str] | None = None) -> None:
        """Before each backward; only the last one launches reductions.

        ``among`` are the parameters whose gradients are still to come, once each; all others
        have theirs. What several blocks share may get its gradient in parts: it is not
        launched before ``finish``.
        """
        self._is_last = last
        self.abandon()
        for bucket in self.buckets:
            names = {parameter.name for parameter in bucket.parameters}
            if among is not None:
                is_shared = any(p.block is None for p in bucket.parameters)
                names = {*names, NEVER} if is_shared else {n for n in names if n in among}
            bucket.waiting = names

    def abandon(self) -> None:
        """Leave what a backward that an error ended has begun: its memory may still be written."""
        for bucket in self.buckets:
            if bucket.is_open or bucket.work is not None:
                bucket.work, bucket.is_open, bucket.flat, bucket.slots = None, False, None, {}

    def _arrived(self, parameter: StageParameter) -> None:
        bucket = self._bucket_of.get(parameter.name)
        if bucket is None or not self._is_last:
            return
        if parameter.local_bytes >= PLACED_BYTES:
            if not bucket.is_open:
                bucket.open()
            with torch.no_grad():
                bucket.place((parameter,))
        bucket.waiting.discard(parameter.name)
        if not bucket.waiting:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Start the bucket's first reduction."""
        if all(parameter.gradient is None for parameter in bucket.parameters):
            return
        if not bucket.is_open:
            bucket.open()
        with torch.no_grad():
            bucket.place(bucket.parameters)
        bucket.work = self._start(bucket, 0)

    def _start(self, bucket: Bucket, position: int) -> Any:
        group = self.device_mesh.get_group(bucket.axes[position])
        return dist.all_reduce(bucket.flat, group=group, async_op=True)

    def finish(self) -> None:
        """After the last backward: launch what is left and wait for everything."""
        for bucket in self.buckets:
            if bucket.work is None:
                self._launch(bucket)
        for position in range(max((len(bucket.axes) for bucket in self.buckets), default=0)):
            pending = [b for b in self.buckets if b.work is not None and position < len(b.axes)]
            if position:
                for bucket in pending:
                    bucket.work = self._start(bucket, position)
            for bucket in pending:
                bucket.work.wait()
        for bucket in self.buckets:
            bucket.work, bucket.is_open = None, False
            if bucket.flat is not None and bucket.flat.device.type != "cpu":
                bucket.flat, bucket.slots = None, {}
        self._is_last = False


def _make_buckets(parameters: Iterable[StageParameter]) -> list[Bucket]:
    """Parameters with the same axes, the last block's first: so the backward fills them.

    Small blocks share a bucket, as every sum costs a latency. What several blocks share and what
    is ZeRO-sharded has buckets of its own, which come last.
    """
    groups: dict[tuple[Any, ...], list[StageParameter]] = {}
    for parameter in sorted(parameters, key=_block, reverse=True):
        if parameter.reduce_axes and parameter.spec.requires_grad:
            key = (_block(parameter) >= 0, parameter.reduce_axes, parameter.fully_sharded)
            groups.setdefault(key, []).append(parameter)
    buckets = []
    for (_, axes, _), members in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        bucket = Bucket(axes, [])
        size = 0
        share = sum(parameter.local_bytes for parameter in members) // BUCKETS
        full = min(FULL_BYTES, max(LEAST_BYTES, share))
        for parameter in members:
            before = bucket.parameters[-1] if bucket.parameters else parameter
            limit = BUCKET_BYTES if _block(before) == _block(parameter) else full
            if bucket.parameters and size > limit:
                buckets.append(bucket)
                bucket, size = Bucket(axes, []), 0
            bucket.parameters.append(parameter)
            size += parameter.local_bytes
        buckets.append(bucket)
    return buckets


def _block(parameter: StageParameter) -> int:
    """The block whose backward completes the gradient; -1 where only the stage's end does."""
    is_late = parameter.fully_sharded or parameter.block is None
    return -1 if is_late or parameter.block is None else parameter.block
