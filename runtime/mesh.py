"""Process groups: one device mesh per stage.

In: a plan, in a process group whose ranks are the cluster's. Out: for each stage its
``DeviceMesh``. Making a process group is collective over the whole world, so every rank
makes every stage's groups, in the order of the stages.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..planner.plan import Plan, StagePlan

DATA_AXIS = "dp"


def build_meshes(plan: Plan, device_type: str = "cpu") -> dict[int, DeviceMesh]:
    """The device mesh of every stage by its index. Collective over all ranks.

    A rank outside a stage gets that stage's mesh too, with no coordinates on it
    (``get_coordinate()`` is None).
    """
    return {index: _mesh(stage, device_type) for index, stage in enumerate(plan.stages)}


def _mesh(stage: StagePlan, device_type: str) -> DeviceMesh:
    ranks = torch.tensor(stage.devices, dtype=torch.int).view(stage.mesh.shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=stage.mesh.axes)


def stage_of_rank(plan: Plan, rank: int) -> int | None:
    """The index of the stage that ``rank`` works for, or None if the plan leaves it idle."""
    for index, stage in enumerate(plan.stages):
        if rank in stage.devices:
            return index
    return None
