"""Recording the actions of every rank in a step, on one clock.

In: a trainer whose steps are recorded. Out: on rank 0 the actions of all ranks in seconds of its
own clock, from the first recorded step on. On a GPU, events in its queue give the times at which it
reached an action; on a CPU, the host's clock does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...cost_model.simulator.actions import Action
from ..messages.device_queue import queue_of
from ..messages.shared_objects import control_group, gather_on_first, gather_values
from ..step.pipeline import StepMoments
from ..step.trainer import Trainer

PINGS = 9
"""Number of round trips between two hosts to compare their clocks, of whose offsets the median is
taken."""


@dataclass(frozen=True, slots=True)
class RecordedAction:
    """Times of one executed action of the schedule, in seconds of rank 0's clock. From
    ``start_seconds`` to ``ready_seconds`` the action waits for messages."""

    action: Action
    start_seconds: float
    ready_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Times of one rank's step, in seconds of rank 0's clock; from ``update_seconds`` to
    ``end_seconds`` the weights are updated."""

    start_seconds: float
    actions: tuple[RecordedAction, ...]
    update_seconds: float
    end_seconds: float


class StepRecorder:
    """Recorder of one rank's steps: call ``begin`` before each step to record, ``end`` after it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._queue = trainer, queue_of(trainer.device)
        self._steps: list[tuple[StepMoments, Any]] = []
        self._zero: tuple[Any, float] | None = None

    def begin(self) -> None:
        """Make the next step record the times of its actions."""
        if self._zero is None:
            zero = self._queue.moment()
            if self._queue.runs_behind:
                self._queue.mark().synchronize()
            self._zero = zero, time.perf_counter()
        self._trainer.runner.set_clock(self._queue.moment)

    def end(self) -> None:
        """Store the times of the step that has just run. If gradients of several batches were
        accumulated in it, these are the times of the last batch."""
        moments = self._trainer.runner.moments
        if moments is not None:
            self._steps.append((moments, self._queue.moment()))
        self._trainer.runner.set_clock(None)

    def gather(self) -> list[list[RecordedStep]]:
        """Return on rank 0 the recorded steps of all ranks, in rank order; elsewhere [].
        Collective."""
        offset = clock_offset()
        return gather_on_first([self._seconds(step, end, offset) for step, end in self._steps])

    def _seconds(self, step: StepMoments, ended: Any, offset: float) -> RecordedStep:
        assert self._zero is not None
        zero, host_seconds = self._zero

        def at(moment: Any) -> float:
            return host_seconds + self._queue.seconds(zero, moment) - offset

        actions = []
        for action, start, ready, end in step.actions:
            start_seconds = at(start)
            ready_seconds = start_seconds if ready is None else at(ready)
            actions.append(RecordedAction(action, start_seconds, ready_seconds, at(end)))
        return RecordedStep(at(step.began), tuple(actions), at(step.ended), at(ended))


def clock_offset() -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's. Collective.

    Processes of one machine have one clock. Clocks of other machines are compared by round trips:
    rank 0 is taken to answer in the middle of their time (Cristian, Distributed Computing 3, 1989).
    """
    if not dist.is_initialized():
        return 0.0
    machines = gather_values(_machine())
    rank, offset = dist.get_rank(), 0.0
    for other in range(1, len(machines)):
        if machines[other] != machines[0] and rank in (0, other):
            offset = _compared(other)
    return offset


def _compared(other: int) -> float:
    """Compare the clocks of rank 0 and rank ``other``, which both call it. Return on rank ``other``
    the seconds by which its clock is ahead, on rank 0 zero."""
    group, box = control_group(), torch.zeros((), dtype=torch.float64)
    if dist.get_rank() == 0:
        for _ in range(PINGS):
            dist.recv(box, other, group=group)
            box.fill_(time.perf_counter())
            dist.send(box, other, group=group)
        return 0.0
    found = []
    for _ in range(PINGS):
        sent = time.perf_counter()
        dist.send(box, 0, group=group)
        dist.recv(box, 0, group=group)
        found.append((sent + time.perf_counter()) / 2 - float(box))
    return median(found)


def _machine() -> str:
    """Return an identifier that is unique to this machine and its last boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()
