"""``autoparallel run`` and ``verify`` of a plan with parameter servers, on one rank.

In: the plan, the target, the options of the run. Out: as ``worker.train``. Every worker reads the
global batch, because it may have to compute a lost worker's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from autoparallel.planner.errors import UsageError
from autoparallel.planner.parameter_servers import served
from autoparallel.runtime.data.batches import RankInputs, marked, named_inputs
from autoparallel.runtime.servers.server_trainer import ServerTrainer
from autoparallel.training.data import TrainingData
from autoparallel.training.run_setup import open_callbacks
from autoparallel.training.step_log import MemoryMeter, StepLog, outcome, samples_or_tokens, summary

if TYPE_CHECKING:
    from autoparallel.options.run_options import RunOptions
    from autoparallel.planner.plan import Plan
    from autoparallel.runtime.launch.process import Worker
    from autoparallel.runtime.step.trainer import Trainer
    from autoparallel.target.target import Target


def what_servers_lack(options: RunOptions, asked: Mapping[str, Any]) -> list[str]:
    """Name the requested features that parameter servers lack."""
    wrong = {
        "clipping by norm or value": options.clip_norm or options.clip_value,
        "accumulation": options.accumulate > 1,
        "a loss scale": options.loss_scale is not None,
        "--on-nan": options.on_nan != "ignore",
        "--save": asked.get("saving") is not None,
        "--resume": asked.get("resume") is not None,
        "hosts that come and go": options.elastic is not None,
    }
    return [name for name, is_asked in wrong.items() if is_asked]


def check_served_run(options: RunOptions, asked: Mapping[str, Any], target: Target) -> None:
    """Raise UsageError AP959 for features that a run with parameter servers lacks."""
    wrong = what_servers_lack(options, asked)
    wrong += ["build_scheduler"] if target.build_scheduler is not None else []
    if wrong:
        raise UsageError(
            "AP959", f"a run with parameter servers cannot have {wrong[0]}",
            why="updates are made by the servers, each of its own part of the weights",
            fix="remove it, or plan without servers",
        )  # fmt: skip


def train_served(
    worker: Worker,
    plan: Plan,
    target: Target,
    made: tuple[ServerTrainer, MemoryMeter],
    *,
    steps: int,
    seed: int,
    options: RunOptions,
) -> dict[str, Any]:
    """Train; rank 0 prints each step and a summary, and every worker returns its figures. If rank 0
    is lost, the next worker prints.
    """
    trainer, memory = made
    is_first = worker.rank == 0
    if trainer.worker is None:
        trainer.finish(worker.watchdog.progress)
        return {}
    if is_first:
        print(f"{plan.servers.consistency}: {served(plan)}" if plan.servers else "", flush=True)
    data = TrainingData(
        cast("Trainer", _Reader(trainer)), target, seed=seed, progress=worker.watchdog.progress,
        tell=partial(print, flush=True) if is_first else lambda line: None,
    )  # fmt: skip
    with open_callbacks(options, plan, target, rank=worker.rank) as callback:
        log = StepLog(
            samples_or_tokens(plan), memory, callback,
            predicted_seconds=plan.prediction.step_seconds if is_first else None,
        )  # fmt: skip
        for step in range(1, steps + 1):
            worker.watchdog.progress(f"step {step}")
            result = trainer.step(log.timed_data(data))
            if trainer.worker.is_first and not is_first:
                is_first = True
                log.begin_printing(plan.prediction.step_seconds)
            log.add(step, result)
        log.finish()
        trainer.finish(worker.watchdog.progress)
        callback.on_end()
    if is_first:
        print(summary(log.figures, plan), flush=True)
    return outcome(log.figures, plan)


class _WholeBatches:
    """Batches as ``TrainingData`` needs them: every worker reads all rows."""

    place = (0, 1)
    is_for_all = True


@dataclass(frozen=True)
class _Runner:
    batches: _WholeBatches


class _Reader:
    """Trainer as ``TrainingData`` needs it."""

    def __init__(self, trainer: ServerTrainer) -> None:
        self.plan, self.program = trainer.plan, trainer.program
        self.runner = _Runner(_WholeBatches())

    def inputs(self, batch: Any) -> RankInputs:
        """Return a batch's tensors by their names in the plan."""
        named = named_inputs(batch, self.program)
        return marked(named, batch)
