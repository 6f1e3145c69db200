"""Each rank fills its own box of every parameter, and never holds two whole tensors."""

from __future__ import annotations

import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from stages import WEIGHTS, stage_program, weights
from stages import whole as gathered
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.passes.local.stage_program import shard_axes
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import (
    REPLICATE,
    Layout,
    Mesh,
    Region,
    parse_layout,
    shard,
)
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
    axes = shard_axes(TensorSpec((10, 4), "float32", requires_grad=True), held, MESH, zero)
    assert shard_region((10, 4), held, MESH, coordinates, axes) == expected


SIZES = [
    dict(zip(("dp", "ep", "cp", "tp"), sizes, strict=True))
    for sizes in product((1, 2, 3), (1, 2), (1, 2), (1, 2))
]


@pytest.mark.parametrize("expert", [False, True], ids=["dense", "expert"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_gives_each_element_to_one_of_the_ranks_that_hold_it_whole(
    zero: int, expert: bool
) -> None:
    """Over all meshes of up to 24 ranks: "ep" splits weights of experts, "tp" may split rows. Only
    ranks along a "tp" that does not split them hold the same elements."""
    shape = (20, 3)
    for sizes, split in product(SIZES, (False, True)):
        held = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        mesh = Mesh(tuple(held), tuple(held.values()))
        splitting = [name for name, does in (("ep", expert), ("tp", split)) if does]
        layout = tuple(shard(0) if name in splitting else REPLICATE for name in mesh.axes)
        axes = shard_axes(TensorSpec(shape, "float32", requires_grad=True), layout, mesh, zero)
        counts = torch.zeros(shape)
        for rank in range(mesh.size):
            box = shard_region(shape, layout, mesh, mesh.coordinates(rank), axes)
            counts[tuple(slice(start, stop) for start, stop in box)] += 1
        copies = 1 if split else held.get("tp", 1)
        assert torch.equal(counts, torch.full(shape, float(copies))), (held, split)
