"""Collectives over the axes of a stage's device mesh, and the collective that a thread is in.

In: a ``DeviceMesh``; local tensors. Out: new local tensors, without autograd (the passes
wrap each collective and its dual into an autograd function). Works on gloo and on NCCL:
only sums and maxima are used, every buffer handed over is contiguous, and booleans travel
as bytes.

``describe_stack`` reads from a thread's stack the block and collective that it is in. So training
need not record these; only in a backward, where autograd calls no block, each block records when
its backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ...passes.ops.collectives import Parts, Running, parts_of, place_along
from ...passes.ops.ring import Ring
from .device_queue import queue_of
from .groups import mesh_along

# Named all_gather_into_tensor and reduce_scatter_tensor before torch 2.13.
all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Handle of a running reduce-scatter; ``wait`` sums the parts received from all ranks."""

    work: Any
    received: Tensor
    output: Tensor

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received, 0, out=self.output)


def reduce_scatter(
    output: Tensor,
    whole: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum ``whole`` over a group; put this rank's part along dimension 0 into ``output``.

    On a CPU each rank sends every other its part and sums the parts that it gets. gloo's own
    reduce-scatter is an all-reduce of a copy, which sends twice as much
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    if whole.device.type != "cpu":
        return _reduce_scatter(output, whole, group=group, async_op=async_op)
    received = torch.empty_like(whole)
    work = dist.all_to_all_single(_bytes_of(received), _bytes_of(whole), group=group, async_op=True)
    scattered = _Scattered(work, received.view(-1, *output.shape), output)
    if not async_op:
        scattered.wait()
    return scattered


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class ProcessCommunicator:
    """Collectives of one stage, by mesh axis. Every rank of the stage's mesh makes an instance."""

    device_mesh: DeviceMesh

    def size(self, axis: int) -> int:
        """The number of ranks along ``axis``."""
        return self.device_mesh.size(axis)

    def coordinate(self, axis: int) -> int:
        """Return this rank's position along ``axis``."""
        return self.device_mesh.get_local_rank(axis)

    def all_reduce(self, tensor: Tensor, axis: int, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum or maximum over the ranks of ``axis``, on each of them."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size(axis) > 1:
            # A sum of bytes could leave 2 in a boolean; the sum of booleans is their maximum.
            is_sum = op == "sum" and result.dtype != torch.bool
            operation = dist.ReduceOp.SUM if is_sum else dist.ReduceOp.MAX
            dist.all_reduce(as_bytes(result), op=operation, group=self.device_mesh.get_group(axis))
        return result

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        """Concatenate the parts of the ranks of ``axis``, in order, along ``dim``."""
        size = self.size(axis)
        if size == 1:
            return tensor.detach()
        parts = tensor.new_empty((size, *tensor.shape))
        all_gather(
            as_bytes(parts),
            as_bytes(tensor.detach().contiguous()).unsqueeze(0),
            group=self.device_mesh.get_group(axis),
        )
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        """Return this rank's part along ``dim`` of the sum over the ranks of ``axis``."""
        size = self.size(axis)
        if size == 1:
            return tensor.detach()
        parts = _stacked_chunks(tensor.detach(), size, dim)
        result = torch.empty_like(parts[0])
        reduce_scatter(result.unsqueeze(0), parts, group=self.device_mesh.get_group(axis))
        return result

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        """Reshard a tensor from a split along ``concat_dim`` to a split along ``split_dim``.

        Rank ``i``'s result is the ``i``-th chunk along ``split_dim`` of every rank's tensor,
        in rank order, side by side along ``concat_dim``.
        """
        size = self.size(axis)
        if size == 1:
            return tensor.detach()
        parts = _stacked_chunks(tensor.detach(), size, split_dim)
        received = torch.empty_like(parts)
        dist.all_to_all_single(
            as_bytes(received), as_bytes(parts), group=self.device_mesh.get_group(axis)
        )
        return torch.cat(received.unbind(0), concat_dim)

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        """Exchange ``tensor`` with the rank at the opposite position of ``axis`` (``i`` with
        ``n - 1 - i``), by an all-to-all in which each rank sends to that rank only."""
        size = self.size(axis)
        if size == 1:
            return tensor.detach()
        given = as_bytes(tensor.detach().contiguous()).flatten()
        counts = [0] * size
        counts[size - 1 - self.coordinate(axis)] = given.numel()
        received = torch.empty_like(given)
        dist.all_to_all_single(
            received, given, counts, counts, group=self.device_mesh.get_group(axis)
        )
        return received.view(tensor.dtype).view(tensor.shape)

    def _group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        return mesh_along(self.device_mesh, axes).get_group(0)

    def parts(
        self, counts: Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        """Return the numbers of rows to send to, and to receive from, each rank along ``axes`` in
        each of N exchanges, and the counts (ranks, N, M) of received rows, given the counts to send
        on the device; of received rows for all ranks along ``gathered``. Numbers are copied to the
        host beside later work of the device; the host waits for the copy when it first uses
        them."""
        received = counts
        if axes:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts.contiguous(), group=self._group(axes))
        for axis in reversed(gathered):
            received = self.all_gather(received, axis, 0)
        sums = torch.cat((counts, received)).sum(-1).t().contiguous()
        copy = queue_of(sums.device).to_host(sums, None)

        def read() -> list[list[int]]:
            if copy is None:
                return sums.tolist()
            copy.event.synchronize()
            return copy.tensor.tolist()

        place = place_along(self, gathered)
        return parts_of(read, len(sums), len(counts), place), received

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
        """Start to send consecutive rows to the ranks along ``axes``, as many to each as ``parts``
        says."""
        rows = rows.detach().contiguous()
        received = rows.new_empty((sum(parts.received), *rows.shape[1:]))
        work = dist.all_to_all_single(
            as_bytes(received),
            as_bytes(rows),
            list(parts.received),
            list(parts.sent),
            group=self._group(axes),
            async_op=True,
        )
        return Running(received, rows, work)


def _stacked_chunks(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Return ``size`` equal chunks of a tensor along ``dim``, stacked in a new first dimension,
    contiguous."""
    if tensor.shape[dim] % size:
        raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} is not divisible by {size}")
    return torch.stack(tensor.chunk(size, dim))


def as_bytes(tensor: Tensor) -> Tensor:
    """View a boolean tensor as bytes, which gloo and NCCL support; return others unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


_COLLECTIVE_FILES = (distributed_c10d.__file__, _functional_collectives.__file__)


class BackwardPosition:
    """Holder of the name of the block whose backward autograd has started last in a stage."""

    def __init__(self) -> None:
        self.block = ""


def describe_stack(frame: FrameType | None) -> str:
    """Describe the innermost block and collective that a thread's stack is in; return "" if in
    neither. The collective has the name of the function of ``torch.distributed`` that was called,
    or, for a stage's collective, its name and mesh axis."""
    block = collective = ""
    is_backward = False
    for each in _outwards(frame):
        owner, name = each.f_locals.get("self"), each.f_code.co_name
        if each.f_code.co_filename in _COLLECTIVE_FILES and not name.startswith("_"):
            collective = name
        elif isinstance(owner, ProcessCommunicator):
            axis = each.f_locals.get("axis")
            names = owner.device_mesh.mesh_dim_names or ()
            on = f" over {names[axis]}" if isinstance(axis, int) and axis < len(names) else ""
            collective = f"{name}{on}"
        elif isinstance(owner, Running):
            collective = "exchange"
        elif isinstance(owner, Ring) and collective:
            collective = f"ring attention over {owner.rank.mesh.axes[owner.axis]}"
        elif name in _SHARDED and type(owner).__name__ == "FSDPParamGroup":
            collective, block = collective or _SHARDED[name], block or _block_of(owner)
        block = block or getattr(owner, "block_name", "")
        position = getattr(getattr(owner, "stage", None), "backward_position", None)
        if name == "_run_backward" and position is not None:
            is_backward = True
            block = block or position.block
    way = "the backward of block" if is_backward else "block"
    return ", ".join(part for part in (f"in {way} {block}" if block else "", collective) if part)


_SHARDED = {
    "wait_for_unshard": "all-gather of its parameters",
    "unshard": "all-gather of its parameters",
    "post_backward": "reduce-scatter of its gradients",
}


def _block_of(group: Any) -> str:
    """Return the names of the blocks whose parameters form a parameter group of ``fully_shard``."""
    names = (getattr(module, "block_name", "") for module in group.modules)
    return ", ".join(name for name in names if name)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
