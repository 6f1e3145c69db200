"""Forwards and backwards of global batches, each by the variant of the step that it fits.

In: a rank's part of the model (``RankModel``), the planned variant and its buckets. Out:
``backward(batch)``, the loss of a batch, whose gradients are then complete, their norm, and a
diagnosis, as ``TrainingStep`` needs them. Variants of smaller batches are made when such a batch
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...passes.local.live_numbers import LiveNumbers
from ...passes.ops.random_ops import Draws
from ...passes.programs.batch import Batch, fill_batch
from ...passes.programs.length_numbers import find_length_number
from ...planner.dims.padding import Padding, unpaddable
from ...planner.errors import AutoparallelError
from ...planner.variants.replicas import placed_stages
from ..data.batches import StepBatches
from ..data.rank_batch import ShareBatch, gather_whole
from ..data.variants import (
    BatchShape,
    SequencePadding,
    Variant,
    bucket_of,
    refused_batch,
    variant_of,
)
from ..messages.communicator import ProcessCommunicator
from ..messages.exchange import Exchange
from ..messages.local_transfer import LocalTransfer, split_boundaries
from ..messages.ordered_channels import Lanes, check_lanes
from ..messages.pending_results import Pending, Progress, end_before_exit
from ..messages.shared_objects import gather_values, group_for
from ..update.deferred_update import DeferredUpdate
from ..update.optimizer import gradient_norm, published_gradients
from .diagnosis import diagnosis
from .executor import StageVariant
from .pipeline import Hooks, PipelineRunner, StepMoments
from .rank_model import RankModel
from .training_step import Used


class BatchRunner:
    """Runner of training batches on one rank: forward, backward and gradient sums. ``shape`` is the
    shape of the last batch, by which its programs were chosen."""

    def __init__(
        self,
        model: RankModel,
        buckets: Sequence[Variant],
        *,
        step_optimizer: Callable[[], None],
        seed: int,
        progress: Progress | None,
    ) -> None:
        """Make a runner. ``buckets`` are variants of the planned step for shorter sequences, whose
        batches may have other numbers of rows. Asynchronous schedules call ``step_optimizer``
        within a step. Collective over all ranks."""
        planned = model.planned
        self.shape = planned.shape
        self.batches = StepBatches(
            model.program, model.plan, rank=model.rank, device=model.device, progress=progress
        )
        self.executors = {index: model.executor(index, seed) for index in model.stages}
        self.model, self.device, self.progress = model, model.device, progress
        self._step_optimizer = step_optimizer
        self.before_first: Callable[[Mapping[str, Tensor]], None] | None = None
        """Callback with the inputs of the first batch, before it is run."""
        self.captures: Callable[[int], int] = lambda rows: 0
        """Function from a batch's rows to the number of the model's capture that computes it."""
        self._deferred: DeferredUpdate | None = None
        self._lanes = Lanes(model.device)
        self._pad = SequencePadding(model.program.graph, self._check_length)
        self._buckets = [each.shape for each in buckets]
        own = {index: executor.variant for index, executor in self.executors.items()}
        self._stage_variants: dict[BatchShape, Mapping[int, StageVariant]] = {self.shape: own}
        self._pipelines = {self.shape: self._make_pipeline(planned)}
        for bucket in buckets:
            if bucket.shape.rows != self.shape.rows:
                model.take_program(bucket.shape.rows, 0, bucket.program)
                self.batches.batch(bucket.shape.rows)
            self.add(bucket)

    def _check_length(self, length: int, paddings: Mapping[str, Padding]) -> None:
        """Raise PlanError AP560 if the model computes with a Python number that depends on the
        sequence length. The model is traced again at ``length``; ``paddings`` are the inputs'
        paddings by name."""
        program = self.model.program
        if program.recapture is None:
            return

        def shorter(batch: Batch) -> Batch:
            made = {}
            for name, padding in paddings.items():
                place = program.inputs[name]
                value = place.read(batch)
                for dim in padding.dims:
                    value = value.narrow(dim, 0, length)
                made[place.path] = place.given(value)
            return fill_batch(batch, made)

        found = program.recapture(self.batches.global_rows, shorter)
        node = find_length_number(program, found)
        if node is not None:
            raise unpaddable(node, "the model computes with a number that it makes of the length")

    def add(self, variant: Variant, numbers: LiveNumbers | None = None) -> bool:
        """Add the variant of the step for another shape of batches. ``numbers`` are Python numbers
        in the model's code that are to be read anew in each step; return False if some rank's stage
        cannot do so. Collective over all ranks."""
        found = {index: self.model.add_variant(variant, index, numbers) for index in self.executors}
        if numbers is not None and not all(gather_values(None not in found.values())):
            return False
        self._stage_variants[variant.shape] = {
            index: each for index, each in found.items() if each is not None
        }
        self._pipelines[variant.shape] = self._make_pipeline(variant)
        return True

    def _make_pipeline(self, variant: Variant) -> PipelineRunner:
        """Make the ``PipelineRunner`` of a variant's steps. Collective over all ranks; raises as
        ``check_lanes``."""
        model, stages = self.model, placed_stages(variant.plan)
        crossing = [split_boundaries(each, stages) for each in variant.crossing()]
        exchange = Exchange(
            [sent for sent, _ in crossing],
            schedule=variant.schedule,
            stages=stages,
            rank=model.rank,
            device=model.device,
            lanes=self._lanes,
            progress=self.progress,
        )
        check_lanes(*exchange.sequences())
        handed = crossing[0][1]  # no schedule of slices has two stages on one rank
        return PipelineRunner(
            variant.schedule,
            self.executors,
            exchange,
            handover=LocalTransfer(handed, stages=stages, rank=model.rank, device=model.device),
            hooks=Hooks(
                model.sum_tied,
                self._update_early if variant.schedule.is_asynchronous else None,
                self.progress,
            ),
        )

    def _update_early(self) -> None:
        """Run the optimizer on this rank's only stage before the end of a step."""
        (executor,) = self.executors.values()
        executor.update(self._step_optimizer)

    def backward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        scale: Tensor | float = 1.0,
        accumulates: bool = False,
        is_last: bool = True,
    ) -> Tensor:
        """Run forward and backward of a batch and return the loss. If ``is_last``, all gradients
        are summed over ranks on return.

        Gradients are of the loss times ``scale``, added to existing gradients if ``accumulates``.
        An asynchronous schedule also updates the weights. Raises as ``fit`` does.
        """
        batch = self.fit(inputs)
        for executor in self.executors.values():
            executor.loss_scale, executor.keeps_gradients = scale, accumulates
            executor.defers = self._deferred is not None
        loss = self._pipelines[self.shape].step(batch, reduces=is_last)
        for executor in self.executors.values():
            executor.keeps_gradients = False
        if self._deferred is not None and is_last:
            self._deferred.begin()
        return loss

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context to run a batch in as a trial: no update is deferred, no step and no token is
        counted."""
        deferred, self._deferred = self._deferred, None
        counted = [(draws, draws.routed) for draws in self._draws]
        for draws in self._draws:
            draws.routed = None
        try:
            yield
        finally:
            self._deferred = deferred
            for draws, routed in counted:
                draws.routed = routed
            self.batches.forget()

    def defer_updates(self, optimizer: Optimizer | None) -> None:
        """Let steps leave their updates by ``optimizer`` to the next step's forward, if the plan
        allows it; None ends this."""
        self.settle()
        self._deferred = None
        if optimizer is None or len(self.executors) != 1:
            return
        (executor,) = self.executors.values()
        others = tuple(r for r in range(dist.get_world_size()) if r != self.model.rank)
        words = "waiting for the sums of gradients", others
        tell = (lambda: None) if self.progress is None else partial(self.progress, *words)
        self._deferred = executor.deferred_update(optimizer, tell)

    def settle(self) -> None:
        """Finish the updates that the last step has left to the next forward."""
        if self._deferred is not None:
            self._deferred.settle()

    def set_clock(self, clock: Callable[[], Any] | None) -> None:
        """Record, by calls of ``clock``, when each action of a step begins and ends; None ends the
        recording."""
        for pipeline in self._pipelines.values():
            pipeline.clock = clock

    @property
    def moments(self) -> StepMoments | None:
        """The recorded times of the last batch's actions; None without a clock."""
        return self._pipelines[self.shape].moments

    def fit(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Prepare a step's batch: pad its sequences, and set the executors to the programs for its
        shape.

        ``inputs`` are the global batch or this rank's share of it. The programs are of the shortest
        sequence length (bucket) that fits, or of fewer rows than planned. Collective over all
        ranks.

        Raises as ``StepBatches.take`` does; UsageError AP130 for a batch of other shapes than the
        plan's, AP836 for a smaller batch that the plan cannot run, and PlanError AP560 where
        padding would change the result.
        """
        if self.before_first is not None and torch.is_grad_enabled():
            check, self.before_first = self.before_first, None
            check(inputs)
        batch, rows = self.batches.take(inputs)
        capture = self.captures(rows)
        length = None if capture else bucket_of(self._buckets, rows, self._length(batch))
        if length is None and rows > self.batches.global_rows:
            raise refused_batch(self.model.plan, rows, "no bucket is as long")
        padded = self._pad(batch)
        if isinstance(batch, ShareBatch):
            padded = ShareBatch(padded, batch.held, batch.dims)
        self.batches.check_shapes(padded, rows)
        self.shape = BatchShape(rows, length, capture)
        if self.shape not in self._pipelines:
            self.add(variant_of(self.model.program_of(rows), self.batches.batch(rows).plan))
        for index, executor in self.executors.items():
            executor.use(self._stage_variants[self.shape][index])
            if isinstance(padded, ShareBatch):
                self._gather(padded, index)
        return padded

    def _length(self, batch: Mapping[str, Tensor]) -> int | None:
        """Return the sequence length of a batch if shorter than planned, else None; for shares, the
        longest of all ranks."""
        if not self._buckets:
            return None
        length = self._pad.length(batch)
        if batch and not isinstance(batch, ShareBatch):
            return length
        planned = self._pad.planned
        own = 0 if not batch else planned if length is None else length
        longest = torch.tensor(own)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group_for(longest))
        return int(longest)

    def _gather(self, batch: ShareBatch, index: int) -> None:
        """Gather the inputs of which stage ``index`` needs all rows: all inputs in a bucket, whose
        layouts may split other rows. Collective over the stage."""
        rows = self.batches.batch(self.shape.rows).rows[self.model.planned.schedule.part(index)]
        if rows is not None:
            if self.shape.length is not None:
                rows = replace(rows, whole=tuple(rows.inputs))
            program = self.executors[index].program
            communicator = ProcessCommunicator(self.model.stages[index].device_mesh)
            part = rows.part(program.mesh, program.coordinates)
            gather_whole(batch, rows, part, communicator, self.model.device)

    def refresh_constants(self) -> None:
        """Recompute the values that are constant between steps from the model's buffers."""
        for executor in self.executors.values():
            executor.refresh_constants()

    def forget_constants(self, rows: int, capture: int) -> None:
        """Drop the constants that belong to batches of ``rows`` rows and to trace number
        ``capture`` of the model; their next use computes them again."""
        for executor in self.executors.values():
            executor.forget_constants(rows, capture)

    def publish_later(self, later: bool) -> None:
        """Set whether the caller, not the executors, copies gradients to the masters' ``grad``
        where the masters have another dtype or device."""
        for executor in self.executors.values():
            executor.publishes_later = later

    def norm(self) -> Pending:
        """Return the 2-norm of the whole model's gradient, which may not have arrived yet.
        Collective over all ranks."""
        if self._deferred is not None:
            return self._deferred.norm
        own = self.model.own_parameters()
        norm = gradient_norm(own, device=self.device, progress=self.progress)
        end_before_exit("norm", norm.arrival)
        return norm

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of each gradient that the optimizer reads."""
        return published_gradients(self.model.all_parameters())

    def diagnosis(self, batches: Sequence[Used]) -> AutoparallelError:
        """Run ``batches`` again to find the first value that is not finite; return the error that
        names it. Collective."""
        return diagnosis(self, batches)

    @property
    def updates_itself(self) -> bool:
        """Tell whether steps update the weights themselves (by an asynchronous schedule, or
        deferred to the next step's forward), so that the caller must not step the optimizer."""
        return self._deferred is not None or self.model.planned.schedule.is_asynchronous

    @property
    def batches_begun(self) -> int:
        """The number of batches run so far, which decides the random numbers of the next batch."""
        return next((e.steps_begun for e in self.executors.values()), 0)

    @batches_begun.setter
    def batches_begun(self, count: int) -> None:
        for executor in self.executors.values():
            executor.steps_begun = count

    @property
    def _draws(self) -> list[Draws]:
        return [executor.stage.program.draws for executor in self.executors.values()]

    def draws(self) -> dict[str, int] | None:
        """Return the seed and count that decide the random numbers of the next batch; None on an
        idle rank."""
        for executor in self.executors.values():
            return {"seed": executor.seed, "steps_begun": executor.steps_begun}
        return None

    def take_draws(self, draws: Mapping[str, Any], steps_begun: int) -> None:
        """Continue the random numbers from the state ``draws``; ``steps_begun`` replaces a missing
        count in it."""
        self.batches_begun = draws.get("steps_begun", steps_begun)
        for executor in self.executors.values():
            executor.seed = draws.get("seed", executor.seed)
