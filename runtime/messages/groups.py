"""Process groups: a device mesh per stage, and time limits a minute above the watchdog's.

NCCL ends a process whose collective exceeds the time limit of its group (by default 10 minutes)
and names neither the action nor the rank that did not come. The watchdog does, so its limit has to
end first. ``torch.distributed.new_group`` uses torch's default limit, not the default group's;
``new_group`` of this module uses the default group's.

Making a process group is collective over the whole world, so every rank makes every stage's groups,
in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...planner.graph.layout import Mesh
from ...planner.plan import Plan, StagePlan, grouped_axes, joint_axes
from ...planner.variants.replicas import placed_stages

MARGIN_SECONDS = 60.0


def time_limit(timeout_seconds: float | None) -> timedelta | None:
    """Return the time limit for a group's collectives: a minute longer than ``timeout_seconds``,
    the watchdog's limit. Return None (torch's default) if ``timeout_seconds`` is None."""
    return None if timeout_seconds is None else timedelta(seconds=timeout_seconds + MARGIN_SECONDS)


def new_group(
    ranks: Sequence[int] | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks`` (None: all ranks) with the time limit of the default group.
    Collective over all ranks."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend)
    share_limit(group)
    return group


def gloo_group_beside(group: dist.ProcessGroup) -> Any:
    """Make a second gloo group of the ranks in ``group``, whose messages do not mix with messages
    of ``group``. Collective over these ranks alone.

    The group is not registered in ``torch.distributed``; it has only the methods of
    ``ProcessGroupGloo``. ``new_group(use_local_synchronization=True)`` is no alternative: it names
    a group by the number of groups that a process is in, and hangs if the ranks differ in that
    number.
    """
    distributed: Any = dist.distributed_c10d
    rank, store = dist.get_rank(group), distributed._get_default_store()
    count = store.add(f"autoparallel/beside/{group.group_name}/{rank}", 1)
    beside = distributed.PrefixStore(f"autoparallel/beside/{group.group_name}/{count}", store)
    limits = [each.options._timeout for each in _backends(dist.group.WORLD)]
    limit = max(limits, default=distributed.default_pg_timeout)
    return distributed.ProcessGroupGloo(beside, rank, dist.get_world_size(group), limit)


def share_limit(group: dist.ProcessGroup) -> None:
    """Raise the time limit of ``group`` to the default group's, if that limit is longer."""
    world = dist.group.WORLD
    limits = [] if world is None else [each.options._timeout for each in _backends(world)]
    if limits:
        _allow(group, max(limits))


def allow_seconds(timeout_seconds: float) -> None:
    """Raise the time limits of all groups of this process to at least
    ``time_limit(timeout_seconds)``."""
    limit = time_limit(timeout_seconds)
    assert limit is not None
    for group in dist.distributed_c10d._world.pg_map if dist.is_initialized() else ():
        _allow(group, limit)


def _allow(group: Any, limit: timedelta) -> None:
    for backend in _backends(group):
        if backend.options._timeout < limit:
            backend._set_default_timeout(limit)


def _backends(group: Any) -> Iterator[Any]:
    """Yield a group's backends (gloo, NCCL) with a time limit; none if this rank is not in it."""
    if not isinstance(group, dist.ProcessGroup):
        return  # torch's placeholder for a group that this rank is not in
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(getattr(backend, "options", None), "_timeout"):
            yield backend


DATA_AXIS = "dp"

JOINT = "joint"
"""Attribute of a stage's device mesh: a dict from each set of several axes along which ranks
communicate as one group, and 0, to a mesh of the same ranks, in which these axes are one, the
first; and from axes over which ZeRO shards states in groups of k ranks, and k, to a mesh whose
first axes are the groups and the ranks of a group. It is no field of a subclass, as ``torch.load``
refuses DTensors on meshes of other classes."""


