"""Ranks as threads: a communicator without process group, so that one process sees every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ...planner.graph.layout import Mesh
from ..ops.collectives import Parts, Running, parts_of, place_along

T = TypeVar("T")
_TIMEOUT_SECONDS = 60.0


class _Group:
    """Ranks along one mesh axis, simulated by threads: their tensors in the current collective, and
    a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_SECONDS)
        self.slots: list[Any] = [None] * size

    def exchange(self, position: int, what: tuple[Any, ...], tensor: Tensor) -> list[Tensor]:
        """Contribute ``tensor`` as the rank at ``position`` of the group; return the tensors of all
        its ranks. Raises AssertionError if ranks differ in ``what`` (the collective) or in tensors'
        shapes."""
        own = (what, tensor.shape, tensor.dtype, tensor.detach().clone())
        found = self.exchange_any(position, own)
        if any(slot[:3] != found[0][:3] for slot in found):
            raise AssertionError(f"ranks disagree: {[slot[:3] for slot in found]}")
        return [slot[3] for slot in found]

    def exchange_any(self, position: int, value: Any) -> list[Any]:
        """Contribute ``value`` as the rank at ``position`` of the group; return the values
        of all its ranks."""
        self.slots[position] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadCommunicator:
    """Communicator of a rank that a thread simulates; it has the rank's group along each set of
    mesh axes."""

    def __init__(
        self, mesh: Mesh, coordinates: tuple[int, ...], groups: Mapping[tuple[int, ...], _Group]
    ) -> None:
        self.mesh, self.coordinates, self.groups = mesh, coordinates, groups
        self.calls: list[tuple[Any, ...]] = []

    def size(self, axis: int) -> int:
        return self.mesh.shape[axis]

    def coordinate(self, axis: int) -> int:
        return self.coordinates[axis]

    def _exchange(self, axis: int, what: tuple[Any, ...], tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous(), f"{what} got a tensor that is not contiguous"
        self.calls.append((what[0], axis, *what[1:]))
        return self.groups[axis,].exchange(self.coordinates[axis], what, tensor)

    def all_reduce(self, tensor: Tensor, axis: int, op: Literal["sum", "max"] = "sum") -> Tensor:
        stacked = torch.stack(self._exchange(axis, ("all_reduce", op), tensor))
        return stacked.sum(0).to(tensor.dtype) if op == "sum" else stacked.amax(0)

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        return torch.cat(self._exchange(axis, ("all_gather", dim), tensor), dim)

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        total = torch.stack(self._exchange(axis, ("reduce_scatter", dim), tensor)).sum(0)
        return total.chunk(self.size(axis), dim)[self.coordinate(axis)].contiguous()

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        found = self._exchange(axis, ("all_to_all", split_dim, concat_dim), tensor)
        size, mine = self.size(axis), self.coordinate(axis)
        return torch.cat([part.chunk(size, split_dim)[mine] for part in found], concat_dim)

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        return self._exchange(axis, ("swap",), tensor)[self.size(axis) - 1 - self.coordinate(axis)]

    def parts(
        self, counts: Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        self.calls.append(("parts", axes, *([gathered] if gathered else [])))
        received = counts
        if axes:
            mine = place_along(self, axes)
            every = self.groups[axes].exchange(mine, ("parts",), counts)
            received = torch.stack([each[mine] for each in every])
        place = place_along(self, gathered)
        if gathered:
            whole = self.groups[gathered].exchange(place, ("parts gathered",), received)
            received = torch.cat(whole)
        sums = torch.cat((counts, received)).sum(-1).t()
        return parts_of(sums.tolist, len(sums), len(counts), place), received

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
        self.calls.append(("exchange", axes))
        group, mine = self.groups[axes], place_along(self, axes)
        every = group.exchange_any(mine, torch.split(rows.detach().clone(), list(parts.sent)))
        return Running(torch.cat([each[mine] for each in every]))


def make_communicators(mesh: Mesh) -> list[ThreadCommunicator]:
    """Return a communicator for each rank of ``mesh``, in rank order."""
    axes_of_mesh = range(len(mesh.shape))
    sets = [combinations(axes_of_mesh, 1 + count) for count in axes_of_mesh]
    groups: list[dict[tuple[int, ...], _Group]] = [{} for _ in range(mesh.size)]
    for axes in chain.from_iterable(sets):
        for members in mesh.groups(*axes):
            group = _Group(len(members))
            for member in members:
                groups[member][axes] = group
    return [
        ThreadCommunicator(mesh, mesh.coordinates(index), own) for index, own in enumerate(groups)
    ]


def run_ranks(
    mesh: Mesh,
    function: Callable[[ThreadCommunicator], T],
    communicators: Sequence[ThreadCommunicator] | None = None,
) -> list[T]:
    """Call ``function`` on every rank of ``mesh``, each in its own thread; return the results in
    rank order. An error on any rank frees the other ranks from their barriers and is raised here.
    ``communicators`` of an earlier call are needed to continue with tensors that it made."""
    own = make_communicators(mesh) if communicators is None else communicators
    results: list[Any] = [None] * mesh.size
    errors: list[BaseException | None] = [None] * mesh.size

    def work(index: int) -> None:
        try:
            results[index] = function(own[index])
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            errors[index] = error
            for communicator in own:
                for group in communicator.groups.values():
                    group.barrier.abort()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [error for error in errors if error is not None]
    for error in found:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if found:
        raise found[0]
    return results
