"""Which box of a parameter a rank holds, and how that is written as a DTensor.

A parameter is held split or whole on each mesh axis (its layout). If it is whole on axis
``dp`` and the stage's ZeRO stage is at least 1, ``fully_shard`` cuts the rank's part once
more, along dimension 0, as ``torch.chunk`` does: chunks of ``ceil(rows / ranks)`` rows, the
last ones shorter or empty. A rank's part is always one box.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from ...planner.layout import Layout, Mesh, Region, local_region
from ..messages.process_mesh import DATA_AXIS


def is_fully_sharded(shape: Sequence[int], layout: Layout, mesh: Mesh, zero: int) -> bool:
    """Whether ZeRO shards this parameter over axis ``dp``.

    >>> from autoparallel.planner.layout import REPLICATE, shard
    >>> is_fully_sharded((4, 4), (REPLICATE, shard(0)), Mesh(("dp", "tp"), (2, 2)), zero=3)
    True
    """
    return (
        zero > 0
        and mesh.axes[0] == DATA_AXIS
        and mesh.shape[0] > 1
        and not layout[0].is_shard
        and len(shape) > 0
    )


def shard_region(
    shape: Sequence[int], layout: Layout, mesh: Mesh, coordinates: Sequence[int], zero: int
) -> Region:
    """The box of the whole parameter that the rank at ``coordinates`` holds.

    >>> from autoparallel.planner.layout import REPLICATE, shard
    >>> shard_region((10, 3), (REPLICATE, shard(0)), Mesh(("dp", "tp"), (2, 2)), (1, 1), 3)
    ((8, 10), (0, 3))
    """
    box = local_region(shape, layout, mesh, coordinates)
    if not is_fully_sharded(shape, layout, mesh, zero):
        return box
    start, stop = box[0]
    rows = -(-(stop - start) // mesh.shape[0])
    first = min(start + coordinates[0] * rows, stop)
    return ((first, min(first + rows, stop)), *box[1:])


def intersection(first: Region, second: Region) -> Region | None:
    """The box common to both, or None.

    >>> intersection(((0, 4), (0, 2)), ((2, 6), (0, 2)))
    ((2, 4), (0, 2))
    """
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def within(box: Region, frame: Region) -> tuple[slice, ...]:
    """The slices that cut ``box`` out of a tensor that holds ``frame``."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, frame, strict=True)
    )


def placements(layout: Layout) -> tuple[DTensorPlacement, ...]:
    """The DTensor placements of a parameter's layout: split or replicated on each axis."""
    return tuple(
        Shard(placement.dim) if placement.is_shard else Replicate() for placement in layout
    )
