"""Joining a run (process group, device, checks of the plan) and ending it in order.

``Stop`` ends a run early: after a SIGTERM to any rank, for example of a scheduler that wants its
machines back, all ranks agree on the last step by an all-reduce. Where hosts run ahead of their
devices, it is begun after one step and read after the next, so that no host waits for the others'
devices. A second SIGTERM ends the process at once, as does a SIGTERM after another rank has failed:
torchrun then sends it to all ranks that are left.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.cluster.detect import BFLOAT16_CAPABILITY, available_memory_bytes
from ...passes.memory.stage_memory import host_bytes
from ...passes.ops.eight_bits import load_torchao
from ...passes.ops.nf4 import load_nf4
from ...passes.programs.program import Program
from ...planner.errors import MachineError, PlanError
from ...planner.plan import Plan, Precision
from ...planner.summary import HOST_STATES
from ..messages.device_queue import queue_of
from ..messages.groups import allow_seconds, time_limit
from ..messages.shared_objects import group_for
from ..messages.watchdog import Watchdog, on_termination
from .process import Worker

GLOO_ENDS_SECONDS = 0.1
"""Time to wait, at the end of a process, for gloo's threads to become idle."""

EIGHT_BIT_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability (the L40S's) with hardware for 8-bit matrix products."""


def join_as(worker: Worker, cluster: Cluster) -> torch.device:
    """Join the process group as rank ``worker.rank``, on the kind of device that ``cluster`` has
    for the rank. The worker's watchdog then follows the progress of the device, which is returned.
    Raises as ``join`` does."""
    kind = cluster.device(worker.rank).kind
    device = join(kind, worker.local_rank, worker.watchdog.timeout_seconds, worker.meet)
    worker.watchdog.follow(queue_of(device))
    return device


def join(
    device_type: str,
    local_rank: int,
    timeout_seconds: float | None = None,
    meet: Callable[[], Mapping[str, Any]] = dict,
) -> torch.device:
    """Join the process group, unless it exists already; return this rank's device.

    ``meet`` returns arguments of ``init_process_group``; if it returns none, the environment
    variables of torchrun apply.

    Collectives time out a minute after ``timeout_seconds``, or later in a group that existed
    already: the watchdog, which can name the missing rank, is to end the process first. Without
    ``timeout_seconds`` torch's limit holds. Raises MachineError (AP411) where this machine has no
    GPU ``local_rank``.
    """
    timeout = time_limit(timeout_seconds)
    if timeout_seconds is not None:
        allow_seconds(timeout_seconds)
    if device_type != "cuda":
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout, **meet())
        _end_after_gloo()
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        local_rank = 0  # each process sees its own GPU only, as some schedulers have it
    check_gpu(local_rank)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        # With a device all ranks make the communicator now; objects go by ``control_group``.
        dist.init_process_group("nccl", timeout=timeout, device_id=device, **meet())
    # A script's group may make its communicator only at the first operation, for which all ranks
    # are needed; a message between two ranks would not do.
    dist.all_reduce(torch.zeros(1, device=device))
    return device


def check_gpu(index: int) -> None:
    """Raise MachineError (AP411) if this machine has no GPU of this index."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise MachineError(
            "AP411",
            f"the plan needs GPU {index} of this machine, which has {count}",
            fix="plan for this machine: --cluster local; or start the plan where its devices are: "
            "autoparallel launch",
        )


@cache
def _end_after_gloo() -> None:
    """Delay the end of the process until gloo's threads are idle.

    After a collective a thread of gloo still frees its tensors, for which it takes the lock of the
    interpreter. While the interpreter ends, that aborts the process
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit.register(time.sleep, GLOO_ENDS_SECONDS)


def check_none_idle(plan: Plan) -> None:
    """Raise MachineError AP412 if the plan leaves some of the processes without work."""
    needed, found = num_processes(plan), dist.get_world_size()
    if found > needed:
        raise MachineError(
            "AP412",
            f"the plan uses only {needed} of {found} processes",
            why=f"it is for the cluster {plan.cluster.name}; ranks from {needed} on would idle",
            fix="remove the cluster option to plan for all, start fewer processes, or pass "
            "allow_idle=True",
        )


def num_processes(plan: Plan) -> int:
    """Return the number of processes that the plan needs."""
    return 1 + max(rank for stage in plan.stages for rank in stage.devices)


def check_device(device: torch.device, precision: Precision) -> None:
    """Raise MachineError AP413 for bf16 if ``device`` is a GPU that only emulates it, for fp8 if
    ``device`` has no hardware for it or torchao is not installed."""
    if precision == "fp8":
        _check_eight_bits(device)
        load_torchao(emulate=False)
    if device.type != "cuda" or precision != "bf16":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < BFLOAT16_CAPABILITY:
        major, minor = capability
        raise MachineError(
            "AP413",
            f"{torch.cuda.get_device_name(device)} does not compute in bf16",
            why=f"its compute capability is {major}.{minor}, and bf16 needs 8.0",
            fix="plan with --precision fp16 or fp32",
        )


