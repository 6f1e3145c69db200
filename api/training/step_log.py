"""Log of a training run's steps, with their time and memory.

In: the results of steps, which may still be computed. Out: a line of ``name value`` pairs per step,
printed after the next step has been started, and a summary. Thus no rank waits for a loss to print
while it has work to do.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any
from weakref import ReferenceType, ref

import psutil
import torch

from autoparallel import __version__
from autoparallel.analysis.measurement import (
    MOST_STEPS,
    WARMUP_STEPS,
    Measurement,
    checksum,
    measured_path,
)
from autoparallel.cost_model.cluster.detect import busy_text
from autoparallel.options.words import bytes_text, count_text, duration_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan_files import PLAN
from autoparallel.runtime.data.batches import RankInputs
from autoparallel.runtime.step.training_step import StepResult
from autoparallel.training.callbacks import Callback, StepRecord

SAMPLE_SECONDS = 0.002
"""Seconds between two readings of a CPU process's memory."""


class MemoryMeter:
    """Meter of peak memory in bytes: of the device; on a CPU, of what this process has allocated
    since the start of the meter and not freed, read every ``SAMPLE_SECONDS``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_accelerator = device.type != "cpu"
        self._base_bytes = _allocated_bytes()
        self._peak_bytes = 0
        if not self.is_accelerator:
            Thread(target=_sample, args=(ref(self),), daemon=True).start()

    def forget_peak(self) -> None:
        """Reset the peak."""
        self._peak_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        held = _allocated_bytes() - self._base_bytes
        self._peak_bytes = max(self._peak_bytes, held)
        return self._peak_bytes


def _sample(meter: ReferenceType[MemoryMeter]) -> None:
    while (own := meter()) is not None:
        own.peak_bytes()
        del own
        time.sleep(SAMPLE_SECONDS)


class _Allocated(ctypes.Structure):
    """The C struct ``mallinfo2`` of glibc 2.33; ``hblkhd`` and ``uordblks`` are bytes in use, of
    pieces with memory of their own and of all others."""

    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in (*"abcd", "hblkhd", *"fg", "uordblks", *"ij")
    )


_MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _MALLINFO is not None:
    _MALLINFO.restype = _Allocated


def _allocated_bytes() -> int:
    """Return the bytes that this process has allocated; without glibc those that are resident."""
    if _MALLINFO is None:
        return psutil.Process().memory_info().rss
    found = _MALLINFO()
    return int(found.uordblks + found.hblkhd)


class Figures:
    """Losses and seconds of all steps of a run, in compact arrays: there may be millions."""

    def __init__(self) -> None:
        self.losses, self.seconds = array("d"), array("d")
        self.memory_bytes = 0

    def add(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.seconds.append(record.seconds)
        self.memory_bytes = max(self.memory_bytes, record.memory_bytes)


class StepLog:
    """Log of a run's steps; prints each step while ``prints`` is set.

    ``callback`` receives each step's record. ``done`` is the unit of throughput ("tokens" or
    "samples") and its number per step. On the CPU a step's time is measured between two returns of
    ``step``, without loading data; on an accelerator, where ``step`` returns early, between the
    arrivals of two losses.
    """

    def __init__(
        self,
        done: tuple[str, int],
        memory: MemoryMeter,
        callback: Callback,
    ) -> None:
        self._callback, self._done = callback, done
        self.figures = Figures()
        self._memory = memory
        self.prints = False
        self._running: tuple[int, StepResult, float] | None = None
        self._began = time.perf_counter()

    def timed_data(self, batches: Iterator[RankInputs]) -> RankInputs:
        """Return the next batch; on a CPU exclude its loading time from the step's time."""
        started = time.perf_counter()
        batch = next(batches)
        if not self._memory.is_accelerator:
            self._began += time.perf_counter() - started
        return batch

    def add(self, step: int, result: StepResult) -> None:
        """Keep the result of a step, then read and print the previous step's result."""
        before = self._running
        self._running = (step, result, 0.0 if self._memory.is_accelerator else self._lap())
        if before is not None:
            self._read(*before)

    def finish(self) -> None:
        """Wait for the last step, then read and print its result."""
        if self._running is not None:
            self._read(*self._running)
            self._running = None

    def skip(self) -> None:
        """Leave the time and the peak memory of work since the last step out of the log."""
        self._memory.forget_peak()
        self.restart()

    def restart(self) -> None:
        """Restart the clock of step times, after work outside of steps."""
        self._began = time.perf_counter()

    def _lap(self) -> float:
        """Return the seconds since the last call, and restart the clock."""
        before, self._began = self._began, time.perf_counter()
        return self._began - before

    def _read(self, step: int, result: StepResult, seconds: float) -> None:
        found = result.read()
        if self._memory.is_accelerator:
            seconds = self._lap()
        unit, count = self._done
        record = StepRecord(
            step,
            found.loss,
            found.gradient_norm,
            self._memory.peak_bytes(),
            seconds,
            learning_rate=found.learning_rate,
            skipped_steps=found.skipped,
            loss_scale=found.loss_scale,
            unit=unit,
            throughput=count / seconds,
        )
        self.figures.add(record)
        if self.prints:
            print(step_line(record), flush=True)
        self._callback.on_step(record)


