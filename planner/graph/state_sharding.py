"""Ranks that shard the states of a parameter together under ZeRO, and ranks that replicate shards.

In: a mesh, the joint axes along which ranks hold a parameter whole, and a degree: the number of
neighbours on all joint axes together that form a group. Out: the axes along which a group's ranks
shard, and those along which groups replicate (hybrid sharding, HSDP: Zhao et al. 2023, "PyTorch
FSDP", section 3.2.2). A group may divide an axis of the mesh in two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from .layout import Mesh


@dataclass(frozen=True)
class StateSharding:
    """Axes of ``mesh`` along which ZeRO shards a parameter's states (``sharded``) and along which
    the shards are ``replicated``. The mesh is a stage's, one axis of which may be divided in two:
    the axis "groups", and the ranks of a group."""

    mesh: Mesh
    replicated: tuple[int, ...]
    sharded: tuple[int, ...]

    @cached_property
    def num_shards(self) -> int:
        return self.mesh.num_ranks(self.sharded)

    @cached_property
    def num_replicas(self) -> int:
        return self.mesh.num_ranks(self.replicated)


def joint_groups(mesh: Mesh, degree: int) -> dict[int, int] | None:
    """Divide the joint axes' ranks into groups of ``degree`` neighbours; return the number of a
    group's ranks along each of these axes. None if the order of ranks has no such groups.

    >>> joint_groups(Mesh(("dp", "cp", "tp"), (4, 2, 2)), 4)
    {1: 2, 0: 2}
    """
    sizes, rest = {}, degree
    for axis in reversed(mesh.joint_axes):
        sizes[axis] = mesh.shape[axis] if rest % mesh.shape[axis] == 0 else rest
        if mesh.shape[axis] % sizes[axis]:
            return None
        rest //= sizes[axis]
    return sizes if rest == 1 else None


@cache
def state_sharding(mesh: Mesh, axes: tuple[int, ...], degree: int = 0) -> StateSharding:
    """Return how ZeRO shards a parameter that ranks along the joint axes ``axes`` hold whole: over
    all of them (0), or over those of each group of ``degree`` neighbours (``joint_groups``). Raises
    ValueError if there are no such groups.

    >>> found = state_sharding(Mesh(("dp", "tp"), (4, 2)), (0,), 2)
    >>> found.mesh.shape, found.replicated, found.sharded
    ((2, 2, 2), (0,), (1,))
    """
    if not degree:
        return StateSharding(mesh, (), axes)
    sizes = joint_groups(mesh, degree)
    if sizes is None:
        raise ValueError(f"ranks of {mesh} do not form groups of {degree} neighbours")
    cut = next((axis for axis, own in sizes.items() if 1 < own < mesh.shape[axis]), None)
    if cut is None:
        outer = tuple(axis for axis in axes if sizes[axis] == 1)
        return StateSharding(mesh, outer, tuple(axis for axis in axes if axis not in outer))
    parts = mesh.shape[cut] // sizes[cut], sizes[cut]
    fine = Mesh(
        (*mesh.axes[:cut], "groups", *mesh.axes[cut:]),
        (*mesh.shape[:cut], *parts, *mesh.shape[cut + 1 :]),
    )
    outer = tuple(axis for axis in axes if axis <= cut)
    return StateSharding(fine, outer, tuple(axis + 1 for axis in axes if axis >= cut))
