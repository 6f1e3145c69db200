"""What a stage does besides equalling one process: recomputation, pipelines, mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from stages import (
    MICROBATCH,
    global_batch,
    model_loss,
    reference,
    relative_error,
    stage_program,
    summed,
    weights,
    whole,
)
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import Mesh
from autoparallel.runtime.data.rank_batch import microbatch_rows
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.messages.shared_objects import gather_values
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.parameters.tied_parameters import find_tied
from autoparallel.runtime.step.executor import StageExecutor, StageVariant
from autoparallel.runtime.step.training_call import TrainingCall
from autoparallel.runtime.update.optimizer import (
    build_optimizer,
    clip_coefficient,
    gradient_norm,
    published_gradients,
    scale_gradients,
)

TOLERANCE = 1e-9
LEARNING_RATE = 0.05


def make_stage(
    mesh: Mesh, ranks: list[int], *, zero: int, device_mesh: DeviceMesh, **settings: Any
) -> StageModule:
    precision = settings.pop("precision", "fp64")
    program = stage_program(
        mesh,
        mesh.coordinates(ranks.index(dist.get_rank())),
        ProcessCommunicator(device_mesh),
        **settings,
    )
    stage = StageModule(program, device_mesh, zero=zero, precision=precision)
    materialize(stage, weights())
    return stage


def device_mesh_of(mesh: Mesh, ranks: list[int]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).view(mesh.shape), mesh_dim_names=mesh.axes)


def saved_bytes(recompute: str) -> int:
    """What autograd keeps of one forward, in bytes."""
    mesh = Mesh(("tp",), (1,))
    stage = make_stage(
        mesh, [0], zero=0, device_mesh=device_mesh_of(mesh, [0]), recompute=recompute
    )
    executor = StageExecutor(stage, StageVariant(1))
    executor.begin_step(global_batch(1))
    own = {p.local.untyped_storage().data_ptr() for p in stage.by_name.values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        executor.forward(0, {})
    executor.backward(0, {}, last=True)
    executor.finish_step()
    return sum(kept.values())


def _single() -> tuple[int, int]:
    return saved_bytes("none"), saved_bytes("full")


def test_full_recomputation_keeps_fewer_bytes() -> None:
    [(plain, full)] = run_processes(1, _single)
    assert full < plain


def _pipeline(recompute: str, zero: int, num_microbatches: int) -> None:
    """Two stages of two ranks: dp=2 (ZeRO) before tp=2, ``scale`` held by both."""
    first, second = Mesh(("dp",), (2,)), Mesh(("tp",), (2,))
    meshes = [device_mesh_of(first, [0, 1]), device_mesh_of(second, [2, 3])]
    rank = dist.get_rank()
    index = rank // 2
    stage = make_stage(
        (first, second)[index],
        [[0, 1], [2, 3]][index],
        zero=(zero, 0)[index],
        device_mesh=meshes[index],
        blocks=(range(2), range(2, 4))[index],
        recompute=recompute,
    )
    tied = find_tied({index: stage.by_name})
    assert tied.held == ((index, "scale"),)
    assert tied.elsewhere == (frozenset(), frozenset({(1, "scale")}))[index]
    executor = StageExecutor(stage, StageVariant(num_microbatches))
    optimizer = build_optimizer(stage.by_name.values(), learning_rate=LEARNING_RATE)
    expected = reference(2, num_microbatches, LEARNING_RATE)
    for step in range(2):
        executor.begin_step(global_batch(num_microbatches, step))
        for j in range(num_microbatches):
            _forward(executor, index, j)
        for j in range(num_microbatches):
            _backward(executor, index, j, last=j == num_microbatches - 1)
        executor.finish_step()
        tied.sum({index: stage.by_name})
        squares = sum(float(g.square().sum()) for g in expected.gradients[step].values())
        counted = [p for name, p in stage.by_name.items() if (index, name) not in tied.elsewhere]
        norm = gradient_norm(counted, device=torch.device("cpu")).value()
        assert abs(float(norm) - squares**0.5) < TOLERANCE * squares**0.5
        part = executor.mean_loss()
        assert (part is not None) == (index == 1)
        assert relative_error(summed(part), expected.losses[step]) < TOLERANCE
        optimizer.step()
        for name, parameter in stage.by_name.items():
            found = whole(parameter.master.detach())
            assert relative_error(found, expected.weights[step][name]) < TOLERANCE, name
        gradient = stage.by_name["scale"].master.grad
        gradients = gather_values(whole(gradient))
        assert all(torch.equal(other, gradients[0]) for other in gradients)


def _forward(executor: StageExecutor, index: int, microbatch: int) -> None:
    """Stage 0 sends its rows to both ranks of stage 1, which want all rows."""
    rank = dist.get_rank()
    if index == 0:
        sent = executor.forward(microbatch, {})["h1"].contiguous()
        for target in (2, 3):
            dist.send(sent, target)
    else:
        parts = [torch.empty(MICROBATCH // 2, 6, dtype=torch.float64) for _ in range(2)]
        for source, part in enumerate(parts):
            dist.recv(part, source)
        executor.forward(microbatch, {"h1": torch.cat(parts)})
        assert executor.loss(microbatch) is not None
        assert rank >= 2


def _backward(executor: StageExecutor, index: int, microbatch: int, *, last: bool) -> None:
    rank = dist.get_rank()
    if index == 1:
        gradient = executor.backward(microbatch, {}, last=last)["h1"]
        if rank == 2:
            for target, part in enumerate(gradient.chunk(2)):
                dist.send(part.contiguous(), target)
    else:
        part = torch.empty(MICROBATCH // 2, 6, dtype=torch.float64)
        dist.recv(part, 2)
        assert executor.backward(microbatch, {"h1": part}, last=last) == {}


def _pipelines() -> None:
    for recompute, zero, num_microbatches in (("none", 3, 4), ("full", 2, 2), ("none", 0, 2)):
        _pipeline(recompute, zero, num_microbatches)


def test_stages_on_different_meshes_with_a_shared_parameter_equal_one_process() -> None:
    run_processes(4, _pipelines)


def _loops() -> None:
    """``loss.backward()`` in an ordinary loop."""
    expected = reference(2, 2, LEARNING_RATE)
    for mesh, zero in (
        (Mesh(("dp",), (2,)), 0),
        (Mesh(("dp",), (2,)), 3),
        (Mesh(("tp",), (2,)), 0),
    ):
        stage = make_stage(mesh, [0, 1], zero=zero, device_mesh=device_mesh_of(mesh, [0, 1]))
        call = TrainingCall(StageExecutor(stage, StageVariant(2)))
        optimizer = build_optimizer(
            stage.by_name.values(), lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE)
        )
        for step in range(2):
            loss = call.loss(global_batch(2, step))
            assert relative_error(loss.detach(), expected.losses[step]) < TOLERANCE
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in stage.by_name.items():
            found = whole(parameter.master.detach())
            assert relative_error(found, expected.weights[1][name]) < TOLERANCE, name
        with torch.no_grad():
            loss = call.loss(global_batch(2))
        assert not loss.requires_grad


def test_an_ordinary_training_loop_equals_one_process() -> None:
    run_processes(2, _loops)


def _mixed() -> None:
    """bfloat16 compute with float32 masters stays near float64."""
    batch = global_batch(2)
    w = {name: value.requires_grad_() for name, value in weights().items()}
    loss = model_loss(w, batch)
    loss.backward()
    for mesh, zero in (
        (Mesh(("dp",), (2,)), 0),
        (Mesh(("dp",), (2,)), 3),
        (Mesh(("tp",), (2,)), 0),
    ):
        stage = make_stage(
            mesh,
            [0, 1],
            zero=zero,
            device_mesh=device_mesh_of(mesh, [0, 1]),
            dtype="bfloat16",
            precision="bf16",
        )
        executor = StageExecutor(stage, StageVariant(2))
        optimizer = build_optimizer(stage.by_name.values(), learning_rate=LEARNING_RATE)
        executor.begin_step(batch)
        for j in range(2):
            executor.forward(j, {})
            executor.backward(j, {}, last=j == 1)
        executor.finish_step()
        found = summed(executor.mean_loss())
        assert relative_error(found, loss.detach()) < 0.03
        for name, parameter in stage.by_name.items():
            gradient = parameter.master.grad
            assert gradient is not None
            assert gradient.dtype == torch.float32
            expected = w[name].grad
            assert expected is not None
            error = relative_error(whole(gradient).double(), expected)
            assert error < 0.1, (name, error)
        before = {n: p.local.clone() for n, p in stage.by_name.items()}
        optimizer.step()
        executor.begin_step(batch)
        executor.forward(0, {})
        after = summed(executor.loss(0))
        executor.backward(0, {}, last=True)
        assert after < found
        assert all(
            p.local.numel() == 0 or not torch.equal(p.local, before[n])
            for n, p in stage.by_name.items()
        )


def test_mixed_precision_keeps_float32_masters_and_computes_in_bfloat16() -> None:
    run_processes(2, _mixed)


def _clip() -> None:
    mesh = Mesh(("dp",), (2,))
    stage = make_stage(mesh, [0, 1], zero=3, device_mesh=device_mesh_of(mesh, [0, 1]))
    executor = StageExecutor(stage, StageVariant(1))
    executor.begin_step(global_batch(1))
    executor.forward(0, {})
    executor.backward(0, {}, last=True)
    executor.finish_step()
    w = {name: torch.nn.Parameter(value) for name, value in weights().items()}
    model_loss(w, global_batch(1)).backward()
    expected = torch.nn.utils.clip_grad_norm_(w.values(), 0.1)
    norm = gradient_norm(stage.by_name.values(), device=torch.device("cpu")).value()
    assert relative_error(norm, expected) < TOLERANCE
    scale_gradients(published_gradients(stage.by_name.values()), clip_coefficient(norm, 0.1))
    for name, parameter in stage.by_name.items():
        found = whole(parameter.master.grad)
        reference_gradient = w[name].grad
        assert reference_gradient is not None
        assert relative_error(found, reference_gradient) < TOLERANCE, name


def test_clipping_equals_torch_on_the_whole_gradient() -> None:
    run_processes(2, _clip)


def test_microbatches_are_consecutive_rows() -> None:
    spec = TensorSpec((2, 3), "float32")
    batch = torch.arange(18.0).view(6, 3)
    rows = [microbatch_rows("x", batch, spec, j, 3) for j in range(3)]
    assert torch.equal(torch.cat(rows), batch)


def test_a_batch_of_another_size_is_refused() -> None:
    spec = TensorSpec((2, 3), "float32")
    with pytest.raises(UsageError, match="'x' has shape"):
        microbatch_rows("x", torch.zeros(5, 3), spec, 0, 3)
