"""One rank's trainer: a captured program and a plan in, training steps out.

Everything that a process needs to train by a plan is put together here, in this order: the variants
of the step (``variants``), this rank's part of the model (``RankModel``), the runner of its batches
(``BatchRunner``), the optimizer and its updates. Every rank of the world makes a ``Trainer``, and
calls ``step`` with the same global batch or its share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...cost_model.cluster.detect import threads_per_device
from ...passes.programs.program import Program
from ...planner.plan import Plan
from ..checkpoint.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from ..checkpoint.parts import Stateful
from ..checkpoint.writer import CheckpointWriter, PendingSave
from ..data.batches import DataSource
from ..data.variants import Buckets, agreed, bucket_variants, variant_of
from ..launch.membership import check_plan
from ..parameters.initial_values import Weights
from ..update.deferred_update import why_not_deferred
from ..update.optimizer import BuildOptimizer, build_optimizer
from ..update.update import (
    BuildScheduler,
    PartedUpdate,
    Update,
    UpdateOptions,
    check_updates_itself,
)
from .batch_runner import BatchRunner
from .checkpoint_state import rank_state
from .rank_model import RankModel
from .training_step import StepResult, TrainingStep


class RankTrainer(Protocol):
    """Interface of one rank's training by a plan, with or without parameter servers. ``trains``:
    the rank takes steps; a rank with only a parameter server serves weights in ``finish``.
    ``reports``: the rank prints the steps. ``optimizer`` is None if servers update the weights."""

    plan: Plan
    program: Program
    model: RankModel
    device: torch.device

    @property
    def trains(self) -> bool: ...
    @property
    def optimizer(self) -> Optimizer | None: ...
    @property
    def batches(self) -> DataSource: ...
    @property
    def reports(self) -> bool: ...

    def step(self, *batches: Mapping[str, Tensor]) -> StepResult: ...
    def settle(self) -> None: ...
    def finish(self, progress: Callable[[str], None] | None = None) -> None: ...


class Trainer:
    """Training by a plan on this rank: ``model`` is its part of the model, ``runner`` runs batches.

    ``parts`` are objects with ``state_dict`` and ``load_state_dict`` that checkpoints hold under
    their names. ``overlaps_steps``, read by ``use_update``: if the plan allows it, a step's update
    is left to the next step's forward; call ``settle`` before you read weights between steps.
    """

    trains = True

    def __init__(
        self,
        program: Program,
        plan: Plan,
        weights: Weights,
        *,
        device: torch.device,
        build: BuildOptimizer | None = None,
        progress: Callable[..., None] | None = None,
        seed: int = 0,
        buckets: Buckets = (),
    ) -> None:
        """Make the trainer; ``weights`` are the initial weights, made or given by name. Collective.

        ``seed``, the same on every rank, is for dropout and other random numbers. ``buckets`` are
        sequence lengths below the planned one, with numbers of rows if not the planned one: a step
        runs at the shortest that fits its batch.

        Raises PlanError (AP550) where the plan is for another model and MachineError: AP410 where
        there are fewer processes than the plan has devices, AP413 where a device has no hardware
        for bf16 or fp8, or torchao is missing for fp8.
        """
        check_plan(program, plan, device)
        planned = variant_of(program, plan)
        shorter = [agreed(each) for each in bucket_variants(planned, buckets)]
        self.plan, self.device = plan, device
        self.program, self.schedule = planned.program, planned.schedule
        self.parts: dict[str, Stateful] = {}
        self.checkpoints = CheckpointWriter()
        self.overlaps_steps = False
        self.model = RankModel(planned, weights, device=device, progress=progress)
        self.reports = self.model.rank == 0
        self.runner = BatchRunner(
            self.model, shorter, step_optimizer=self._step_optimizer, seed=seed, progress=progress
        )
        self.use_optimizer(build)

    @property
    def batches(self) -> DataSource:
        """The source of this rank's batches."""
        return self.runner.batches

    def step(self, *batches: Mapping[str, Tensor]) -> StepResult:
        """Run one training step on the global batch: forward, backward, gradient sums, update.

        With gradient accumulation, several batches are given and their gradients averaged. An
        asynchronous schedule runs the optimizer several times; the norm returned is of the last
        update's gradient.
        """
        *others, last = batches
        for batch in others:
            self.steps.accumulate(batch)
        return self.steps.step(last)

    def finish(self, progress: Callable[[str], None] | None = None) -> None:
        """Read the loss and norm of the last step; raise an error if they are not finite."""
        self.steps.finish()

    def _step_optimizer(self) -> None:
        self.optimizer.step()

    def settle(self) -> None:
        """Finish the update that the last step may have deferred, before weights are read."""
        self.runner.settle()

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Overwrite the buffers that training does not change, and recompute the constants that
        depend on them."""
        self.model.take_buffers(buffers)
        self.runner.refresh_constants()

    def use_optimizer(self, build: BuildOptimizer | None) -> None:
        """Replace the optimizer by the user's, or by the plan's; update options are reset.

        ``build`` may read this trainer's parameters, which exist by then. Raises as
        ``runtime.update.optimizer.build_optimizer`` does.
        """
        self.settle()
        self.optimizer: Optimizer = build_optimizer(
            self.model.all_parameters(),
            build,
            name=self.plan.model.optimizer,
            stand_ins=self.model.stand_ins(),
        )
        self.use_update(UpdateOptions())

    def use_update(
        self, options: UpdateOptions, build_scheduler: BuildScheduler | None = None
    ) -> None:
        """Set how steps clip, accumulate and scale gradients, and schedule the learning rate.
        Raises UsageError AP901 where the schedule is asynchronous: its updates are made stage by
        stage, before the norm is known."""
        options = options.for_precision(self.plan.model.precision, self.device.type)
        if self.schedule.is_asynchronous:
            check_updates_itself(options, self.schedule.name)
        parted, parameters = None, self.model.all_parameters()
        casts = any(parameter.casts_gradient for parameter in parameters)
        if casts and not self.schedule.is_asynchronous:
            host = self.plan.cluster.hosts[self.plan.cluster.host_of[self.model.rank]]
            parted = PartedUpdate(parameters, self.device, threads_per_device(host.num_devices))
        self.runner.publish_later(parted is not None)
        defers = self.overlaps_steps and parted is None
        defers = defers and not why_not_deferred(options, self.optimizer)
        self.runner.defer_updates(self.optimizer if defers else None)
        update = Update(
            options,
            self.optimizer,
            device=self.device,
            build_scheduler=build_scheduler,
            parted=parted,
        )
        self.steps = TrainingStep(self.runner, update)

    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: Optimizer | None,
        parts: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> PendingSave:
        """Write the checkpoint ``folder/step-N``, for this or any other plan.

        ``optimizer`` is the optimizer that trains: the trainer's or the user's, or None to save
        only the model. ``keep`` is the number of checkpoints that stay (None: all).
        ``asynchronous`` copies all to CPU memory and writes in the background. Collective over all
        ranks; raises as ``save_checkpoint`` does.
        """
        state = self._state(optimizer, parts)
        return save_checkpoint(
            folder, state, self.checkpoints, step=step, keep=keep, asynchronous=asynchronous
        )

    def load(
        self,
        path: str | Path,
        *,
        optimizer: Optimizer | None,
        parts: Mapping[str, Stateful] | None = None,
        optional: Container[str] = (),
    ) -> int:
        """Continue from the checkpoint ``path``, or the newest in that folder; return its step.

        Random numbers of the forward continue from there. A checkpoint may lack the ``optional``
        parts. Collective over all ranks; raises as ``load_checkpoint`` does.
        """
        self.checkpoints.wait()
        found = load_checkpoint(path, self._state(optimizer, parts, optional))
        self.runner.take_draws(found.facts.get("draws") or {}, found.step)
        self.runner.refresh_constants()
        for parameter in self.model.all_parameters():
            parameter.refresh()
        return found.step

    def _state(
        self,
        optimizer: Optimizer | None,
        parts: Mapping[str, Stateful] | None,
        optional: Container[str] = (),
    ) -> TrainingState:
        self.settle()
        given, draws = {**self.parts, **(parts or {})}, self.runner.draws()
        return rank_state(self.model, optimizer, given, draws=draws, optional=optional)