def stage_mesh(stages: Sequence[StagePlan], device_type: str) -> DeviceMesh:
    """Make the device mesh of stages on the same devices, and the meshes of its joint axes.
    Collective over all ranks."""
    stage = stages[0]
    ranks = torch.tensor(stage.devices, dtype=torch.int).view(stage.mesh.shape)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=stage.mesh.axes)
    keys = [*((axes, 0) for axes in joint_axes(stages)), *grouped_axes(stages)]
    setattr(mesh, JOINT, {key: _joined(mesh, stage, *key) for key in keys})
    if mesh.get_coordinate() is not None:
        for group in mesh.get_all_groups():
            share_limit(group)
    return mesh


def _joined(
    mesh: DeviceMesh, stage: StagePlan, axes: tuple[int, ...], shards: int
) -> DeviceMesh | None:
    """Make the mesh in which ``axes`` are one axis, or two if ``shards``, with new groups of ranks;
    None on ranks outside of the stage, which take part, since torch makes no parts of a mesh
    there."""
    own: list[dist.ProcessGroup] = []
    for members in stage.mesh.groups(*axes):
        ranks = torch.tensor([stage.devices[index] for index in members])
        rows = [*ranks.view(-1, shards).t(), *ranks.view(-1, shards)] if shards else [ranks]
        for row in (each.tolist() for each in rows):
            is_world = len(row) == dist.get_world_size()
            group = dist.group.WORLD if is_world else new_group(row)
            own += [group] if group is not None and dist.get_rank() in row else []
    if not own:
        return None
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    ranks = mesh.mesh.permute(*axes, *others).flatten(0, len(axes) - 1)
    names = ["groups"] * bool(shards) + ["_".join(mesh_names(mesh, axes))]
    if shards:
        ranks = ranks.view(-1, shards, *ranks.shape[1:])
    return DeviceMesh.from_group(
        [*own, *(mesh.get_group(axis) for axis in others)],
        mesh.device_type,
        ranks,
        mesh_dim_names=(*names, *mesh_names(mesh, others)),
    )


def mesh_names(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    return tuple(names[axis] for axis in axes)


def mesh_along(mesh: DeviceMesh, axes: tuple[int, ...], shards: int = 0) -> DeviceMesh:
    """Return the mesh of one axis that has this rank's group of the ranks along ``axes``; if they
    are in groups of ``shards`` ranks, the mesh of two axes: the groups, and the ranks of a
    group."""
    if len(axes) == 1 and not shards:
        return mesh[mesh_names(mesh, axes)]
    joint: DeviceMesh = getattr(mesh, JOINT)[axes, shards]
    return joint[mesh_names(joint, (0, 1) if shards else (0,))]


def mesh_beside(
    mesh: DeviceMesh, axes: tuple[int, ...], others: Sequence[int], shards: int = 0
) -> DeviceMesh:
    """Return the mesh of the axes ``others``, to be combined with ``mesh_along``."""
    is_alone = len(axes) == 1 and not shards
    root: DeviceMesh = mesh if is_alone else getattr(mesh, JOINT)[axes, shards]
    return root[mesh_names(mesh, others)]


def sum_groups(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks whose sums, one after the other, are the sum over ``axes``."""
    own = Mesh(mesh.mesh_dim_names or (), tuple(mesh.shape))
    return tuple(mesh_along(mesh, joined).get_group() for joined in own.joined(axes))


def build_meshes(plan: Plan, device_type: str = "cpu") -> dict[int, DeviceMesh]:
    """Build the device mesh of every stage, by its index. Collective over all ranks.

    A rank outside a stage gets that stage's mesh too, with no coordinates on it
    (``get_coordinate()`` is None). Stages on the same devices in the same mesh share it.
    """
    together: dict[tuple[tuple[int, ...], Mesh], list[int]] = {}
    stages = placed_stages(plan)
    for index, stage in enumerate(stages):
        together.setdefault((stage.devices, stage.mesh), []).append(index)
    found: dict[int, DeviceMesh] = {}
    for members in together.values():
        own = stage_mesh([stages[index] for index in members], device_type)
        found |= dict.fromkeys(members, own)
    return found


def stages_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the indices of the stages that ``rank`` computes; none if the plan leaves it idle."""
    stages = enumerate(placed_stages(plan))
    return tuple(index for index, stage in stages if rank in stage.devices)
