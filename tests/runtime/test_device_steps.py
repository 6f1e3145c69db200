"""Steps of plans on one device, a GPU where there is one, held to the plain model on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from marks import slow
from one_device import build_optimizer
from processes import run_processes
from test_verification import batches, captured, planned, reference
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.planner.plan_file import loads
from autoparallel.runtime.launch.membership import join
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.messages.shared_objects import gather_on_first, share_value
from autoparallel.runtime.profile.links import Links, Meshes, measure_links
from autoparallel.runtime.profile.ops import measure_updates
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import Verification, verify

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
PLANS = (
    "dp=1",
    "dp=1,microbatches=4,recompute=full",
    "dp=1,zero=3,microbatches=2",
    "dp=1,microbatches=2,offload=optimizer",
    "dp=1,microbatches=2,offload=gradients",
)


def verify_steps(device_type: str, model: str, texts: list[str]) -> list[Verification]:
    """Two steps of each plan on a device, against the plain model on the CPU, in float64."""
    device, found = join(device_type, 0), []
    for text in texts:
        plan = loads(text, "test")
        plan = replace(plan, model=replace(plan.model, precision="fp64"))
        deferred, program = captured(model, "fp64")
        trainer = Trainer(program, plan, deferred, device=device, build=build_optimizer)
        parameters = trainer.model.all_parameters()
        assert {each.held.device.type for each in parameters} == {device_type}
        masters = "cpu" if plan.offload != "none" else device_type
        assert {each.local.device.type for each in parameters} == {masters}
        found.append(verify(trainer, batches(model), lambda: reference(model)))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [slow("gpt2"), "llama", slow("dropout")])
def test_steps_equal_those_of_the_plain_model_on_a_cpu(model: str, device: str) -> None:
    """GPT-2 with and Llama without dropout; a GPT that drops everywhere, in attention too."""
    texts = [planned(model, parallel) for parallel in PLANS]
    found = run_processes(1, verify_steps, device, model, texts, backend=BACKENDS[device])[0]
    for parallel, verification in zip(PLANS, found, strict=True):
        assert verification.passed, (parallel, verification.failures[:3])
        assert {each.quantity for each in verification.differences} == {
            "loss",
            "gradient",
            "weight",
        }


def talk_alone(device_type: str) -> dict[str, object]:
    """What collectives of one rank give, and the times of measuring them."""
    device = join(device_type, 0)
    communicator = ProcessCommunicator(DeviceMesh(device.type, [[0]], mesh_dim_names=("a", "b")))
    x = torch.arange(8.0, device=device).reshape(2, 4)
    own = {
        "all_reduce": communicator.all_reduce(x, 0),
        "max": communicator.all_reduce(x, 1, "max"),
        "all_gather": communicator.all_gather(x, 1, 0),
        "reduce_scatter": communicator.reduce_scatter(x, 0, 1),
        "all_to_all": communicator.all_to_all(x, 1, 0, 1),
    }
    total = x.clone()
    dist.all_reduce(total)
    dist.broadcast(total, 0)
    meshes = Meshes(device)
    times = [
        each.seconds
        for kind in ("all_reduce", "broadcast", "zero_gather", "zero_scatter")
        for each in measure_links(
            Links(kind, ((0,),), (1 << 12, 1 << 16)),
            device=device,
            case_seconds=0.01,
            until=lambda: False,
            meshes=meshes,
        )
    ]
    meshes.close()
    updates = measure_updates(
        "adamw", (1 << 10, 1 << 16), device=device, case_seconds=0.01, until=lambda: False
    )
    return {
        "values": {name: value.tolist() for name, value in {**own, "world": total}.items()},
        "device": {value.device.type for value in own.values()},
        "times": times,
        "updates": [each.seconds for each in updates],
        "shared": (share_value("text"), gather_on_first(3)),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_one_rank_talks_and_is_measured(device: str) -> None:
    (found,) = run_processes(1, talk_alone, device, backend=BACKENDS[device])
    expected = torch.arange(8.0).reshape(2, 4).tolist()
    assert all(value == expected for value in found["values"].values()), found["values"]
    assert len(found["values"]) == 6
    assert found["device"] == {device}
    assert len(found["times"]) == 8
    assert all(seconds > 0 for seconds in (*found["times"], *found["updates"]))
    assert len(found["updates"]) == 2
    assert found["shared"] == ("text", [3])
