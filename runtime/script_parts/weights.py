"""A parameter on a rank of a script: its part of the whole, its gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .mesh import Mesh

COMPUTE = MASTER = GRADIENT = torch.float32

Split = dict[str, int]
"""Dimension that each axis splits; on other axes a tensor is whole."""


def own(whole: Tensor, split: Split, mesh: Mesh) -> Tensor:
    """Return this rank's part of a whole tensor."""
    for axis, dim in split.items():
        whole = whole.chunk(mesh.size(axis), dim)[mesh.coordinate(axis)]
    return whole.contiguous()


def box_of(
    shape: tuple[int, ...], split: Split, sizes: dict[str, int], place: dict[str, int]
) -> list[tuple[int, int]]:
    """Return the start and stop of each dimension of a rank's part of a tensor."""
    box = [(0, size) for size in shape]
    for axis, dim in split.items():
        start, stop = box[dim]
        size = (stop - start) // sizes[axis]
        box[dim] = start + place[axis] * size, start + (place[axis] + 1) * size
    return box


class Weight:
    """Parameter on a rank.

    Blocks compute with ``local``, this rank's part of it; the optimizer updates ``master``, which
    is the same unless their dtypes differ.
    """

    def __init__(self, whole: Tensor, split: Split, mesh: Mesh, *, trained: bool) -> None:
        self.shape, self.split, self.mesh = whole.shape, split, mesh
        self.gradient: Tensor | None = None
        self.sums = [a for a, size in mesh.shape.items() if size > 1 and a not in split]
        self.hold(own(whole, split, mesh), trained)

    def hold(self, part: Tensor, trained: bool) -> None:
        self.master = nn.Parameter(part.to(MASTER, copy=True), requires_grad=trained)
        self.local = self.master
        if COMPUTE != MASTER:
            self.local = nn.Parameter(part.to(COMPUTE), requires_grad=trained)
        if trained:
            self.local.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    def use(self) -> Tensor:
        """Return the tensor that a block computes with."""
        return self.local

    def refresh(self) -> None:
        """Copy the updated master to ``local``."""
        if self.local is not self.master:
            with torch.no_grad():
                self.local.copy_(self.master)

    def take(self, local: Tensor) -> None:
        """Move a micro-batch's gradient from where autograd leaves it to the sum."""
        gradient, local.grad = local.grad, None
        if gradient is not None:
            self.add(gradient.to(GRADIENT))

    def add(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def complete(self) -> None:
        """Sum the gradient over the ranks that have parts of it, after the last micro-batch."""
        for axis in self.sums:
            if self.gradient is not None:
                self.gradient = self.mesh.all_reduce(self.gradient, axis)

    def is_first(self) -> bool:
        """Return whether this rank is the first of the ranks that hold the same values."""
        return all(self.mesh.coordinate(axis) == 0 for axis in self.sums)

    def replicas(self) -> int:
        """Return the number of ranks that hold the same values."""
        count = 1
        for axis in self.sums:
            count *= self.mesh.size(axis)
        return count

    def box(self) -> tuple[slice, ...]:
        """Return the box of the whole parameter that the master holds."""
        box = box_of(tuple(self.shape), self.split, self.mesh.shape, self.mesh.place)
        return tuple(slice(start, stop) for start, stop in box)


class Weights:
    """Weights and buffers of a stage; blocks use names relative to their module."""

    def __init__(self, held: dict[str, Weight], buffers: dict[str, Tensor], path: str = "") -> None:
        self.held, self.buffers, self.path = held, buffers, path

    def of(self, path: str) -> Weights:
        """Return the weights of the module at ``path``."""
        return Weights(self.held, self.buffers, f"{path}.")

    def __getitem__(self, name: str) -> Tensor:
        inner = self.path + name
        name = inner if inner in self.held or inner in self.buffers else name
        return self.buffers[name] if name in self.buffers else self.held[name].use()
