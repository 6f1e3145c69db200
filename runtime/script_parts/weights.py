"""A parameter on a rank of a script: its part of the whole, its gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .mesh import JOINT, Mesh

COMPUTE = MASTER = GRADIENT = torch.float32

Split = dict[str, int]
"""Dimension that each axis splits; on other axes a tensor is whole."""


def repeated(prefix: str, numbers: range, splits: dict[str, Split]) -> dict[str, Split]:
    """Return splits by parameter name for all numbered modules; ``splits`` is of one module."""
    return {f"{prefix}{i}.{name}": split for i in numbers for name, split in splits.items()}


def own(whole: Tensor, split: Split, mesh: Mesh) -> Tensor:
    """Cut this rank's part from ``whole``; ``split`` has the dimension that an axis splits."""
    for axis, dim in split.items():
        whole = whole.chunk(mesh.size(axis), dim)[mesh.coordinate(axis)]
    return whole.contiguous()


def join(part: Tensor, split: Split, mesh: Mesh) -> Tensor:
    """All-gather a whole tensor from the ranks' parts; ``split`` maps mesh axes to dimensions."""
    for axis, dim in reversed(split.items()):
        part = mesh.all_gather(part, axis, dim)
    return part


class Weight:
    """Parameter on a rank: its part of the whole, which blocks compute with, and its gradient.

    The optimizer updates ``master``: the part itself or, under ZeRO, this rank's share of it. All
    ranks of the axis ``joint``, which hold the same part, have shares of equally many rows; the
    last may end in zeros. If they are more than the rows and divide a later dimension ``dim``, they
    share that. ZeRO 1 cuts the gradient after the last micro-batch, 2 and 3 after each. With
    ``degree`` the ranks of each group of so many neighbours have shares, whose gradients are summed
    over groups. ``local`` is the part in ``COMPUTE``.
    """

    def __init__(
        self,
        whole: Tensor,
        split: Split,
        mesh: Mesh,
        *,
        trained: bool,
        zero: int = 0,
        degree: int = 0,
    ) -> None:
        self.shape, self.split, self.mesh = whole.shape, split, mesh
        axes = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in split]
        self.joint = "+".join(axis for axis in axes if axis in JOINT)
        ranks = mesh.size(self.joint) if self.joint else 1
        shares = mesh.in_group(self.joint, degree) if degree else ranks
        self.zero = zero if whole.dim() and shares > 1 else 0
        self.gradient: Tensor | None = None
        self.sums = [axis for axis in axes if axis not in JOINT]
        if self.joint and not self.zero:
            self.sums.insert(0, self.joint)
        elif shares < ranks:
            self.sums.insert(0, f"{self.joint}/{shares}")
            self.joint = f"{self.joint}%{shares}"
        part = own(whole, split, mesh)
        self.rows, self.dim = part.shape[0] if part.dim() else 0, 0
        if self.zero and self.rows < mesh.size(self.joint):
            later = (d for d, n in enumerate(part.shape) if d and n % mesh.size(self.joint) == 0)
            self.dim = next(later, 0)
        self.master = nn.Parameter(self.share(part).to(MASTER, copy=True), requires_grad=trained)
        self.local = self.master
        if self.zero in (1, 2) or (not self.zero and COMPUTE != MASTER):
            self.local = nn.Parameter(part.to(COMPUTE, copy=True), requires_grad=trained)
        if trained and self.zero < 3:
            self.local.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    def padded(self, part: Tensor) -> Tensor:
        """Append rows of zeros to ``part``, so that all ranks get shares of equally many rows."""
        if self.dim:
            return part
        count = -len(part) % self.mesh.size(self.joint)
        return torch.cat([part, part.new_zeros(count, *part.shape[1:])])

    def share(self, part: Tensor) -> Tensor:
        """Return this rank's ZeRO shard of ``part``; ``part`` itself without ZeRO."""
        return own(self.padded(part), {self.joint: self.dim}, self.mesh) if self.zero else part

    def gather(self, share: Tensor) -> Tensor:
        """All-gather this rank's part of a tensor from the ranks' ZeRO shards."""
        if not self.zero:
            return share
        whole = self.mesh.all_gather(share, self.joint, self.dim)
        return whole if self.dim else whole[: self.rows]

    def whole(self, share: Tensor) -> Tensor:
        """All-gather the whole tensor from all ranks' ZeRO shards of their parts."""
        return join(self.gather(share), self.split, self.mesh)

    def compute_part(self) -> Tensor:
        """Return this rank's part in the dtype that blocks compute in."""
        return self.gather(self.master.detach().to(COMPUTE))

    def use(self) -> Tensor:
        """Return the tensor that a block computes with."""
        return self.local

    def refresh(self) -> None:
        """Copy the updated master to ``local``."""
        if self.local is not self.master:
            self.local.data.copy_(self.compute_part())

    def take(self, local: Tensor) -> None:
        """Move a micro-batch's gradient from ``local.grad`` to the sum ``gradient``."""
        gradient, local.grad = local.grad, None
        if gradient is not None:
            self.add(gradient.to(GRADIENT))

    def add(self, gradient: Tensor) -> None:
        if self.zero >= 2:
            gradient = self.mesh.reduce_scatter(self.padded(gradient), self.joint, self.dim)
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def complete(self) -> None:
        """Sum the gradient over the ranks that hold the same part, after the last micro-batch."""
        if self.gradient is None:
            return
        if self.zero == 1:
            self.gradient = self.mesh.reduce_scatter(
                self.padded(self.gradient), self.joint, self.dim
            )
        for axis in self.sums:
            self.gradient = self.mesh.all_reduce(self.gradient, axis)

    def replicas(self) -> int:
        """Return the number of ranks that hold the same shard of the weight."""
        return math.prod(self.mesh.size(axis) for axis in self.sums)


class Weights:
    """Weights and buffers of a stage by name; ``path`` is the module that names are relative to."""

    def __init__(self, held: dict[str, Weight], buffers: dict[str, Tensor], path: str = "") -> None:
        self.held, self.buffers, self.path = held, buffers, path

    def of(self, path: str) -> Weights:
        """Return the weights of the module at ``path``."""
        return Weights(self.held, self.buffers, f"{path}.")

    def __getitem__(self, name: str) -> Tensor:
        inner = self.path + name
        name = inner if inner in self.held or inner in self.buffers else name
        return self.buffers[name] if name in self.buffers else self.held[name].use()
