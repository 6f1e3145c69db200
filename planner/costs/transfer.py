"""Transfers between meshes: the boxes of a tensor that devices of one mesh send to another mesh.

In: a tensor's global shape, its layouts on the source mesh and on the target mesh. Out: the
messages after which every target device has exactly its box: each element once, from a device that
holds it. Layouts are S and I (R is treated as I: the value is the same).

Source: the slice algorithm of Zhuang et al. 2023, "On Optimizing the Communication of Model
Parallelism" (arXiv:2211.05322), section 3, with a greedy balance of the senders' loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..graph.layout import Layout, Mesh, Region, divides, format_layout, intersect, local_region


@dataclass(frozen=True, slots=True)
class Transfer:
    """Message from one device to another with the part ``box`` of a tensor, a (start, stop) pair
    per dimension.

    ``source`` and ``target`` are device indices in their meshes' row-major order.
    """

    source: int
    target: int
    box: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return prod(self.shape)


def transfers(
    shape: Sequence[int],
    source_layout: Layout,
    source_mesh: Mesh,
    target_layout: Layout,
    target_mesh: Mesh,
) -> tuple[Transfer, ...]:
    """Return the messages that move a tensor from one mesh to another, sorted by target and box.

    A box that several source devices hold is sent by the device that has sent the least so far;
    ties go to the device at the most similar position in its mesh. A pair of devices exchanges at
    most one box. Raises ValueError for a partial layout or an uneven split.

    >>> from autoparallel.planner.graph.layout import INVARIANT, shard
    >>> two = Mesh(("dp",), (2,)), Mesh(("tp",), (2,))
    >>> for t in transfers((4, 6), (shard(0),), two[0], (shard(1),), two[1]):
    ...     print(t.source, "->", t.target, t.box)
    0 -> 0 ((0, 2), (0, 3))
    1 -> 0 ((2, 4), (0, 3))
    0 -> 1 ((0, 2), (3, 6))
    1 -> 1 ((2, 4), (3, 6))
    """
    sources = _regions(shape, source_layout, source_mesh)
    targets = _regions(shape, target_layout, target_mesh)
    holders: dict[Region, list[int]] = {}
    for index, region in enumerate(sources):
        holders.setdefault(region, []).append(index)
    sent = [0] * source_mesh.size
    chosen: list[Transfer] = []
    regions = list(holders)
    bounds = np.array(regions, dtype=np.int64).reshape(len(regions), len(shape), 2)
    boxes: dict[Region, list[tuple[Region, Region]]] = {}
    for target, wanted in enumerate(targets):
        if wanted not in boxes:
            box = np.array(wanted, dtype=np.int64).reshape(len(shape), 2)
            starts = np.maximum(bounds[:, :, 0], box[:, 0])
            shared = (starts < np.minimum(bounds[:, :, 1], box[:, 1])).all(axis=1)
            near = [regions[number] for number in np.flatnonzero(shared).tolist()]
            shares = ((each, intersect(each, wanted)) for each in near)
            boxes[wanted] = [(each, part) for each, part in shares if part is not None]
        for region, part in boxes[wanted]:
            source = min(
                holders[region],
                key=lambda replica: (
                    sent[replica],
                    abs(replica * target_mesh.size - target * source_mesh.size),
                    replica,
                ),
            )
            transfer = Transfer(source, target, part)
            sent[source] += transfer.numel
            chosen.append(transfer)
    return tuple(sorted(chosen, key=lambda transfer: (transfer.target, transfer.box)))


def _regions(shape: Sequence[int], layout: Layout, mesh: Mesh) -> list[Region]:
    if any(placement.kind == "P" for placement in layout):
        raise ValueError(f"a partial value cannot be sent: {format_layout(layout)}")
    if not divides(shape, layout, mesh.shape):
        raise ValueError(f"{format_layout(layout)} on {mesh.shape} does not divide {tuple(shape)}")
    return [local_region(shape, layout, mesh, mesh.coordinates(i)) for i in range(mesh.size)]
