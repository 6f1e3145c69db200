"""Loop over the steps of a run, with checkpoints, checks between steps, and an early end.

A failed save in the middle of a run does not end training: the error is shown, the last good
checkpoint stays, and the next save tries again. If the last save fails, the run fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from autoparallel.analysis.facts import rank_seconds
from autoparallel.planner.errors import MachineError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.checkpoint.folder import checkpoint_path
from autoparallel.runtime.data.batches import RankInputs
from autoparallel.runtime.launch.membership import Stop
from autoparallel.runtime.launch.process import CONNECTION_LOST, Worker
from autoparallel.runtime.messages.device_queue import queue_of
from autoparallel.runtime.messages.groups import stages_of_rank
from autoparallel.runtime.messages.shared_objects import gather_values
from autoparallel.runtime.profile.stragglers import (
    CHECK_STEPS,
    FIRST_STEP,
    WINDOW_SECONDS,
    WINDOW_STEPS,
    StragglerWatch,
    WorkSampler,
)
from autoparallel.runtime.step.trainer import RankTrainer, Trainer
from autoparallel.training.callbacks import Callback
from autoparallel.training.step_log import StepLog
from autoparallel.training.trace import RunTrace


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints of a run: written every ``every`` steps and at the end, into ``folder``.

    The newest ``keep`` of them stay, None for all.
    """

    folder: str
    every: int | None = None
    keep: int | None = None
    asynchronous: bool = False

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``; the last step always has one."""
        return self.every is not None and step % self.every == 0


class RunSaves:
    """Writer of a run's checkpoints. Its calls are collective over all ranks."""

    def __init__(
        self, how: Saving, trainer: Trainer, worker: Worker, log: StepLog, callback: Callback
    ) -> None:
        self.how = how
        self._trainer, self._worker = trainer, worker
        self._log, self._callback = log, callback

    def save_after(self, step: int, *, is_last: bool) -> None:
        """Write a checkpoint if due after ``step``, and print errors of background saves.

        Raises MachineError AP886 if the last save fails.
        """
        checkpoints = self._trainer.checkpoints
        if not is_last and not self.how.is_due(step):
            return self._attempt(step, checkpoints.check)
        tell = self._worker.watchdog.progress
        tell("waiting for the checkpoint before")
        self._attempt(step, checkpoints.wait)
        self._log.finish()
        self._trainer.steps.finish()
        tell(f"writing the checkpoint of step {step}")
        if is_last:
            self._save(step)
            tell("waiting for the last checkpoint")
            checkpoints.wait()
        else:
            self._attempt(step, lambda: self._save(step))
        self._log.restart()

    def _save(self, step: int) -> None:
        """Begin to write the checkpoint of ``step``, and tell the callbacks its path."""
        how = self.how
        self._trainer.save(
            how.folder,
            step=step,
            optimizer=self._trainer.optimizer,
            keep=how.keep,
            asynchronous=how.asynchronous,
        )
        self._callback.on_checkpoint(step, checkpoint_path(how.folder, step))

    def _attempt(self, step: int, act: Callable[[], None]) -> None:
        """Call ``act``, part of a save. If writing fails, which all ranks learn, rank 0 prints the
        error and training goes on."""
        try:
            act()
        except MachineError as error:
            is_lost_rank = any(sign in error.why for sign in CONNECTION_LOST)
            if error.code != "AP886" or is_lost_rank:
                raise
            if self._worker.rank == 0:
                say(f"step {step}: training goes on without a checkpoint\n{error}")


def take_steps(
    trainer: RankTrainer,
    data: Iterator[RankInputs],
    worker: Worker,
    log: StepLog,
    saves: RunSaves | None,
    *,
    steps: range,
    num_batches: int,
    trace: RunTrace,
) -> None:
    """Train ``steps``; each step takes ``num_batches`` global batches.

    ``trace`` records its chosen steps. If checkpoints are saved, SIGTERM ends the run after the
    current step.
    """
    device = trainer.device
    with StragglerCheck(trainer.plan, worker, device) as stragglers, ExitStack() as stack:
        stop, is_stopped = None, False
        if saves is not None:
            is_behind = queue_of(device).runs_behind
            stop = stack.enter_context(Stop(worker.watchdog, is_behind=is_behind))
        for step in steps:
            trace.begin(step, trainer)
            result = trainer.step(*(log.timed_data(data) for _ in range(num_batches)))
            log.prints = trainer.reports
            log.add(step, result)
            trace.end(step)
            stragglers.check(step)
            is_stopped = stop is not None and stop.is_agreed()
            if saves is not None:
                saves.save_after(step, is_last=is_stopped or step == steps[-1])
            if is_stopped:
                break
        log.finish()
        trainer.finish(worker.watchdog.progress)
    if is_stopped and saves is not None and worker.rank == 0:
        folder = saves.how.folder
        say(f"ended by SIGTERM after step {step}, which is saved: go on with --resume {folder}")


def say(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"autoparallel: {text}\n")
    sys.stderr.flush()


WORK = ("compute", "optimizer")
"""Purposes of predicted seconds in which a rank works and does not wait for other ranks."""


class StragglerCheck(ExitStack):
    """Check for ranks that compute slowly; a context manager around the training steps.

    It does nothing in a single process, with parameter servers, and on GPUs, where the CPU's time
    does not show the device's.
    """

    def __init__(self, plan: Plan, worker: Worker, device: torch.device) -> None:
        super().__init__()
        self._worker, self._num_steps, self._first = worker, 0, FIRST_STEP
        stages = [stages_of_rank(plan, rank) for rank in range(worker.world_size)]
        self._watch = StragglerWatch([planned_work(plan, each) for each in stages], stages)
        has_peers = worker.world_size > 1 and plan.servers is None
        is_sampled = has_peers and device.type == "cpu"
        self._sampler = self.enter_context(WorkSampler()) if is_sampled else None

    def check(self, step: int) -> None:
        """Compare ranks every few steps; rank 0 names a slow rank. Collective over all ranks."""
        if self._sampler is None:
            return
        self._num_steps += 1
        if self._num_steps == FIRST_STEP:
            self._sampler.reset()
        num_steps = self._num_steps - self._first
        if num_steps < WINDOW_STEPS or num_steps % CHECK_STEPS:
            return
        self._worker.watchdog.progress("comparing how long ranks work")
        times = gather_values(self._sampler.read())
        if min(seconds for _, seconds in times) < WINDOW_SECONDS:
            return
        self._sampler.reset()
        self._first = self._num_steps
        found = self._watch.compare(times)
        if found is not None and self._worker.rank == 0:
            sys.stderr.write(f"autoparallel: step {step}: {found}\n")
            sys.stderr.flush()


def planned_work(plan: Plan, stages: tuple[int, ...]) -> float:
    """Return the predicted fraction of a step in which a rank with ``stages`` computes."""
    seconds = rank_seconds(plan, [stage % len(plan.stages) for stage in stages])
    work = sum(seconds.get(name, 0.0) for name in WORK)
    return min(1.0, work / plan.prediction.step_seconds)
