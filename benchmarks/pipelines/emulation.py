"""One rank of the emulated pipeline: stages that sleep, on the runtime's real interpreter.

In: a ``Job``. Out, printed by rank 0 as JSON: the measured inputs of the simulator, and for
each schedule the measured and the simulated step and bubble.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.cost_model.simulator.actions import BACKWARD, COMPUTE, RECEIVES, SENDS, Schedule
from autoparallel.cost_model.simulator.simulator import StageCosts, simulate
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.passes.local.stage_cut import Boundary
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Mesh
from autoparallel.planner.schedules.schedules import build_schedule, find_schedule
from autoparallel.runtime.messages.exchange import Exchange
from autoparallel.runtime.messages.local_transfer import LocalTransfer, split_boundaries
from autoparallel.runtime.step.pipeline import ActionTiming, Hooks, PipelineRunner

CPU = torch.device("cpu")
LEAD_SECONDS = 0.02
"""How far ahead a common start is agreed on."""
NUM_CHUNKS = 2
ONE = Mesh(("dp",), (1,))


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: schedules, micro-batches, bytes of a message, repetitions, compute."""

    schedules: tuple[str, ...]
    num_microbatches: int
    num_bytes: int
    rounds: int
    forward_seconds: float
    backward_seconds: float

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "schedules": tuple(fields["schedules"])})


@dataclass(frozen=True, slots=True)
class Place:
    """A stage on one rank."""

    devices: tuple[int, ...]
    mesh: Mesh = ONE


class Step(NamedTuple):
    """A measured step: what all ranks did, and how long they were in it, ``busy_seconds``."""

    seconds: float
    busy_seconds: float
    num_computes: int
    num_sends: int


