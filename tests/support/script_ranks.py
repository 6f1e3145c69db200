"""The ranks of an exported script as threads, and its process group as one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from communicator import ThreadCommunicator, run_ranks
from torch import Tensor

from autoparallel.planner.graph import layout
from autoparallel.runtime.script_parts.mesh import Mesh

T = TypeVar("T")


class ThreadMesh(Mesh):
    """The mesh of a script, with the collectives of threads; several axes together are gathered
    from the last on, and scattered or summed from the first on."""

    def __init__(self, communicator: ThreadCommunicator) -> None:
        self._ranks, axes = communicator, communicator.mesh.axes
        self._number = {axis: number for number, axis in enumerate(axes)}
        self.shape = dict(zip(axes, communicator.mesh.shape, strict=True))
        self.place = dict(zip(axes, communicator.coordinates, strict=True))

    @property
    def communicator(self) -> ThreadMesh:
        """The mesh itself: a script replaces what ``passes`` write as ``rank.communicator``."""
        return self

    def all_reduce(self, tensor: Tensor, axis: str, op: str = "sum") -> Tensor:
        how = "sum" if op == "sum" else "max"
        for name in axis.split("+"):
            tensor = self._ranks.all_reduce(tensor.contiguous(), self._number[name], how)
        return tensor

    def all_gather(self, tensor: Tensor, axis: str, dim: int) -> Tensor:
        for name in reversed(axis.split("+")):
            tensor = self._ranks.all_gather(tensor.contiguous(), self._number[name], dim)
        return tensor

    def reduce_scatter(self, tensor: Tensor, axis: str, dim: int) -> Tensor:
        for name in axis.split("+"):
            tensor = self._ranks.reduce_scatter(tensor.contiguous(), self._number[name], dim)
        return tensor

    def all_to_all(self, tensor: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
        number = self._number[axis]
        return self._ranks.all_to_all(tensor.contiguous(), number, split_dim, concat_dim)


def on_ranks(shape: dict[str, int], function: Callable[[Mesh], T]) -> list[T]:
    """Return the results of ``function`` on every rank of a mesh, in rank order."""
    mesh = layout.Mesh(tuple(shape), tuple(shape.values()))
    return run_ranks(mesh, lambda communicator: function(ThreadMesh(communicator)))


@contextmanager
def group_of_one() -> Iterator[None]:
    """Be the only rank of a job inside."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