def check_host_memory(program: Program, plan: Plan, available_bytes: int) -> None:
    """Raise MachineError AP420 where the states that the plan offloads to this host, those of all
    its ranks, need more than ``available_bytes``."""
    needed = host_bytes(plan, program.graph, program.blocks)
    own = needed.get(plan.cluster.host_of[dist.get_rank()], 0.0)
    if own > available_bytes:
        raise MachineError(
            "AP420",
            f"{HOST_STATES[plan.offload]} need {own / 1e9:.1f} GB of this host's memory, "
            f"{available_bytes / 1e9:.1f} GB are free",
            why="the plan offloads them",
            fix="free memory, plan with more devices, or plan with --deny offload",
        )


def _check_eight_bits(device: torch.device) -> None:
    """Raise MachineError AP413 if ``device`` has no hardware for 8-bit matrix products."""
    name, why = f"a device of type {device.type}", "it has no units for 8-bit products"
    if device.type == "cuda":
        major, minor = capability = torch.cuda.get_device_capability(device)
        if capability >= EIGHT_BIT_CAPABILITY:
            return
        name = torch.cuda.get_device_name(device)
        why = f"its compute capability is {major}.{minor}, and fp8 needs 8.9"
    raise MachineError(
        "AP413", f"{name} does not compute in fp8", why=why, fix="plan with --precision bf16"
    )


def check_plan(program: Program, plan: Plan, device: torch.device) -> None:
    """Raise an error if ``plan`` was made for another model than ``program``, if there are too few
    processes or too little host memory, or if ``device`` has no hardware for the plan's
    precision."""
    check_device(device, plan.model.precision)
    check_model(program, plan)
    if any(node.spec.stored for node in program.graph.parameters):
        load_nf4()
    needed = num_processes(plan)
    if dist.get_world_size() < needed:
        raise MachineError(
            "AP410",
            f"the plan needs {needed} processes, but there are {dist.get_world_size()}",
            fix=f"start {needed} processes, or plan for these machines",
        )
    if plan.offload != "none":
        check_host_memory(program, plan, available_memory_bytes())


def check_model(program: Program, plan: Plan) -> None:
    """Raise PlanError AP550 if ``plan`` was made for another model than ``program``."""
    found = program.graph.fingerprint
    if plan.model.fingerprint != found:
        raise PlanError(
            "AP550",
            "the plan was made for another model",
            why=f"the plan's model is {plan.model.fingerprint}, this one {found}",
            where=plan.model.target,
            fix="the model file or its settings changed: plan again",
        )


SAME_SECONDS = 2.0
"""Time within which several SIGTERMs count as one: a scheduler sends one to every process of a job,
and torchrun another to its ranks."""


class Stop:
    """Context manager around a run's steps that, after a SIGTERM, lets all ranks end after the same
    step. A thread calls ``ask`` at each SIGTERM; the main thread of every rank calls ``is_agreed``
    after each step."""

    def __init__(self, watchdog: Watchdog, *, is_behind: bool) -> None:
        """Make the context. ``is_behind`` says that hosts run ahead of their devices, so that
        ``is_agreed`` must not wait for the vote of the current step."""
        self._watchdog, self._is_behind = watchdog, is_behind
        self._asked_seconds: float | None = None
        self._vote: tuple[Tensor, dist.Work | None] | None = None
        self._termination = on_termination(watchdog.terminate)

    def __enter__(self) -> Stop:
        self._watchdog.before_ending = self.ask
        self._termination.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watchdog.before_ending = None
        self._termination.__exit__(*error)

    def ask(self) -> bool:
        """Record a SIGTERM; return whether the process may finish its step (False at a repeated
        SIGTERM)."""
        now = time.monotonic()
        if self._asked_seconds is None:
            self._asked_seconds = now
        return now - self._asked_seconds < SAME_SECONDS

    def is_agreed(self) -> bool:
        """Return, the same on all ranks, whether the run ends after this step: some rank has
        received a SIGTERM. If devices are behind their hosts, the vote of the step before counts.
        Collective over all ranks."""
        mine = torch.tensor(int(self._asked_seconds is not None))
        if not dist.is_initialized():
            return bool(mine)
        work = dist.all_reduce(mine, group=group_for(mine), async_op=True)
        before, self._vote = self._vote, (mine, work)
        if not self._is_behind:
            before, self._vote = self._vote, None
        if before is None:
            return False
        if before[1] is not None:
            before[1].wait()
        return bool(before[0])
