"""Loop over the steps of a run, with checkpoints, checks between steps, and an early end.

A failed save in the middle of a run does not end training: the error is shown, the last good
checkpoint stays, and the next save tries again. If the last save fails, the run fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from autoparallel.planner.errors import MachineError
from autoparallel.runtime.checkpoint.folder import checkpoint_path
from autoparallel.runtime.data.batches import RankInputs
from autoparallel.runtime.launch.membership import Stop
from autoparallel.runtime.launch.process import CONNECTION_LOST, Worker
from autoparallel.runtime.messages.device_queue import queue_of
from autoparallel.runtime.step.trainer import RankTrainer, Trainer
from autoparallel.training.callbacks import Callback
from autoparallel.training.step_log import StepLog
from autoparallel.training.straggler_check import StragglerCheck
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