class SleepingStage:
    """A stage whose forward and backward take their modelled time and do nothing."""

    def __init__(self, job: Job, share: float, sends: str, receives: str) -> None:
        """``share`` of the job's seconds; ``sends`` and ``receives`` are keys, empty for none."""
        self._job, self._share = job, share
        self._sends, self._receives = sends, receives
        self._value = torch.ones(job.num_bytes // 4)

    def begin_step(self, batch: Mapping[str, Tensor]) -> None:
        return None

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        time.sleep(self._job.forward_seconds * self._share)
        return {self._sends: self._value} if self._sends else {}

    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], *, last: bool
    ) -> Mapping[str, Tensor]:
        time.sleep(self._job.backward_seconds * self._share)
        return {self._receives: self._value} if self._receives else {}

    def backward_inputs(
        self, microbatch: int, gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        time.sleep(self._job.backward_seconds * self._share / 2)
        return {self._receives: self._value} if self._receives else {}

    def backward_weights(self, microbatch: int, *, last: bool) -> None:
        time.sleep(self._job.backward_seconds * self._share / 2)

    def loss(self, microbatch: int) -> Tensor | None:
        return None

    def finish_step(self) -> None:
        return None


class _Silent(Exchange):
    """An exchange that shares no loss: each rank runs alone."""

    def share_loss(self, part: Tensor | None, stages: Sequence[int] = ()) -> Tensor:
        return torch.zeros(())


def run_rank(job: Job) -> None:
    """Measures on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows: dict[str, Any] = {}
    for name in job.schedules:
        try:
            rows[name] = measure_schedule(
                job, schedule_of(name, dist.get_world_size(), job.num_microbatches)
            )
        except AutoparallelError as error:
            rows[name] = {"error": error.what}
    if dist.get_rank() == 0:
        print(json.dumps({"job": asdict(job), "schedules": rows}))
    dist.barrier()
    dist.destroy_process_group()


def schedule_of(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule on so many ranks, with two stages on each where it can have several."""
    chunks = min(NUM_CHUNKS, find_schedule(name).chunks[1])
    return build_schedule(name, num_ranks * chunks, num_microbatches, num_chunks=chunks)


def measure_inputs(job: Job, schedule: Schedule) -> dict[str, float]:
    """What a schedule is simulated from, measured on all ranks: the median, but of the calls."""
    one, four = ([messages(job, count) for _ in range(9)] for count in (1, 4))
    message = statistics.median(one)
    occupied = (statistics.median(four) - message) / 3
    send, post = calls(job)
    return {
        **alone(job, schedule),
        "message_seconds": message,
        "occupied_seconds": occupied,
        "send_call_seconds": send,
        "receive_call_seconds": post,
        "send_latency_seconds": max(0.0, message - occupied),
    }


def alone(job: Job, schedule: Schedule) -> dict[str, float]:
    """Seconds of one stage's compute: in the interpreter as in the schedule, without messages.

    The backward is whole, or its two halves together, as the schedule has it.
    """
    places = (Place((dist.get_rank(),)),)
    share = dist.get_world_size() / schedule.num_stages
    seconds: dict[str, float] = {}
    for name in ("1f1b", "zb-h1"):
        own = build_schedule(name, 1, job.num_microbatches)
        runner = PipelineRunner(
            own,
            {0: SleepingStage(job, share, "", "")},
            _Silent([[]], schedule=own, stages=places, rank=dist.get_rank(), device=CPU),
            hooks=Hooks(clock=time.monotonic),
        )
        runner.step({})
        for kind in {t.action.kind for t in runner.timings} & COMPUTE:
            spent = [
                t.end_seconds - t.ready_seconds for t in runner.timings if t.action.kind == kind
            ]
            seconds[kind] = statistics.median(spent)
    whole = any(action.kind == BACKWARD for row in schedule.table for action in row)
    backward = seconds["B"] if whole else seconds["I"] + seconds["W"]
    return {
        "forward_seconds": shared(seconds["F"]),
        "backward_seconds": shared(backward),
        "weight_backward_seconds": shared(seconds["W"]),
    }


def messages(job: Job, count: int) -> float:
    """``count`` messages from rank 0 to 1: from the first send to the last arrival."""
    places = tuple(Place((rank,)) for rank in range(2))
    rank = dist.get_rank()
    came = 0.0
    exchange = Exchange(
        [chain_boundaries(2, job)],
        schedule=build_schedule("gpipe", 2, count),
        stages=places,
        rank=rank,
        device=CPU,
    )
    value = torch.ones(job.num_bytes // 4)
    if rank == 1:
        for m in range(count):
            exchange.post("forward", 1, m)
    start = start_together()
    if rank == 0:
        for m in range(count):
            exchange.send("forward", 0, m, {"h0": value})
        exchange.finish()
    if rank == 1:
        for m in range(count):
            exchange.receive("forward", 1, m)
        came = time.monotonic() - start
    return shared(came)


def calls(job: Job) -> tuple[float, float]:
    """Seconds of the call that sends a message and of the one that posts a receive, on average.

    In steps of 1F1B with a stage on every rank: beside other calls and with compute in between.
    Right after each other, or with two ranks, they take another time.
    """
    schedule = build_schedule("1f1b", dist.get_world_size(), job.num_microbatches)
    timings = [t for _ in range(3) for t in run_once(job, schedule, 1.0)[1]]
    found = []
    for kinds in (SENDS, RECEIVES):
        own = [t.end_seconds - t.start_seconds for t in timings if t.action.kind in kinds]
        total = torch.tensor([sum(own), len(own)], dtype=torch.float64)
        dist.all_reduce(total)
        found.append(float(total[0] / total[1]))
    return found[0], found[1]


def measure_schedule(job: Job, schedule: Schedule) -> dict[str, Any]:
    """The median step of a schedule, and what the simulator makes of inputs measured just before.

    The bubble is what a step has above the compute alone, in either.
    """
    inputs = measure_inputs(job, schedule)
    share = dist.get_world_size() / schedule.num_stages
    rounds = [run_step(job, schedule, share) for _ in range(job.rounds + 1)][1:]
    timeline, ideal = simulated(schedule, inputs), simulated(schedule, inputs, 0)
    computed = timeline.step_seconds * (1 - timeline.bubble_fraction)
    step = statistics.median(each.seconds for each in rounds)
    busy = statistics.median(each.busy_seconds for each in rounds)
    return {
        "inputs": inputs,
        "step_seconds": step,
        "bubble": 1 - computed / step,
        "late": busy / dist.get_world_size() / computed,
        "steps": [each.seconds for each in rounds],
        "num_computes": rounds[-1].num_computes,
        "num_sends": rounds[-1].num_sends,
        "ideal_seconds": ideal.step_seconds,
        "simulated_seconds": timeline.step_seconds,
        "simulated_bubble": timeline.bubble_fraction,
    }


def simulated(schedule: Schedule, inputs: Mapping[str, float], messages: int = 1) -> Timeline:
    """The step from the measured inputs; with ``messages`` 0 as if they took no time."""
    stages = schedule.num_stages
    compute = {
        name: (inputs[name],) * stages
        for name in ("forward_seconds", "backward_seconds", "weight_backward_seconds")
    }
    ways = {
        name: (inputs[name] * messages,) * (stages - 1)
        for name in ("send_latency_seconds", "send_call_seconds", "receive_call_seconds")
    }
    whole = (inputs["message_seconds"] * messages,) * (stages - 1)
    return simulate(schedule, StageCosts(**compute, **ways, send_seconds=whole))


def run_step(job: Job, schedule: Schedule, share: float) -> Step:
    """One step of all ranks from a common start."""
    late, timings = run_once(job, schedule, share)
    computes = [t for t in timings if t.action.kind in COMPUTE]
    step = shared(late + max(t.end_seconds for t in computes))
    sends = sum(t.action.kind in SENDS for t in timings)
    busy = sum(t.end_seconds - t.ready_seconds for t in computes)
    total = torch.tensor([busy, len(computes), sends], dtype=torch.float64)
    dist.all_reduce(total)
    busy, num_computes, num_sends = total.tolist()
    return Step(step, busy, int(num_computes), int(num_sends))


def run_once(job: Job, schedule: Schedule, share: float) -> tuple[float, Sequence[ActionTiming]]:
    """A step of the first ranks from a common start: how late this rank began, what it did."""
    rank, stages = dist.get_rank(), schedule.num_stages
    places = tuple(Place((owner,)) for owner in schedule.stage_rank)
    sent, handed = split_boundaries(chain_boundaries(stages, job), places)
    executors = {
        stage: SleepingStage(
            job,
            share,
            f"h{stage}" if stage + 1 < stages else "",
            f"h{stage - 1}" if stage else "",
        )
        for stage, owner in enumerate(schedule.stage_rank)
        if owner == rank
    }
    runner = PipelineRunner(
        schedule,
        executors,
        Exchange([sent], schedule=schedule, stages=places, rank=rank, device=CPU),
        handover=LocalTransfer(handed, stages=places, rank=rank, device=CPU),
        hooks=Hooks(clock=time.monotonic),
    )
    start = start_together()
    late = time.monotonic() - start
    runner.step({})
    return late, runner.timings


def chain_boundaries(stages: int, job: Job) -> list[Boundary]:
    """``h0`` from stage 0 to 1 and so on, whole on every rank."""
    spec = TensorSpec((job.num_bytes // 4,), "float32", requires_grad=True)
    return [
        Boundary(f"h{s}", s, s + 1, spec, (INVARIANT,), (INVARIANT,)) for s in range(stages - 1)
    ]


def start_together() -> float:
    """A moment soon that all ranks wait for; the second on this machine's one clock."""
    moment = torch.tensor(time.monotonic() + LEAD_SECONDS, dtype=torch.float64)
    dist.broadcast(moment, src=0)
    time.sleep(max(0.0, float(moment) - time.monotonic()))
    return float(moment)


def shared(seconds: float) -> float:
    """The largest value of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
