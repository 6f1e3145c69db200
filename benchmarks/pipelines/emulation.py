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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.cost_model.actions import COMPUTE, Schedule
from autoparallel.cost_model.simulator import StageCosts, simulate
from autoparallel.cost_model.timeline import Timeline
from autoparallel.passes.stage_cut import Boundary
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.graph import TensorSpec
from autoparallel.planner.layout import INVARIANT, Mesh
from autoparallel.planner.schedules import LOOPED, build_schedule
from autoparallel.runtime.exchange import Exchange
from autoparallel.runtime.handover import Handover, split_boundaries
from autoparallel.runtime.pipeline import ActionTiming, PipelineRunner

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

    def share_loss(self, loss: Tensor | None, stages: Sequence[int] = ()) -> Tensor:
        return torch.zeros(())


def run_rank(job: Job) -> None:
    """Measures on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    inputs = measure_inputs(job)
    rows: dict[str, Any] = {}
    for name in job.schedules:
        try:
            chunks = NUM_CHUNKS if name in LOOPED else 1
            ranks = dist.get_world_size()
            schedule = build_schedule(
                name, ranks * chunks, job.num_microbatches, num_chunks=chunks
            )  # fmt: skip
            rows[name] = measure_schedule(job, schedule, inputs)
        except AutoparallelError as error:
            rows[name] = {"error": error.what}
    if dist.get_rank() == 0:
        print(json.dumps({"job": asdict(job), "inputs": inputs, "schedules": rows}))
    dist.barrier()
    dist.destroy_process_group()


def measure_inputs(job: Job) -> dict[str, float]:
    """Compute of a stage alone, and a message alone and in a row of four; on all ranks."""
    timings = alone(job)
    found = {
        f"{name}_seconds": shared(
            statistics.median(
                t.end_seconds - t.ready_seconds for t in timings if t.action.kind == kind
            )
        )
        for name, kind in (("forward", "F"), ("backward", "B"))
    }
    one, four = ([messages(job, count) for _ in range(9)] for count in (1, 4))
    message, send, post = (statistics.median(column) for column in zip(*one, strict=True))
    last = statistics.median(came for came, _, _ in four)
    return {
        **found, "message_seconds": message, "occupied_seconds": (last - message) / 3,
        "send_call_seconds": send, "post_call_seconds": post,
    }  # fmt: skip


def alone(job: Job) -> Sequence[ActionTiming]:
    """A step of one stage, through the interpreter, without messages."""
    places = (Place((dist.get_rank(),)),)
    runner = PipelineRunner(
        build_schedule("1f1b", 1, job.num_microbatches),
        {0: SleepingStage(job, 1.0, "", "")},
        _Silent((), stages=places, rank=dist.get_rank(), device=CPU),
        clock=time.monotonic,
    )
    runner.step({})
    return runner.timings


def messages(job: Job, count: int) -> tuple[float, float, float]:
    """``count`` messages from rank 0 to 1: (first send to last arrival, a send, a posting).

    The last two are what the call itself takes of its rank's time.
    """
    places = tuple(Place((rank,)) for rank in range(2))
    rank = dist.get_rank()
    came = sent = posted = 0.0
    exchange = Exchange(chain_boundaries(2, job), stages=places, rank=rank, device=CPU)
    value = torch.ones(job.num_bytes // 4)
    if rank == 1:
        began = time.monotonic()
        for m in range(count):
            exchange.post("forward", 1, m)
        posted = (time.monotonic() - began) / count
    start = start_together()
    if rank == 0:
        began = time.monotonic()
        for m in range(count):
            exchange.send("forward", 0, m, {"h0": value})
        sent = (time.monotonic() - began) / count
        exchange.finish()
    if rank == 1:
        for m in range(count):
            exchange.receive("forward", 1, m)
        came = time.monotonic() - start
    return shared(came), shared(sent), shared(posted)


def measure_schedule(job: Job, schedule: Schedule, inputs: Mapping[str, float]) -> dict[str, Any]:
    """The median step of a schedule, and what the simulator makes of the measured inputs."""
    share = dist.get_world_size() / schedule.num_stages
    rounds = [run_step(job, schedule, share) for _ in range(job.rounds + 1)][1:]
    timeline, ideal = simulated(schedule, inputs, share), simulated(schedule, inputs, share, 0)
    busy = (inputs["forward_seconds"] + inputs["backward_seconds"]) * job.num_microbatches
    return {
        "step_seconds": statistics.median(step for step, _ in rounds),
        "bubble": statistics.median(bubble for _, bubble in rounds),
        "steps": [step for step, _ in rounds],
        "ideal_seconds": ideal.step_seconds,
        "simulated_seconds": timeline.step_seconds,
        "simulated_bubble": 1 - busy / timeline.step_seconds,
    }


def simulated(
    schedule: Schedule, inputs: Mapping[str, float], share: float, messages: int = 1
) -> Timeline:
    """The step from the measured inputs; with ``messages`` 0 as if they took no time.

    A stage's forward takes, beside its compute, the calls that post what it receives and send
    what it makes; so does its backward. The first and the last stage have one neighbour. A
    message is on its way from the beginning of the call that sends it, which the simulator
    counts to the compute before it.
    """
    last = schedule.num_stages - 1
    post, send = inputs["post_call_seconds"] * messages, inputs["send_call_seconds"] * messages
    forward, backward = inputs["forward_seconds"] * share, inputs["backward_seconds"] * share
    costs = StageCosts(
        [forward + post * (stage > 0) + send * (stage < last) for stage in range(last + 1)],
        [backward + post * (stage < last) + send * (stage > 0) for stage in range(last + 1)],
        (inputs["message_seconds"] * messages - send,) * last,
    )
    return simulate(schedule, costs)


def run_step(job: Job, schedule: Schedule, share: float) -> tuple[float, float]:
    """One step of all ranks from a common start: its seconds, and the share not computed in."""
    rank, stages = dist.get_rank(), schedule.num_stages
    places = tuple(Place((owner,)) for owner in schedule.stage_rank)
    sent, handed = split_boundaries(chain_boundaries(stages, job), places)
    executors = {
        stage: SleepingStage(
            job, share,
            f"h{stage}" if stage + 1 < stages else "", f"h{stage - 1}" if stage else "",
        )
        for stage, owner in enumerate(schedule.stage_rank) if owner == rank
    }  # fmt: skip
    runner = PipelineRunner(
        schedule, executors,
        Exchange(sent, stages=places, rank=rank, device=CPU),
        handover=Handover(handed, stages=places, rank=rank, device=CPU),
        clock=time.monotonic,
    )  # fmt: skip
    start = start_together()
    late = time.monotonic() - start
    runner.step({})
    computes = [t for t in runner.timings if t.action.kind in COMPUTE]
    step = shared(late + max(t.end_seconds for t in computes))
    busy = torch.tensor(sum(t.end_seconds - t.ready_seconds for t in computes))
    dist.all_reduce(busy)
    return step, 1 - float(busy) / (step * dist.get_world_size())


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
