"""Collectives of a pipeline stage, and differentiable changes of layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...passes.ops.collectives import Parts, Running, parts_of

JOINT = ("dp", "ep", "cp")
"""Axes whose ranks hold weights whole, except weights of experts on ep."""


class Mesh:
    """Ranks of a stage in a grid with named axes, and collectives along an axis.

    ``dp+ep`` is the axis of all ranks of dp and ep together, in the order of the grid. If these are
    in groups of k neighbours, ``dp+ep%k`` has the ranks of a group, ``dp+ep/k`` those at the same
    place of all groups. No collective records autograd; each returns a new tensor.
    """

    def __init__(
        self, devices: tuple[int, ...], shape: dict[str, int], kind: str, degree: int = 0
    ) -> None:
        """Make the grid on devices of type ``kind``, and groups of ``degree`` neighbours.
        Collective over all ranks of the job."""
        self.shape = shape
        ranks = torch.tensor(devices, dtype=torch.int).view(tuple(shape.values()))
        grid = DeviceMesh(kind, ranks, mesh_dim_names=tuple(shape))
        place = grid.get_coordinate() or (0,) * len(shape)
        self.place = dict(zip(shape, place, strict=True))
        self.groups = {axis: grid.get_group(axis) for axis in shape if dist.get_rank() in devices}
        large = [axis for axis in shape if shape[axis] > 1]
        for count in range(1, len(large) + 1):
            for axes in combinations(large, count):
                dims, name = [list(shape).index(axis) for axis in axes], "+".join(axes)
                together = ranks.movedim(dims, [*range(-count, 0)]).reshape(-1, self.size(name))
                k = self.in_group(name, degree) if {*axes} <= {*JOINT} and degree else 1
                if count > 1:
                    self._add(name, together)
                if 1 < k < self.size(name):
                    rows = together.view(len(together), -1, k)
                    self._add(f"{name}%{k}", rows.reshape(-1, k))
                    self._add(f"{name}/{k}", rows.transpose(1, 2).reshape(-1, rows.shape[1]))

    def _add(self, name: str, rows: Tensor) -> None:
        own, _ = dist.new_subgroups_by_enumeration(rows.tolist())  # type: ignore[no-untyped-call]
        self.groups[name] = own

    def in_group(self, axis: str, degree: int) -> int:
        """Return the number of ranks of an axis in a group of ``degree`` neighbours of the axes
        ``JOINT`` together."""
        count = 1
        for name in reversed([name for name in self.shape if name in JOINT]):
            inside = self.shape[name] if degree % self.shape[name] == 0 else degree
            degree //= inside
            count *= inside if name in axis.split("+") else 1
        return count

    def size(self, axis: str) -> int:
        name, _, inside = axis.partition("%")
        name, _, k = name.partition("/")
        return int(inside or math.prod(self.shape[own] for own in name.split("+")) // int(k or 1))

    def coordinate(self, axis: str) -> int:
        name, _, inside = axis.partition("%")
        name, _, k = name.partition("/")
        place = 0
        for own in name.split("+"):
            place = place * self.shape[own] + self.place[own]
        return place % int(inside) if inside else place // int(k or 1)

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

    def parts(
        self, counts: Tensor, axes: tuple[str, ...], gathered: tuple[str, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        """Tell each rank of the axes how many rows of each class it will get in each exchange:
        ``counts[i]`` for rank i. Return the rows by rank for each exchange, and the counts that
        were told to each rank of ``gathered``."""
        received, among = counts, "+".join(gathered)
        if axes:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts.contiguous(), group=self.groups["+".join(axes)])
        if gathered:
            received = self.all_gather(received, among, 0)
        sums = torch.cat((counts, received)).sum(-1).t()
        place = self.coordinate(among) if gathered else 0
        return parts_of(sums.tolist, len(sums), len(counts), place), received

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[str, ...]) -> Running:
        """Start to send consecutive rows to the ranks of the axes."""
        rows, group = rows.detach(), self.groups["+".join(axes)]
        received = rows.new_empty((sum(parts.received), *rows.shape[1:]))
        sizes = list(parts.received), list(parts.sent)
        work = dist.all_to_all_single(received, rows, *sizes, group=group, async_op=True)
        return Running(received, rows, work)

    def own_part(self, tensor: Tensor, axis: str, dim: int) -> Tensor:
        """Cut this rank's part along ``dim`` from a tensor that all ranks of the axis hold."""
        part = tensor.chunk(self.size(axis), dim)[self.coordinate(axis)]
        return part.clone(memory_format=torch.contiguous_format)

    def divide(self, tensor: Tensor, axis: str) -> Tensor:
        return tensor / self.size(axis)

    def keep(self, tensor: Tensor, axis: str) -> Tensor:
        return tensor.view_as(tensor)


