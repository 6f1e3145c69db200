"""A checkpoint written under one plan loads under any other, optimizer state included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_processes
from stages import (
    WEIGHTS,
    device_mesh_of,
    global_batch,
    reference,
    relative_error,
    stage_program,
    weights,
    whole,
)
from torch.optim import Optimizer

from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import Mesh
from autoparallel.runtime.checkpoint.checkpoint import (
    Slot,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from autoparallel.runtime.checkpoint.writer import CheckpointWriter
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.step.executor import StageExecutor, StageVariant
from autoparallel.runtime.update.optimizer import build_optimizer

LEARNING_RATE = 0.05


def make(
    mesh: Mesh, zero: int, initial: dict[str, torch.Tensor], degree: int = 0
) -> tuple[StageExecutor, Optimizer]:
    device_mesh = device_mesh_of(mesh, zero, degree)
    program = stage_program(
        mesh, mesh.coordinates(dist.get_rank()), ProcessCommunicator(device_mesh)
    )
    program = replace(program, shard_degree=degree)
    stage = StageModule(program, device_mesh, zero=zero, precision="fp64")
    materialize(stage, initial)
    optimizer = build_optimizer(stage.by_name.values(), learning_rate=LEARNING_RATE)
    return StageExecutor(stage, StageVariant(1)), optimizer


def state_of(executor: StageExecutor, optimizer: Optimizer) -> TrainingState:
    masters = {name: parameter.master for name, parameter in executor.parameters.items()}
    shapes = {**WEIGHTS, "head.scale": WEIGHTS["scale"]}
    return TrainingState(
        shapes, (Slot(masters),), aliases={"head.scale": "scale"}, optimizer=optimizer
    )


def run_step(executor: StageExecutor, optimizer: Optimizer, step: int) -> None:
    executor.begin_step(global_batch(1, step))
    executor.forward(0, {})
    executor.backward(0, {}, last=True)
    executor.finish_step()
    optimizer.step()


def check_weights(executor: StageExecutor, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in executor.parameters.items():
        found: Any = parameter.master.detach()
        assert relative_error(whole(found), expected[name]) < 1e-9, name


def _save_and_load(folder: str, source: tuple[Any, ...], targets: list[tuple[Any, ...]]) -> None:
    expected = reference(2, 1, LEARNING_RATE)
    mesh, zero, *degree = source
    executor, optimizer = make(mesh, zero, weights(), *degree)
    run_step(executor, optimizer, 0)
    save_checkpoint(folder, state_of(executor, optimizer), CheckpointWriter(), step=1)
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in WEIGHTS.items()}
    for target in targets:
        mesh, zero, *degree = target
        executor, optimizer = make(mesh, zero, zeros, *degree)
        assert load_checkpoint(folder, state_of(executor, optimizer)).step == 1
        for parameter in executor.parameters.values():
            parameter.refresh()
        check_weights(executor, expected.weights[0])
        run_step(executor, optimizer, 1)
        check_weights(executor, expected.weights[1])


def test_a_checkpoint_loads_under_another_plan_and_training_goes_on_as_if_unbroken(
    tmp_path: Path,
) -> None:
    dp, tp = Mesh(("dp",), (2,)), Mesh(("tp",), (2,))
    run_processes(2, _save_and_load, str(tmp_path / "a"), (dp, 3), [(tp, 0), (dp, 0), (dp, 3)])
    plain = {"model": {n: torch.empty(shape, dtype=torch.float64) for n, shape in WEIGHTS.items()}}
    plain["model"]["head.scale"] = torch.empty(6, dtype=torch.float64)
    dcp.load(plain, checkpoint_id=tmp_path / "a" / "step-00000001", no_dist=True)
    expected = reference(1, 1, LEARNING_RATE).weights[0]
    for name in WEIGHTS:
        assert relative_error(plain["model"][name], expected[name]) < 1e-9, name
    assert torch.equal(plain["model"]["head.scale"], plain["model"]["scale"])


def test_a_checkpoint_of_zero_with_tensor_parallel_loads_under_data_parallel(
    tmp_path: Path,
) -> None:
    both, dp = Mesh(("dp", "tp"), (2, 2)), Mesh(("dp",), (4,))
    run_processes(4, _save_and_load, str(tmp_path / "b"), (both, 3), [(dp, 3), (both, 0)])


def test_a_checkpoint_of_shards_within_groups_loads_under_any_other_sharding(
    tmp_path: Path,
) -> None:
    both, dp = Mesh(("dp", "tp"), (2, 2)), Mesh(("dp",), (4,))
    folders = str(tmp_path / "c"), str(tmp_path / "d")
    run_processes(4, _save_and_load, folders[0], (dp, 3, 2), [(dp, 3), (dp, 1, 2), (both, 1)])
    run_processes(4, _save_and_load, folders[1], (dp, 2), [(dp, 3, 2), (dp, 2, 2)])


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no checkpoint"):
        load_checkpoint(tmp_path, TrainingState({}, ()))
