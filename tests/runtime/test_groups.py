"""How long the collectives of a run may take: longer than its watchdog waits."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch.distributed.tensor import DTensor, Replicate

from autoparallel.planner.errors import DeviceMemoryError
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import StagePlan, StagePrediction
from autoparallel.runtime.launch.membership import join
from autoparallel.runtime.launch.process import describe
from autoparallel.runtime.messages.groups import (
    MARGIN_SECONDS,
    allow_seconds,
    mesh_along,
    new_group,
    stage_mesh,
    sum_groups,
)


def limit(group: dist.ProcessGroup | None) -> float:
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def limits() -> list[float]:
    """Of groups made before and after the limit of the default group is raised."""
    world = dist.group.WORLD
    before = dist.new_group([0, 1], timeout=timedelta(seconds=50))
    alone = dist.new_group([1])
    found = [limit(world), limit(before)]
    join("cpu", dist.get_rank(), 4000.0)
    found += [limit(world), limit(before), limit(new_group([0, 1])), limit(new_group())]
    allow_seconds(10.0)
    return [*found, limit(world)] + ([limit(alone)] if dist.get_rank() else [])


def test_groups_that_are_there_and_new_ones_have_a_minute_more_than_the_watchdog() -> None:
    first, second = run_processes(2, limits, backend="gloo", timeout_seconds=120.0)
    raised = 4000.0 + MARGIN_SECONDS
    assert first == [120.0, 50.0, raised, raised, raised, raised, raised]
    assert second == [*first, raised]


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda "
        "error, NCCL version 2.27.5\nLast error:\nCuda failure 2 'out of memory'",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 'out of memory'",
        "CUDA error: out of memory",
    ],
)
def test_memory_that_runs_out_in_nccl_is_a_memory_error(text: str) -> None:
    found = describe(RuntimeError(text), 1, 4)
    assert isinstance(found, DeviceMemoryError)
    assert found.code == "AP803"


def _joint() -> dict[str, list[list[int]]]:
    """Return the ranks that sum together with this one, over all axes of its stage's mesh and over
    "dp". Two stages have four ranks each. A tensor on each mesh is saved, and loaded as scripts
    load tensors."""
    found = {}
    for first, axes in ((0, ("dp", "ep")), (4, ("dp", "ep", "cp"))):
        shape = (2, 2) if len(axes) == 2 else (2, 1, 2)
        unpriced = StagePrediction({}, {})
        stage = StagePlan((), tuple(range(first, first + 4)), Mesh(axes, shape), 0, {}, unpriced)
        mesh = stage_mesh([stage], "cpu")
        if dist.get_rank() not in stage.devices:
            continue
        every = tuple(axis for axis, size in enumerate(shape) if size > 1)
        for name, of in (("every", every), ("dp", (0,))):
            groups = sum_groups(mesh, of)
            found[name] = [dist.get_process_group_ranks(group) for group in groups]
        for each in (mesh, mesh_along(mesh, every)):
            spread = DTensor.from_local(torch.ones(2), each, [Replicate()] * each.ndim)
            buffer = io.BytesIO()
            torch.save(spread, buffer)
            buffer.seek(0)
            assert torch.load(buffer).device_mesh == each
    return found


def test_joint_groups_are_made_by_ranks_outside_of_a_stage_too() -> None:
    for rank, found in enumerate(run_processes(8, _joint)):
        own = [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]
        across = [own[rank % 2], own[rank % 2 + 2]]
        assert found == {"every": [own], "dp": [across]}
