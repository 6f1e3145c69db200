"""Joining: the group and the device of a process, where GPUs are mocked; a group of the script."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from processes import RankError, run_processes
from torch import Tensor, nn

import autoparallel
from autoparallel.passes.ops.eight_bits import load_torchao
from autoparallel.planner.errors import MachineError
from autoparallel.runtime.launch.membership import check_device, join
from autoparallel.runtime.messages.shared_objects import control_group, gather_values, share_value


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``init_process_group`` is asked for, on a host of as many GPUs as ``count``."""
    found: dict[str, Any] = {"count": 8}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found["count"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.update(device=device))
    monkeypatch.setattr(dist, "is_initialized", lambda: "backend" in found)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **how: found.update(how, backend=backend)
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: found.update(began=True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def test_the_group_of_gpus_is_made_at_once_and_outlasts_the_watchdog(made: dict[str, Any]) -> None:
    device = join("cuda", 3, 100.0)
    assert device == made["device"] == made["device_id"] == torch.device("cuda", 3)
    assert made["backend"] == "nccl"
    assert made["began"]
    assert made["timeout"] == timedelta(seconds=160)
    made["backend"] = "the script's"
    assert join("cuda", 4) == torch.device("cuda", 4)
    assert made["backend"] == "the script's"


def test_a_process_that_sees_one_gpu_takes_it(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made["count"] = 1
    with pytest.raises(MachineError, match="AP411"):
        join("cuda", 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert join("cuda", 3) == torch.device("cuda", 0)


def share() -> tuple[str, list[int]]:
    rank = dist.get_rank()
    assert control_group() is not None
    assert control_group() is control_group()
    return share_value(f"rank {rank}"), gather_values(rank)


def test_objects_travel_beside_a_group_that_carries_none() -> None:
    assert run_processes(2, share, backend="strict") == [("rank 0", [0, 1])] * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def adopt(**how: Any) -> list[float]:
    """The losses of a script that has made its own group, under a plan or alone."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.manual_seed(0)
    batch = torch.randn(8, 8)
    model: Any = Net()
    if how:
        model = autoparallel.parallelize(
            model, example_batch=(batch,), global_batch=8, profile="analytic", **how
        )
    if how.get("parallel", "").startswith("pp") or "allow_idle" in how:
        step = autoparallel.Step(model, build_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
        return [float(step((batch,))) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "parallel", [slow("dp=2,zero=0"), slow("dp=2,zero=2"), "dp=2,zero=3", slow("tp=2"), "pp=2"]
)
def test_a_script_with_a_group_of_gpus_alone_trains_as_ever(parallel: str) -> None:
    expected = run_processes(1, adopt)[0]
    for losses in run_processes(2, _adopt, parallel, backend="strict"):
        assert losses == pytest.approx(expected, rel=1e-5)


def _adopt(parallel: str) -> list[float]:
    return adopt(parallel=parallel)


def idle(is_allowed: bool) -> list[float]:
    return adopt(parallel="dp=1", cluster="cpu:1", allow_idle=is_allowed)


def test_a_plan_that_leaves_processes_idle_is_refused_unless_asked_for() -> None:
    with pytest.raises(RankError, match=r"AP412.*uses only 1 of 2 processes"):
        run_processes(2, idle, False)
    expected = run_processes(1, adopt)[0]
    assert run_processes(2, idle, True)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("device", "capability", "message"),
    [
        ("cpu", None, "type cpu does not compute in fp8"),
        ("cuda", (8, 0), "capability is 8.0, and fp8 needs 8.9"),
        ("cuda", (9, 0), "fp8 needs torchao"),
    ],
)
def test_fp8_needs_a_device_and_torchao(monkeypatch, device, capability, message) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)
    load_torchao.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    with pytest.raises(MachineError, match=message) as caught:
        check_device(torch.device(device), "fp8")
    assert caught.value.code == "AP413"
    assert "bf16" in str(caught.value)
