"""Each rank fills its own box of every parameter, and never holds two whole tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from stages import WEIGHTS, stage_program, weights
from stages import whole as gathered
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import Layout, Mesh, Region, parse_layout
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.parameters import shard_region
from autoparallel.runtime.parameters.stage import StageModule

MESH = Mesh(("dp", "tp"), (2, 2))


def make_stage(zero: int) -> StageModule:
    device_mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=MESH.axes)
    program = stage_program(
        MESH, MESH.coordinates(dist.get_rank()), ProcessCommunicator(device_mesh)
    )
    return StageModule(program, device_mesh, zero=zero, precision="fp64")


def _materialize() -> None:
    whole = weights()
    for zero in (0, 3):
        stage = make_stage(zero)
        alive: list[weakref.ref[torch.Tensor]] = []

        def source(name: str, alive: list[weakref.ref[torch.Tensor]] = alive) -> torch.Tensor:
            assert all(reference() is None for reference in alive), "an earlier tensor is alive"
            tensor = whole[name].clone()
            alive.append(weakref.ref(tensor))
            return tensor

        materialize(stage, source)
        assert len(alive) == len(WEIGHTS)
        local = total = 0
        for name, parameter in stage.by_name.items():
            box = tuple(slice(start, stop) for start, stop in parameter.region)
            assert torch.equal(parameter.local, whole[name][box]), name
            master = parameter.master.detach()
            assert torch.equal(gathered(master), whole[name]), name
            local += parameter.local.numel()
            total += whole[name].numel()
        assert local < total * (0.5 if zero == 3 else 0.8)
        with pytest.raises(UsageError, match=r"'scale' has shape \(7,\)"):
            materialize(stage, {**whole, "scale": torch.zeros(7)})


def test_ranks_hold_their_shards_of_the_source_one_tensor_at_a_time() -> None:
    run_processes(4, _materialize)


@pytest.mark.parametrize(
    ("layout", "coordinates", "zero", "expected"),
    [
        ("R R", (1, 0), 0, ((0, 10), (0, 4))),
        ("R S(0)", (1, 1), 0, ((5, 10), (0, 4))),
        ("R S(0)", (0, 1), 3, ((5, 8), (0, 4))),
        ("R S(0)", (1, 1), 3, ((8, 10), (0, 4))),
        ("R S(1)", (1, 1), 1, ((5, 10), (2, 4))),
    ],
)
def test_a_rank_s_box_is_its_layout_s_then_zero_s_chunk_of_rows(
    layout: str, coordinates: tuple[int, int], zero: int, expected: Region
) -> None:
    held: Layout = parse_layout(layout)
    spec = TensorSpec((10, 4), "float32", requires_grad=True)
    assert shard_region(spec, held, MESH, coordinates, zero) == expected


def test_the_boxes_of_all_ranks_cover_an_uneven_parameter_once() -> None:
    mesh = Mesh(("dp",), (4,))
    counts = torch.zeros(5, 2)
    for index in range(4):
        spec = TensorSpec((5, 2), "float32", requires_grad=True)
        rows, columns = shard_region(spec, parse_layout("R"), mesh, (index,), 3)
        counts[slice(*rows), slice(*columns)] += 1
    assert torch.equal(counts, torch.ones(5, 2))
