"""What each rank does: train with parameter servers for so long, with a clock of its own.

In: a program, a plan as text, how fast each rank is. Out, on rank 0: when each worker ended its
iterations, and for convergence the weights that rank 0 had. A run ends at a moment, wherever the
workers are: without a common number of iterations no worker has to wait for another at the end.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import loads
from autoparallel.planning.capture import record_target
from autoparallel.runtime.servers.channels import PeerChannel, Reply, Request
from autoparallel.runtime.servers.server_trainer import ServerTrainer
from autoparallel.runtime.servers.server_worker import ServerWorker
from autoparallel.target.target import Target
from benchmarks.parameter_servers.classifier import points_of
from benchmarks.regret import device
from benchmarks.regret.device import EmulatedDevice

CPU = torch.device("cpu")
LEAD_SECONDS = 0.2
"""How far ahead a common start is agreed on."""
PROBE_ELEMENTS, PROBES = 1 << 20, 15
HELD_OUT, HELD_OUT_SEED, CURVE_POINTS = 4096, 5, 60


@dataclass(frozen=True)
class Emulation:
    """A run of ``plan`` on emulated devices of so many FLOP/s and bytes/s, rank by rank."""

    program: Program
    target: Target
    plan: str
    flops_per_second: tuple[float, ...]
    bytes_per_second: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Training:
    """A run of real training, whose workers sleep in each iteration.

    ``kind`` "one slow": worker 1 always takes ``slowness`` times ``sleep_seconds``; "in turns":
    in each iteration one worker drawn by lot does.
    """

    program: Program
    target: Target
    plan: str
    rate: float
    seed: int
    kind: str
    sleep_seconds: float
    slowness: float
    seconds: float

    def sleep_of(self, worker: int, iteration: int, num_workers: int) -> float:
        slow = 1
        if self.kind == "in turns":
            slow = random.Random(1000 * self.seed + iteration).randrange(num_workers)
        return self.sleep_seconds * (self.slowness if worker == slow else 1.0)


def measure_links(rank: int) -> tuple[float, float]:
    """Seconds of latency and bytes per second of a push from the first rank to the last one.

    A push is three messages: the request, the gradient and the acknowledgement.
    """
    last = dist.get_world_size() - 1
    found = (0.0, 1.0)
    if rank == 0:
        channel = PeerChannel("probe", asks=True)
        small = statistics.median(_push_seconds(channel, 1) for _ in range(PROBES))
        large = statistics.median(_push_seconds(channel, PROBE_ELEMENTS) for _ in range(PROBES))
        found = (small / 2, PROBE_ELEMENTS * 4 / (large - small))
    elif rank == last:
        channel = PeerChannel("probe", asks=False)
        for elements in (1, PROBE_ELEMENTS):
            for _ in range(PROBES):
                channel.next_request()
                channel.receive(torch.empty(elements))
                channel.answer(Reply(0))
    dist.barrier()
    return found


def _push_seconds(channel: PeerChannel, elements: int) -> float:
    start = time.monotonic()
    channel.call(Request(0), torch.zeros(elements), None)
    return time.monotonic() - start


def emulate(rank: int, run: Emulation) -> list[list[float]]:
    """When each worker ended each iteration, from the common start."""
    device.ZEROED_BYTES = 1 << 62  # gradients of zeros: servers keep finite weights
    trainer = _trainer(run.program, run.target, run.plan)
    emulated = EmulatedDevice(run.flops_per_second[rank], run.bytes_per_second[rank])
    batch = random_batch(
        run.program.graph.with_batch_size(loads(run.plan).model.global_batch), seed=0
    )
    if trainer.worker is not None:
        _push_when_computed(trainer.worker, emulated)

    def step(iteration: int) -> None:
        with emulated:
            trainer.step(batch)
            emulated.synchronize()

    return _shared(_until(run.seconds, step if trainer.worker is not None else None))


def _push_when_computed(worker: ServerWorker, emulated: EmulatedDevice) -> None:
    """A push waits for the device, as one from a GPU would."""
    push = worker._push

    def push_when_computed(block: int) -> None:
        emulated.synchronize()
        push(block)

    worker._push = push_when_computed  # type: ignore[method-assign]


def train(rank: int, run: Training) -> tuple[list[list[float]], list[tuple[float, float]]]:
    """When each worker ended each iteration; and times with the held-out loss of the weights that
    the first worker had then, which is computed after the run."""
    trainer = _trainer(run.program, run.target, run.plan, rate=run.rate, seed=run.seed)
    plan, worker = loads(run.plan), trainer.worker
    assert plan.servers is not None
    if worker is None:
        return _shared(_until(run.seconds, None)), []
    count, executor = len(plan.servers.workers), worker.executor
    index, forward = worker.index, executor.forward
    snapshots: list[tuple[float, Any]] = []
    start = 0.0

    def slow_forward(unit: int, received: Mapping[str, Tensor]) -> Any:
        nonlocal start
        start = start or time.monotonic()
        found = forward(unit, received)  # with its waits for weights
        if index == 0:
            weights = {n: p.local.detach().clone() for n, p in executor.parameters.items()}
            snapshots.append((time.monotonic() - start, weights))
        time.sleep(run.sleep_of(index, worker._clock, count))
        return found

    executor.forward = slow_forward  # type: ignore[method-assign]

    def step(iteration: int) -> None:
        trainer.step(points_of(10_000 * (run.seed + 1) + iteration, plan.model.global_batch))

    times = _shared(_until(run.seconds, step))
    return times, _losses(run.target, snapshots)


def _losses(target: Target, snapshots: list[tuple[float, Any]]) -> list[tuple[float, float]]:
    model, held_out = target.build_model(), points_of(HELD_OUT_SEED, HELD_OUT)
    found = []
    with torch.no_grad():
        for seconds, weights in snapshots[:: max(1, len(snapshots) // CURVE_POINTS)]:
            model.load_state_dict(weights)
            found.append((round(seconds, 3), round(float(model(**held_out)), 4)))
    return found


def _trainer(
    program: Program, target: Target, plan: str, *, rate: float = 1e-3, seed: int = 0
) -> ServerTrainer:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters), lr=rate)

    return ServerTrainer(program, loads(plan), record_target(target, seed), device=CPU, build=build)


def _until(seconds: float, step: Callable[[int], None] | None) -> list[float]:
    """Steps in a thread that is left where it is after ``seconds``; when each one ended."""
    moment = torch.tensor(time.monotonic() + LEAD_SECONDS, dtype=torch.float64)
    dist.broadcast(moment, src=0)
    start = float(moment)
    ended: list[float] = []
    failure: list[str] = []

    def run() -> None:
        assert step is not None
        try:
            while time.monotonic() < start + seconds:
                step(len(ended))
                ended.append(time.monotonic() - start)
        except BaseException:  # noqa: BLE001  # the main thread raises it
            failure.append(traceback.format_exc())

    time.sleep(max(0.0, start - time.monotonic()))
    if step is not None:
        threading.Thread(target=run, daemon=True).start()
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    if failure:
        raise RuntimeError(failure[0])
    return [each for each in tuple(ended) if each <= seconds]


def _shared(times: Sequence[float]) -> list[list[float]]:
    """The lists of all workers, in the order of the ranks; those of ranks without one left out."""
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, list(times))
    return [each for each in every if each]
