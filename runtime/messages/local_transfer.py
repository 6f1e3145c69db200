"""Values between stages of one rank: handed over in memory, not sent.

In: the boundaries between stages that share their devices. Out: a stage's values, kept until the
other stage takes them. If both stages have the same layout of a value, nothing is copied; else the
ranks of the stages exchange the boxes that they need among themselves, all at the same action of
the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.graph.layout import Layout, local_region, local_shape
from .communicator import as_bytes
from .exchange import Direction, Piece, StagePlace, directions_of, find_pieces
from .groups import new_group

if TYPE_CHECKING:
    from ...passes.local.stage_cut import Boundary

Key = tuple[Direction, int, int]
"""Key of stored values: direction, receiving stage, micro-batch."""


def split_boundaries(
    boundaries: Sequence[Boundary], stages: Sequence[StagePlace]
) -> tuple[tuple[Boundary, ...], tuple[Boundary, ...]]:
    """Divide the values sent between stages into values between different devices, and values
    between stages on the same devices."""
    is_local = [
        set(stages[b.source_stage].devices) == set(stages[b.target_stage].devices)
        for b in boundaries
    ]
    pairs = list(zip(boundaries, is_local, strict=True))
    return tuple(b for b, own in pairs if not own), tuple(b for b, own in pairs if own)


@dataclass(frozen=True, slots=True)
class _Swap:
    """Change of a value's layout among the ranks of two stages: the shape of this rank's new part,
    and the messages that it sends and receives."""

    shape: tuple[int, ...]
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """A value that passes between two stages on the same ranks, in one direction; ``swap`` is its
    change of layout, None if every rank holds the same part in both stages."""

    key: str
    taker: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    swap: _Swap | None


class LocalTransfer:
    """Transfer of values between stages on the same ranks. Construction is collective over all
    ranks."""

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        *,
        stages: Sequence[StagePlace],
        rank: int,
        device: torch.device,
    ) -> None:
        """Make the transfer; ``boundaries`` are the values between stages on the same devices.
        Collective over all ranks."""
        self._rank = rank
        self._device = device
        self._ways: dict[tuple[Direction, int], list[_Way]] = {}
        self._kept: dict[Key, dict[str, Tensor]] = {}
        self._group: dist.ProcessGroup | None = None
        swapping: dict[tuple[int, ...], None] = {}
        for boundary in boundaries:
            places = stages[boundary.source_stage], stages[boundary.target_stage]
            is_alike = _is_alike(boundary, places)
            if not is_alike:
                swapping[tuple(sorted(places[0].devices))] = None
            if rank in places[0].devices:
                self._add(boundary, places, is_alike)
        for devices in swapping:
            group = new_group(devices)
            if rank in devices:
                self._group = group
                # The first operation of a communicator needs all of its ranks; a swap does not.
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def _add(
        self, boundary: Boundary, places: tuple[StagePlace, StagePlace], is_alike: bool
    ) -> None:
        layouts = boundary.source_layout, boundary.target_layout
        ends = (boundary.source_stage, boundary.target_stage)
        for direction in directions_of(boundary):
            order = 1 if direction == "forward" else -1
            maker, taker = ends[::order]
            shape, dtype = boundary.spec.shape, getattr(torch, boundary.spec.dtype)
            local = local_shape(shape, layouts[::order][0], places[::order][0].mesh.shape)
            swap = None if is_alike else self._swap(shape, places[::order], layouts[::order])
            way = _Way(boundary.key, taker, local, dtype, swap)
            self._ways.setdefault((direction, maker), []).append(way)

    def _swap(
        self, shape: tuple[int, ...], places: Sequence[StagePlace], layouts: Sequence[Layout]
    ) -> _Swap:
        return _Swap(
            local_shape(shape, layouts[1], places[1].mesh.shape),
            find_pieces(shape, places, layouts, rank=self._rank, is_sender=True),
            find_pieces(shape, places, layouts, rank=self._rank, is_sender=False),
        )

    def give(
        self, direction: Direction, stage: int, microbatch: int, values: Mapping[str, Tensor]
    ) -> None:
        """Store values that ``stage`` has computed, by key, until another stage of this rank takes
        them; a gradient that is missing counts as zero. The caller must not write to the values
        afterwards."""
        for way in self._ways.get((direction, stage), ()):
            value = values.get(way.key)
            if value is None:
                value = torch.zeros(way.shape, dtype=way.dtype, device=self._device)
            value = value.detach()
            if way.swap is not None:
                value = self._swapped(value, way.swap)
            kept = self._kept.setdefault((direction, way.taker, microbatch), {})
            kept[way.key] = kept[way.key] + value if way.key in kept else value

    def take(self, direction: Direction, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Return, and forget, the values that other stages of this rank have computed for
        ``stage``, by key. Gradients of a value that went to several stages are summed."""
        return self._kept.pop((direction, stage, microbatch), {})

    def _swapped(self, value: Tensor, swap: _Swap) -> Tensor:
        """Convert ``value``, this rank's part in the layout of the giving stage, to its part in the
        layout of the taking stage. Collective over the ranks of the stages."""
        result = value.new_empty(swap.shape)
        operations: list[dist.P2POp] = []
        copies: list[tuple[Tensor, Tensor]] = []
        own = [piece.slices for piece in swap.sends if piece.peer == self._rank]
        for piece in swap.receives:
            part = result[piece.slices]
            if piece.peer == self._rank:
                part.copy_(value[own.pop(0)])
                continue
            buffer = torch.empty_like(part, memory_format=torch.contiguous_format)
            copies.append((part, buffer))
            receive = dist.P2POp(dist.irecv, as_bytes(buffer), piece.peer, group=self._group)
            operations.append(receive)
        for piece in swap.sends:
            if piece.peer != self._rank:
                packed = as_bytes(value[piece.slices].contiguous())
                operations.append(dist.P2POp(dist.isend, packed, piece.peer, group=self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for part, buffer in copies:
            part.copy_(buffer)
        return result


def _is_alike(boundary: Boundary, places: tuple[StagePlace, StagePlace]) -> bool:
    """Return whether every rank holds the same part of the value in both stages."""
    layouts = boundary.source_layout, boundary.target_layout
    source, target = (
        {
            rank: local_region(boundary.spec.shape, layout, place.mesh, place.mesh.coordinates(i))
            for i, rank in enumerate(place.devices)
        }
        for layout, place in zip(layouts, places, strict=True)
    )
    return source == target