def samples_or_tokens(plan: Plan, num_batches: int = 1) -> tuple[str, int]:
    """Return the unit, "samples" or "tokens", and its number in ``num_batches`` global batches."""
    samples = plan.model.global_batch * num_batches
    return ("tokens", samples * plan.model.seq) if plan.model.seq else ("samples", samples)


def step_line(record: StepRecord) -> str:
    """Format a step as a line: at most 80 columns, unless losses are scaled or steps skipped."""
    scale = "" if record.loss_scale is None else f"  loss_scale {record.loss_scale:g}"
    skipped = f"  skipped {record.skipped_steps}" if record.skipped_steps else ""
    norm = "" if record.gradient_norm is None else f"  grad_norm {record.gradient_norm:.3f}"
    return (
        f"step {record.step:4d}  loss {record.loss:.4f}{norm}"
        f"  {record.unit}/s {count_text(record.throughput)}"
        f"  time {seconds_text(record.seconds)}{scale}{skipped}"
    )


def outlook(plan: Plan, steps: int, num_batches: int = 1) -> str:
    """Describe the predicted time of ``steps`` steps of ``num_batches`` global batches each."""
    seconds = plan.prediction.step_seconds * num_batches
    total = duration_text(steps * seconds)
    return f"{steps} steps of {seconds_text(seconds)} are predicted, {total} in all"


def next_step(folder: str | None) -> str:
    """Return the last lines that a run prints: its checkpoints' folder, and next commands."""
    if folder is None:
        return "the weights are not kept: --save DIR writes checkpoints"
    place = os.path.relpath(folder)
    return (
        f"saved in {place}; next: autoparallel export {place} -o weights\n"
        f"or go on: autoparallel run {place}/{PLAN} --resume {place} --save {place}"
    )


def outcome(figures: Figures, plan: Plan, num_batches: int = 1) -> dict[str, Any]:
    """Return measured and predicted figures of a run; a step uses ``num_batches`` global batches.

    ``step_seconds`` is the median after warm-up, None if a restart found all steps done.
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
    """Return a text that compares measured with predicted figures, and first with last loss."""
    found = outcome(figures, plan, num_batches)
    seconds, predicted = found["step_seconds"], found["predicted_step_seconds"]
    memory, expected = found["memory_bytes"], found["predicted_memory_bytes"]
    losses = figures.losses
    is_cpu = plan.cluster.device(0).kind == "cpu"
    if is_cpu and _MALLINFO is None:
        compared = f"grew by {bytes_text(memory)}  predicted of tensors {bytes_text(expected)}"
    else:
        compared = f"measured {bytes_text(memory)}  predicted {bytes_text(expected)}"
        compared += f"  {_difference(expected, memory)}"
    lines = [
        f"step time  measured {seconds_text(seconds)}  predicted {seconds_text(predicted)}"
        f"  {_difference(predicted, seconds)}",
        f"memory     {compared}{', allocated by the process' if is_cpu and _MALLINFO else ''}",
        f"loss       {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps",
    ]
    if is_cpu and (busy := busy_text()):
        lines.append(busy)
    return "\n".join(lines)


def _difference(predicted: float, measured: float) -> str:
    """Format the relative error of a prediction in percent of the measured figure.

    >>> _difference(1.1, 1.0), _difference(0.5, 1.0), _difference(1.0, 0.0)
    ('(10 % too high)', '(50 % too low)', '(nothing measured)')
    """
    if measured <= 0:
        return "(nothing measured)"
    error = predicted / measured - 1
    return f"({abs(error):.0%} too {'high' if error > 0 else 'low'})".replace("%", " %")


def keep_measurement(
    plan: Plan, figures: Figures, num_batches: int, plan_paths: Sequence[Path]
) -> None:
    """Write the measurement of a run beside the plan at each of ``plan_paths``.

    A file that cannot be written is reported, without an error.
    """
    measured = outcome(figures, plan, num_batches)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = Measurement(
        checksum(plan),
        measured["step_seconds"],
        int(measured["memory_bytes"]),
        tuple(figures.seconds[-MOST_STEPS:]),
        len(figures.seconds),
        num_batches,
        gpu or platform.processor() or platform.machine(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        __version__,
        torch.__version__,
    )
    text = json.dumps(asdict(found), indent=1) + "\n"
    for path in {measured_path(each).resolve() for each in plan_paths}:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"what was measured is not kept in {path}: {error.strerror}", flush=True)
