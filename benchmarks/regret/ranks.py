"""Processes in the namespaces of an emulated network: what each rank measures there."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from clusters import BYTES_PER_SECOND, FLOPS_PER_SECOND, Emulated
from device import EmulatedDevice
from links import Place

from autoparallel.cost_model.collectives.collectives import group_of
from autoparallel.cost_model.profile.records import Transfer
from autoparallel.cost_model.profile.transfers import level_of
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import loads
from autoparallel.planning.capture import capture_target, record_target
from autoparallel.profiling.work_list import LinkTask
from autoparallel.runtime.profile.links import (
    COLLECTIVES,
    STATES,
    Links,
    Meshes,
    measure_links,
    neighbours,
)
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

CLONE_NEWNET = 0x40000000
PORT = 29500
CASE_SECONDS = 0.1
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
STEPS = 2
COMPARED_STEPS = 4
LAYERS, ROUNDS = 20, 15
MESSAGES_OF_MICROBATCH = 4
"""A rank in the middle receives and sends activations, then gradients."""
CPU = torch.device("cpu")


class Measured(NamedTuple):
    """Seconds of each step, the slowest rank's, and of a step's compute on the busiest rank."""

    seconds: list[float]
    busy_seconds: float


Job = tuple[str, dict[str, Any], int, int | None]
"""A target, its settings, the global batch and the length of sequences."""


def on_ranks(places: Sequence[Place], function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function(rank, *arguments)`` returns on rank 0; it runs on all ranks.

    Raises RuntimeError with the traceback of the first rank that fails.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    ranks = [
        context.Process(target=_enter, args=(rank, places, theirs, function, arguments))
        for rank in range(len(places))
    ]
    for process in ranks:
        process.start()
    try:
        while not ours.poll(0.1):
            if all(not process.is_alive() for process in ranks):
                raise RuntimeError("the ranks ended without a result")
        failure, result = ours.recv()
    finally:
        for process in ranks:
            process.join(2.0)
            process.kill()
    if failure:
        raise RuntimeError(failure)
    return result


def _enter(
    rank: int, places: Sequence[Place], pipe: Any, function: Callable[..., Any], arguments: Any
) -> None:
    """A rank's process: it enters its namespace and joins the others."""
    place = places[rank]
    with open(f"/run/netns/{place.space}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(places)),
        LOCAL_RANK=str(rank),
        MASTER_ADDR=places[0].address,
        MASTER_PORT=str(PORT),
        GLOO_SOCKET_IFNAME=place.interface,
    )
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        result = function(rank, *arguments)
        if rank == 0:
            pipe.send(("", result))
    except Exception:  # noqa: BLE001  # the parent raises it
        pipe.send((f"rank {rank}: {traceback.format_exc()}", None))
    time.sleep(0.2)
    os._exit(0)


def measure_issue(rank: int) -> float:
    """Seconds in which the host issues an op, forward or backward, while all ranks do."""
    weights = [torch.ones(64, 64, requires_grad=True) for _ in range(LAYERS)]
    x = torch.ones(64, 64, requires_grad=True)
    device = EmulatedDevice(1e15, 1e15)
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        before, start = device.num_kernels, time.monotonic()
        with device:
            y = x
            for weight in weights:
                y = torch.relu(y @ weight)
            y.backward(torch.ones_like(y))
        spent = time.monotonic() - start
        seconds.append(spent / (device.num_kernels - before))
    mean = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def measure_network(rank: int, emulated: Emulated) -> list[Transfer]:
    """Times of all collectives and messages, by the profiler's own code."""
    cluster, found = emulated.cluster(), []
    meshes = Meshes(CPU)
    sizes = [host.num_devices for host in cluster.hosts]
    todo = [
        (kind, partition) for partition in emulated.partitions() for kind in (*COLLECTIVES, *STATES)
    ]
    todo.append(("p2p", neighbours(sizes, between_hosts=False)))
    if len(sizes) > 1:
        between = neighbours(sizes, between_hosts=True)
        todo += [("p2p", between[:num_pairs]) for num_pairs in {1, 2, len(between)}]
    with EmulatedDevice(FLOPS_PER_SECOND, BYTES_PER_SECOND):
        for kind, partition in todo:
            group = group_of(cluster, partition[0])
            links = Links(kind, partition, SIZES)
            place = LinkTask(links, level_of(group), group.library, group.num_hosts, True)
            times = measure_links(
                links, device=CPU, case_seconds=CASE_SECONDS, until=lambda: False, meshes=meshes
            )
            found += [place.transfer(each) for each in times]
    return found


def measure_message(rank: int, emulated: Emulated, job: Job, plan: str) -> float:
    """Seconds that the host of a rank in the middle of a pipeline takes for one message.

    ``plan`` is a pipeline of one stage per rank; its compute takes no time here. The result is the
    seconds of a step without those to issue the ops, divided by the number of messages of a rank.
    """
    device = EmulatedDevice(1e15, 1e15)
    work = _Work.of(job)
    trainer = work.trainer(plan)
    seconds, num_kernels = [], 0
    for _ in range(ROUNDS):
        before = device.num_kernels
        seconds.append(_step(trainer, work.batch, device))
        num_kernels = device.num_kernels - before
    trainer.steps.finish()
    issued = torch.tensor(num_kernels * emulated.issue_seconds, dtype=torch.float64)
    dist.all_reduce(issued)
    host = statistics.median(seconds) - float(issued) / dist.get_world_size()
    return max(0.0, host / loads(plan).num_microbatches / MESSAGES_OF_MICROBATCH)


def measure_plans(rank: int, emulated: Emulated, job: Job, plans: Sequence[str]) -> list[Measured]:
    """What each plan's steps took."""
    speed = emulated.speeds[rank * len(emulated.speeds) // dist.get_world_size()]
    work = _Work.of(job)
    found: list[Measured] = []
    for text in plans:
        device = EmulatedDevice(FLOPS_PER_SECOND * speed, BYTES_PER_SECOND * speed)
        trainer = work.trainer(text)
        seconds = [_step(trainer, work.batch, device) for _ in range(STEPS + 1)]
        trainer.steps.finish()
        busy = torch.tensor(device.busy_seconds / (STEPS + 1), dtype=torch.float64)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        found.append(Measured(seconds[1:], float(busy)))
    return found


@dataclass(frozen=True)
class _Work:
    """A job on a rank, captured once for all of its plans."""

    target: Target
    program: Program
    batch: Any

    @staticmethod
    def of(job: Job) -> _Work:
        name, settings, global_batch, seq = job
        target = load_target(name, settings)
        program = capture_target(target, PlanOptions(global_batch=global_batch, seq=seq))
        batch = random_batch(program.graph.with_batch_size(global_batch), seed=0)
        return _Work(target, program, batch)

    def trainer(self, plan: str) -> Trainer:
        """The trainer of a plan, given as text."""
        trainer = Trainer(self.program, loads(plan), record_target(self.target), device=CPU)
        # Of the first steps the host compares all ranks' batches, which takes its cores.
        trainer.runner.batches._check._num_steps = COMPARED_STEPS
        return trainer


def _step(trainer: Trainer, batch: Any, device: EmulatedDevice) -> float:
    """Seconds of a step, the slowest rank's."""
    dist.barrier()
    start = time.monotonic()
    with device:
        trainer.step(batch)
        device.synchronize()
    spent = torch.tensor(time.monotonic() - start, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)
