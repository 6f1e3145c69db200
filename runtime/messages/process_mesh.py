"""Process groups: one device mesh per stage.

In: a plan, in a process group whose ranks are the cluster's. Out: for each stage its
``DeviceMesh``. Making a process group is collective over the whole world, so every rank
makes every stage's groups, in the order of the stages.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...planner.layout import Mesh
from ...planner.plan import Plan, StagePlan
from ...planner.replicas import placed_stages
from .groups import share_limit

DATA_AXIS = "dp"


def build_meshes(plan: Plan, device_type: str = "cpu") -> dict[int, DeviceMesh]:
    """The device mesh of every stage by its index. Collective over all ranks.

    A rank outside a stage gets that stage's mesh too, with no coordinates on it
    (``get_coordinate()`` is None). Stages on the same devices in the same mesh share it.
    """
    known: dict[tuple[tuple[int, ...], Mesh], DeviceMesh] = {}
    found: dict[int, DeviceMesh] = {}
    for index, stage in enumerate(placed_stages(plan)):
        key = (stage.devices, stage.mesh)
        if key not in known:
            known[key] = _mesh(stage, device_type)
        found[index] = known[key]
    return found


def _mesh(stage: StagePlan, device_type: str) -> DeviceMesh:
    ranks = torch.tensor(stage.devices, dtype=torch.int).view(stage.mesh.shape)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=stage.mesh.axes)
    if mesh.get_coordinate() is not None:
        for group in mesh.get_all_groups():
            share_limit(group)
    return mesh


def stages_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """The indices of the stages that ``rank`` works for; none if the plan leaves it idle."""
    stages = enumerate(placed_stages(plan))
    return tuple(index for index, stage in stages if rank in stage.devices)
