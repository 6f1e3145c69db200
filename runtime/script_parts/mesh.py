"""Collectives of a pipeline stage, and differentiable changes of layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """Ranks of a stage in a grid with named axes, and collectives along an axis.

    No collective records autograd; each returns a new tensor.
    """

    def __init__(self, devices: tuple[int, ...], shape: dict[str, int], kind: str) -> None:
        """Make the grid. Collective over all ranks of the job, also outside of ``devices``."""
        self.shape = shape
        ranks = torch.tensor(devices, dtype=torch.int).view(tuple(shape.values()))
        grid = DeviceMesh(kind, ranks, mesh_dim_names=tuple(shape))
        place = grid.get_coordinate() or (0,) * len(shape)
        self.place = dict(zip(shape, place, strict=True))
        self.groups = {axis: grid.get_group(axis) for axis in shape if dist.get_rank() in devices}

    def size(self, axis: str) -> int:
        return self.shape[axis]

    def coordinate(self, axis: str) -> int:
        return self.place[axis]

    def all_reduce(self, tensor: Tensor, axis: str, op: str = "sum") -> Tensor:
        """Return the sum (or maximum) over the axis, on each of its ranks."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(result, how, group=self.groups[axis])
        return result

    def all_gather(self, tensor: Tensor, axis: str, dim: int) -> Tensor:
        """Return every rank's tensor, joined along ``dim``."""
        tensor = tensor.detach().contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size(axis))]
        dist.all_gather(parts, tensor, group=self.groups[axis])
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: Tensor, axis: str, dim: int) -> Tensor:
        """Return this rank's part, along ``dim``, of the sum over the axis."""
        parts = [part.contiguous() for part in tensor.detach().chunk(self.size(axis), dim)]
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, group=self.groups[axis])
        return result

    def all_to_all(self, tensor: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
        """Send part i along ``split_dim`` to rank i; join received parts along ``concat_dim``."""
        parts = torch.stack(tensor.detach().chunk(self.size(axis), split_dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.groups[axis])
        return torch.cat(received.unbind(0), concat_dim)

    def swap(self, tensor: Tensor, axis: str) -> Tensor:
        """Exchange tensors with the other end of the axis: rank i gets the tensor of n - 1 - i."""
        every = self.all_gather(tensor.detach()[None], axis, 0)
        return every[self.size(axis) - 1 - self.coordinate(axis)].clone()


def part_of(
    mesh: Mesh, local_size: int, axes: tuple[str, ...], *, mirrored: tuple[str, ...] = ()
) -> tuple[int, int]:
    """Return the start of a rank's part of a dimension split over ``axes``, and the whole size.

    With ``mirrored`` the part belongs to the rank at the other end of these axes.
    """
    position, parts = 0, 1
    for axis in axes:
        size, own = mesh.size(axis), mesh.coordinate(axis)
        own = size - 1 - own if axis in mirrored else own
        position, parts = position * size + own, parts * size
    return position * local_size, parts * local_size


Move = Callable[[Tensor, Mesh, str, int], Tensor]


def keep(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return x.view_as(x)


def divide(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return x / mesh.size(axis)


def sum_ranks(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return mesh.all_reduce(x, axis)


def gather_parts(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return mesh.all_gather(x, axis, dim)


def scatter_sum(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return mesh.reduce_scatter(x, axis, dim)


def own_part(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return x.chunk(mesh.size(axis), dim)[mesh.coordinate(axis)].clone(
        memory_format=torch.contiguous_format
    )


def pad_zeros(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Pad to the whole tensor, zero in other ranks' parts."""
    parts = [torch.zeros_like(x)] * mesh.size(axis)
    parts[mesh.coordinate(axis)] = x
    return torch.cat(parts, dim)


class Change(torch.autograd.Function):
    """Function that moves the value by one collective and its gradient by another."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: Mesh, axis: str, dim: int, value: Move, gradient: Move
    ) -> Tensor:
        ctx.back = gradient, mesh, axis, dim
        return value(x, mesh, axis, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        move, mesh, axis, dim = ctx.back
        return move(gradients[0].contiguous(), mesh, axis, dim), None, None, None, None, None


def change(x: Tensor, mesh: Mesh, axis: str, value: Move, gradient: Move, dim: int = 0) -> Tensor:
    """Move ``x`` by ``value``, and its gradient, if it has one, by ``gradient``."""
    if mesh.size(axis) == 1:
        return x
    if not x.is_floating_point():
        return value(x, mesh, axis, dim)
    result: Tensor = Change.apply(x, mesh, axis, dim, value, gradient)  # type: ignore[no-untyped-call]
    return result


def all_gather(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Gather a split tensor; each rank's gradient is a part of a sum."""
    return change(x, mesh, axis, gather_parts, scatter_sum, dim)


def all_gather_same(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Gather a split tensor; all ranks have the same gradient of it."""
    return change(x, mesh, axis, gather_parts, own_part, dim)


def pad(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Turn a split tensor into a whole tensor that is a term of a sum over the ranks."""
    return change(x, mesh, axis, pad_zeros, own_part, dim)


def take_part(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Return this rank's part of a tensor whose gradients are summed over the ranks later."""
    return change(x, mesh, axis, own_part, pad_zeros, dim)


def take_part_same(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Return this rank's part of a tensor; its gradient is gathered."""
    return change(x, mesh, axis, own_part, gather_parts, dim)


def as_term(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Turn a tensor that all ranks have into a term of a sum; gradients are summed later."""
    return change(x, mesh, axis, divide, divide)


def as_term_same(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Turn a tensor that all ranks have into a term of a sum; all ranks get the whole gradient."""
    return change(x, mesh, axis, divide, keep)


def divide_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Return the same tensor; the gradient, equal on all ranks, becomes a term of a sum."""
    return change(x, mesh, axis, keep, divide)


def sum_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Return the same tensor; its gradient is summed over the ranks (Megatron-LM's f)."""
    return change(x, mesh, axis, keep, sum_ranks)


def all_reduce(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Sum over the ranks; all have the same gradient of the sum (Megatron-LM's g)."""
    return change(x, mesh, axis, sum_ranks, keep)


def all_reduce_both(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Sum over the ranks; the gradient is summed over them too."""
    return change(x, mesh, axis, sum_ranks, sum_ranks)


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Return this rank's part of the sum over the ranks; its gradient is gathered."""
    return change(x, mesh, axis, scatter_sum, gather_parts, dim)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, dims: tuple[int, int]) -> Tensor:
        ctx.back = mesh, axis, dims
        return mesh.all_to_all(x, axis, *dims)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, axis, (split_dim, concat_dim) = ctx.back
        return mesh.all_to_all(gradients[0], axis, concat_dim, split_dim), None, None, None


def all_to_all(x: Tensor, mesh: Mesh, axis: str, *, split_dim: int, concat_dim: int) -> Tensor:
    """Split a tensor along ``split_dim`` instead of ``concat_dim``."""
    if mesh.size(axis) == 1:
        return x
    if not x.is_floating_point():
        return mesh.all_to_all(x, axis, split_dim, concat_dim)
    result: Tensor = AllToAll.apply(x, mesh, axis, (split_dim, concat_dim))  # type: ignore[no-untyped-call]
    return result


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str) -> Tensor:
        ctx.back = mesh, axis
        return mesh.swap(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        mesh, axis = ctx.back
        return mesh.swap(gradients[0], axis), None, None


def swap(x: Tensor, axes: tuple[str, ...], mesh: Mesh) -> Tensor:
    """Return the tensor of the rank at the other end of each axis."""
    for axis in axes:
        x = Swap.apply(x, mesh, axis)  # type: ignore[no-untyped-call]
    return x
