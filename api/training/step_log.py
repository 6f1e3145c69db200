"""What a training run says of its steps, and what they took.

In: the results of steps, which may still be on their way. Out: one line of ``name value`` pairs
per step, printed when the next step has been started, and a summary of all. So nobody waits
for a loss in order to print it while there is work to do.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterator
from statistics import median
from typing import Any

import psutil
import torch

from autoparallel.planner.plan import Plan
from autoparallel.report.words import bytes_text, count_text, seconds_text
from autoparallel.runtime.data.batches import RankInputs
from autoparallel.runtime.step.training_step import StepResult
from autoparallel.training.callbacks import Callback, StepRecord

WARMUP_STEPS = 2
"""Steps that the summary leaves out: allocators and caches fill."""


class MemoryMeter:
    """What training has needed at most, in bytes: of the device, or of this process beyond
    what it held when the meter was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_accelerator = device.type != "cpu"
        self._process = psutil.Process()
        self._base_bytes = self._process.memory_info().rss
        self._peak_bytes = 0

    def forget_peak(self) -> None:
        """Begin anew; on the CPU malloc may keep memory."""
        self._peak_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """The most so far; on the CPU as seen when this is called, with what malloc keeps."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        held = self._process.memory_info().rss - self._base_bytes
        self._peak_bytes = max(self._peak_bytes, held)
        return self._peak_bytes


class Figures:
    """What is kept of all steps, in 16 bytes each: a run may have millions."""

    def __init__(self) -> None:
        self.losses, self.seconds = array("d"), array("d")
        self.memory_bytes = 0

    def add(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.seconds.append(record.seconds)
        self.memory_bytes = max(self.memory_bytes, record.memory_bytes)


class StepLog:
    """The records of a run's steps, printed beside ``predicted_seconds`` while ``prints`` is set.

    ``callback`` is told of each. ``done`` is what a step's throughput counts, and how many of
    that it does.

    A step's time is that between two returns of ``step`` on the CPU, without the time of its
    data, as nothing else goes on meanwhile; on an accelerator, where ``step`` returns early,
    that between the arrivals of two losses.
    """

    def __init__(
        self,
        done: tuple[str, int],
        memory: MemoryMeter,
        callback: Callback,
        *,
        predicted_seconds: float = math.nan,
    ) -> None:
        self._callback, self._done = callback, done
        self.figures = Figures()
        self._memory, self._predicted = memory, predicted_seconds
        self.prints = False
        self._running: tuple[int, StepResult, float] | None = None
        self._began = time.perf_counter()

    def timed_data(self, batches: Iterator[RankInputs]) -> RankInputs:
        """The next batch."""
        started = time.perf_counter()
        batch = next(batches)
        if not self._memory.is_accelerator:
            self._began += time.perf_counter() - started
        return batch

    def add(self, step: int, result: StepResult) -> None:
        """Takes a step's result, and reads and prints the one before."""
        before = self._running
        self._running = (step, result, 0.0 if self._memory.is_accelerator else self._lap())
        if before is not None:
            self._read(*before)

    def finish(self) -> None:
        """Reads and prints what is left, which waits for it."""
        if self._running is not None:
            self._read(*self._running)
            self._running = None

    def skip(self) -> None:
        """Leave the time and memory since the last step out of the figures."""
        self._memory.forget_peak()
        self.restart()

    def restart(self) -> None:
        """Begins to count anew, after what is no step."""
        self._began = time.perf_counter()

    def _lap(self) -> float:
        """The seconds since the last one."""
        before, self._began = self._began, time.perf_counter()
        return self._began - before

    def _read(self, step: int, result: StepResult, seconds: float) -> None:
        found = result.read()
        if self._memory.is_accelerator:
            seconds = self._lap()
        unit, count = self._done
        record = StepRecord(
            step, found.loss, found.gradient_norm, self._memory.peak_bytes(), seconds,
            learning_rate=found.learning_rate, skipped_steps=found.skipped,
            loss_scale=found.loss_scale,
            unit=unit, throughput=count / seconds,
        )  # fmt: skip
        self.figures.add(record)
        if self.prints:
            print(step_line(record, self._predicted), flush=True)
        self._callback.on_step(record)


def samples_or_tokens(plan: Plan, num_batches: int = 1) -> tuple[str, int]:
    """What a step's throughput counts, and how many there are in its global batches."""
    samples = plan.model.global_batch * num_batches
    return ("tokens", samples * plan.model.seq) if plan.model.seq else ("samples", samples)


def step_line(record: StepRecord, predicted_seconds: float) -> str:
    """One step in one line."""
    scale = "" if record.loss_scale is None else f"  loss_scale {record.loss_scale:g}"
    skipped = f"  skipped {record.skipped_steps}" if record.skipped_steps else ""
    norm = "" if record.gradient_norm is None else f"  grad_norm {record.gradient_norm:.3f}"
    return (
        f"step {record.step:4d}  loss {record.loss:.4f}{norm}"
        f"  memory {bytes_text(record.memory_bytes)}"
        f"  {record.unit}/s {count_text(record.throughput)}"
        f"  time {seconds_text(record.seconds)} (predicted {seconds_text(predicted_seconds)})"
        f"{scale}{skipped}"
    )


def outcome(figures: Figures, plan: Plan, num_batches: int = 1) -> dict[str, Any]:
    """Measured and predicted figures; the time is the median step after the warm-up.

    Nothing is measured where a restart found all steps done.

    A step uses ``num_batches`` global batches.
    """
    timed = figures.seconds[WARMUP_STEPS:] or figures.seconds
    return {
        "step_seconds": median(timed) if timed else None,
        "predicted_step_seconds": plan.prediction.step_seconds * num_batches,
        "memory_bytes": figures.memory_bytes,
        "predicted_memory_bytes": plan.prediction.peak_memory_bytes,
        "losses": list(figures.losses),
    }


def summary(figures: Figures, plan: Plan, num_batches: int = 1) -> str:
    """Measured against predicted, and where the loss went."""
    found = outcome(figures, plan, num_batches)
    seconds, predicted = found["step_seconds"], found["predicted_step_seconds"]
    memory, expected = found["memory_bytes"], found["predicted_memory_bytes"]
    losses = figures.losses
    lines = [
        f"step time  measured {seconds_text(seconds)}  predicted {seconds_text(predicted)}"
        f"  ({_difference(predicted, seconds)})",
        f"memory     measured {bytes_text(memory)}  predicted {bytes_text(expected)}"
        f"  ({_difference(expected, memory)})",
        f"loss       {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps",
    ]
    return "\n".join(lines)


def _difference(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured > 0 else "nothing measured"