Move = Callable[..., Tensor]


class Change(torch.autograd.Function):
    """Autograd function that applies ``value`` to a tensor and ``gradient`` to its gradient.

    Both change layout along ``axis``; ``gradient`` gets the dimensions in reverse order.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: str, value: Move, gradient: Move, dims: tuple[int, ...]
    ) -> Tensor:
        ctx.back = gradient, axis, dims[::-1]
        return value(x, axis, *dims)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        move, axis, dims = ctx.back
        return move(gradients[0].contiguous(), axis, *dims), None, None, None, None


def change(x: Tensor, axis: str, value: Move, gradient: Move, *dims: int) -> Tensor:
    """Change the layout of ``x`` by ``value``, and of its gradient by ``gradient``."""
    result: Tensor = Change.apply(x, axis, value, gradient, dims)  # type: ignore[no-untyped-call]
    return result


def all_gather(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """All-gather ``x``, split along ``dim``; its gradient is reduce-scattered."""
    return change(x, axis, mesh.all_gather, mesh.reduce_scatter, dim)


def all_gather_same(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """All-gather ``x``, split along ``dim``; its gradient, equal on all ranks, is cut."""
    return change(x, axis, mesh.all_gather, mesh.own_part, dim)


def pad(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Put ``x`` in this rank's part of a tensor of zeros; the ranks' sum is the whole."""
    parts = [torch.zeros_like(x)] * mesh.size(axis)
    parts[mesh.coordinate(axis)] = x
    return torch.cat(parts, dim)


def take_part(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Return this rank's part of ``x`` along ``dim``; gradients are summed over ranks later."""
    return mesh.own_part(x, axis, dim)


def take_part_same(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Return this rank's part of ``x`` along ``dim``; its gradient is all-gathered."""
    return change(x, axis, mesh.own_part, mesh.all_gather, dim)


def as_term(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Divide ``x``, equal on all ranks, by their number; the gradient is divided too."""
    return mesh.divide(x, axis)


def as_term_same(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Divide ``x``, equal on all ranks, by their number; the gradient is not divided."""
    return change(x, axis, mesh.divide, mesh.keep)


def divide_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Return ``x``; its gradient, equal on all ranks, is divided by their number."""
    return change(x, axis, mesh.keep, mesh.divide)


def sum_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Return the same tensor; its gradient is summed over the ranks (Megatron-LM's f)."""
    return change(x, axis, mesh.keep, mesh.all_reduce)


def all_reduce(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Sum ``x`` over the ranks; its gradient passes unchanged (Megatron-LM's g)."""
    return change(x, axis, mesh.all_reduce, mesh.keep)


def all_reduce_both(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Sum ``x`` over the ranks in the forward, and its gradient over the ranks in the backward."""
    return change(x, axis, mesh.all_reduce, mesh.all_reduce)


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """Return this rank's part of the sum of ``x`` over ranks; its gradient is all-gathered."""
    return change(x, axis, mesh.reduce_scatter, mesh.all_gather, dim)


def all_to_all(x: Tensor, mesh: Mesh, axis: str, *, split_dim: int, concat_dim: int) -> Tensor:
    """Reshard ``x`` from a split along ``concat_dim`` to a split along ``split_dim``."""
    return change(x, axis, mesh.all_to_all, mesh.all_to_all, split_dim, concat_dim)


def swap(x: Tensor, axes: tuple[str, ...], mesh: Mesh) -> Tensor:
    """Exchange ``x`` with the rank at the opposite position of each axis: i with n - 1 - i."""
    for axis in axes:
        x = change(x, axis, mesh.swap, mesh.swap)
    return x
