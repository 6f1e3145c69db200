"""Becoming a process of a run: its process group and device, and whether a plan fits it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..passes.program import Program
from ..planner.errors import MachineError, PlanError
from ..planner.plan import Plan


def join(device_type: str, local_rank: int) -> torch.device:
    """Joins the process group of the environment, unless the caller has; this rank's device.

    Raises MachineError (AP411) where the machine lacks that device.
    """
    if device_type != "cuda":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise MachineError(
            "AP411",
            f"the plan needs GPU {local_rank} of this machine, which has {count}",
            fix="plan for the devices at hand: --cluster local",
        )
    torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl")
    return torch.device("cuda", local_rank)


def check_plan(program: Program, plan: Plan) -> None:
    """Raises where ``plan`` is not of this model, or there are too few processes."""
    found = program.graph.fingerprint
    if plan.model.fingerprint != found:
        raise PlanError(
            "AP550",
            "the plan was made for another model",
            why=f"the plan's model is {plan.model.fingerprint}, this one {found}",
            where=plan.model.target,
            fix="the model file or its settings changed: plan again",
        )
    needed = 1 + max(rank for stage in plan.stages for rank in stage.devices)
    if dist.get_world_size() < needed:
        raise MachineError(
            "AP410",
            f"the plan needs {needed} processes, but there are {dist.get_world_size()}",
            fix=f"start {needed} processes, or plan for the machines at hand",
        )
