"""Training step of a model: the same call for every plan, and for a plain module on one device.

In: a model, options of its updates, and a global batch. Out: the loss of the batch, and updated
weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from autoparallel.adoption.guards import check_own_hooks
from autoparallel.adoption.module import ParallelModule, loss_of, take_buffers
from autoparallel.options.environment import under_torchrun
from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.programs.batch import leaves
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.variants.parameter_servers import check_not_served
from autoparallel.runtime.data.variants import Buckets
from autoparallel.runtime.step.training_step import PlainTrainer, TrainingStep
from autoparallel.runtime.update.optimizer import BuildOptimizer, build_with, default_optimizer
from autoparallel.runtime.update.update import BuildScheduler, OnNan, UpdateOptions
from autoparallel.target.target import Batch, LossFn
from autoparallel.training.callbacks import Callback, all_of
from autoparallel.training.step_log import MemoryMeter, StepLog, samples_or_tokens


class Step:
    """Training step of a model, the same call for every plan.

    ``step(batch)`` takes the global batch (the same on every rank), runs forward, backward and the
    update, and returns the loss of the global batch on every rank. ``optimizer`` and ``scheduler``
    belong to this rank.
    """

    def __init__(  # noqa: PLR0913 - one argument per option, by name
        self,
        model: nn.Module,
        *,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        build_optimizer: BuildOptimizer | None = None,
        build_scheduler: BuildScheduler | None = None,
        max_norm: float | None = None,
        max_value: float | None = None,
        accumulate: int = 1,
        scaler: GradScaler | None = None,
        on_nan: OnNan = "ignore",
        callbacks: Callable[[], Iterable[Callback]] | None = None,
        timeout_seconds: float | None = None,
        buckets: Buckets = (),
    ) -> None:
        """Prepare training of ``model``: made by ``parallelize`` or, outside torchrun, a plain
        module.

        ``loss_fn(outputs, batch)`` returns the loss if the model returns none. The optimizer is
        ``build_optimizer(parameters)``, else the plan's, else AdamW. If the only required argument
        of ``build_optimizer`` is called ``named_parameters``, it gets pairs of names and
        parameters. ``build_scheduler(optimizer)`` returns a learning-rate scheduler, which steps
        after each update.

        ``max_norm`` clips the norm of the whole gradient, ``max_value`` each element. With
        ``accumulate=n`` every n-th call updates, with the mean of n gradients. ``scaler`` is a
        ``torch.amp.GradScaler`` for the loss; updates whose gradient overflows are skipped.
        ``on_nan`` decides about an update whose gradient is not finite: it is made all the same
        (``"ignore"``), skipped on every rank (``"skip"``), or skipped and followed by RunError
        AP910, which names the first block with such a value (``"stop"``).

        ``callbacks()`` is called on rank 0. The callbacks that it returns, such as
        ``[JsonLines(path)]``, receive each update when the next has been started or ``finish`` is
        called.

        Under torchrun a rank that dies, or makes no progress in a step for ``timeout_seconds``
        (600), ends every rank: each reports its own action and the missing rank.

        ``buckets`` are sequence lengths below the planned length, in ascending order: a step with a
        shorter batch runs at the shortest bucket that it fits, padded to it. A mapping or pairs of
        lengths and rows, as ``{16384: 8}``, let batches of so many rows run at this length.

        Raises UsageError AP142 for a plan with several devices outside torchrun, AP148 for a plain
        module under torchrun, AP900 for a bad option, AP901 for options that an asynchronous
        schedule does not have, AP907 for bad callbacks, AP902 to AP904 if ``build_scheduler`` or
        ``build_optimizer`` return another type.
        """
        options = UpdateOptions(max_norm, max_value, accumulate, on_nan, scaler)
        self.model = model
        self.plan = plan
        self.loss_fn = loss_fn
        self._num_accumulated = 0
        self._num_updates = 0
        self._callback: Callback | None = None
        if callbacks is not None and os.environ.get("RANK", "0") == "0":
            self._callback = all_of(callbacks(), source="callbacks()")
        self._memory = MemoryMeter(torch.device("cpu"))
        self._log: StepLog | None = None
        if isinstance(model, ParallelModule):
            check_own_hooks(model)
            trainer = model.join(
                plan=plan, loss_fn=loss_fn, timeout_seconds=timeout_seconds, buckets=buckets
            )
            if build_optimizer is not None:
                trainer.use_optimizer(build_optimizer)
            trainer.use_update(options, build_scheduler)
            self.plan = trainer.plan
            self.loss_fn = loss_of(model)
            self._trainer: Any = trainer
            self._inputs: Callable[[Batch], Any] = trainer.batches.named
            return
        if under_torchrun():
            raise UsageError(
                "AP148",
                "a plain module cannot be trained under torchrun",
                why="every process would train its own copy",
                fix="model = autoparallel.parallelize(model, example_batch=...)",
            )
        _require_one_device(plan)
        self._inputs = lambda batch: batch
        self._trainer = PlainTrainer(
            model, self._loss, self._plain_optimizer(build_optimizer), options, build_scheduler
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Train on the global ``batch`` and return its loss, a scalar tensor without a graph.

        With ``accumulate=n`` every n-th call updates the weights.
        """
        if self._callback is not None and self._log is None:
            self._log = self._begin_log(self._callback, batch)
        if isinstance(self.model, ParallelModule):
            check_own_hooks(self.model)
            take_buffers(self.model)
        inputs = self._inputs(batch)
        self._num_accumulated += 1
        if self._num_accumulated < self._steps.update.options.accumulate:
            return self._steps.accumulate(inputs)
        self._num_accumulated = 0
        self._num_updates += 1
        result = self._steps.step(inputs)
        if self._log is not None:
            self._log.add(self._num_updates, result)
        return result.losses[-1]

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of a batch of any size in evaluation mode, without gradients."""
        with _evaluation_mode(self.model), torch.no_grad():
            return self._loss(batch).detach()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of this rank's shards of the weights."""
        optimizer: torch.optim.Optimizer = self._trainer.optimizer
        return optimizer

    @property
    def scheduler(self) -> Any:
        """Scheduler that ``build_scheduler`` returned, or None."""
        return self._steps.update.scheduler

    @property
    def gradient_norm(self) -> Tensor | None:
        """Norm of the whole gradient of the last update, before clipping; waits for the update.

        None before the first update.
        """
        read = self._steps.last_norm
        return None if read is None else read()

    @property
    def skipped_steps(self) -> int:
        """Number of skipped updates; waits for the last update."""
        return int(self._steps.update.skipped)

    def finish(self) -> None:
        """End the training: wait for the last step, report it to the callbacks, and close them."""
        self._steps.finish()
        if self._callback is None:
            return
        if self._log is not None:
            self._log.finish()
        self._callback.on_end()
        self._callback.close()
        self._callback = self._log = None

    def state_dict(self) -> dict[str, Any]:
        """Return scheduler, loss scale and counters as plain data; the model has the weights.

        Call it between updates: accumulated gradients are not included.
        """
        counters = {
            "batches_begun": self._steps.trainable.batches_begun,
            "updates": self._num_updates,
        }
        return {**self._steps.update.state_dict(), **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``, which may have been saved under any plan."""
        self._steps.update.load_state_dict(state)
        self._steps.trainable.batches_begun = state.get("batches_begun", 0)
        self._num_updates = state.get("updates", 0)

    def _begin_log(self, callback: Callback, batch: Batch) -> StepLog:
        count = self._steps.update.options.accumulate
        done = "samples", count * _num_rows(batch)
        if self.plan is not None:
            done = samples_or_tokens(self.plan, count)
        is_accelerator = self._trainer.device.type != "cpu"
        return StepLog(
            done, MemoryMeter(self._trainer.device) if is_accelerator else self._memory, callback
        )

    @property
    def _steps(self) -> TrainingStep:
        steps: TrainingStep = self._trainer.steps
        return steps

    def _plain_optimizer(self, build: BuildOptimizer | None) -> torch.optim.Optimizer:
        if build is not None:
            return build_with(build, self.model.named_parameters())
        name = "adamw" if self.plan is None else self.plan.model.optimizer
        return default_optimizer(self.model.parameters(), name)

    def _loss(self, batch: Batch) -> Tensor:
        return find_loss(call_model(self.model, batch), batch, self.loss_fn)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the context, then restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _num_rows(batch: Batch) -> int:
    """Return the number of rows of a batch, from its first tensor that is no scalar."""
    values = (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
    return next((len(value) for value in values if value.dim()), 1)


def _require_one_device(plan: Plan | None) -> None:
    check_not_served(plan)
    devices = 0 if plan is None else sum(len(stage.devices) for stage in plan.stages)
    if devices > 1:
        raise UsageError(
            "AP142",
            f"the plan is for {devices} devices, but only this process is running",
            fix=f"torchrun --nproc-per-node {devices} your_script.py",
        )
