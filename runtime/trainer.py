"""One rank's trainer: a captured program and a plan in, training steps out.

Everything that a process needs to train by a plan is put together here: the stage's program, its
module with this rank's shards, optimizer, messages and schedule. Every rank of the world makes a
``Trainer``, and calls ``step`` with the same global batch or its share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..cost_model.actions import Schedule
from ..passes.program import Program
from ..passes.stage_cut import Boundary, boundaries, with_replicas
from ..passes.stage_program import StageProgram, build_stage
from ..planner.arranged.asynchronous import check_asynchronous
from ..planner.arranged.sequence_slices import SequenceSlice
from ..planner.errors import AutoparallelError
from ..planner.plan import Plan
from ..planner.plan_schedule import schedule_of, splits_backward, updating_plan
from ..planner.replicas import check_replicas, placed_stages
from .arriving import end_before_exit
from .batches import RankInputs, StepBatches
from .buckets import bucket_graphs, bucket_of, bucket_programs
from .checkpoint import load_checkpoint, save_checkpoint
from .checkpoint_parts import Stateful
from .checkpoint_state import persistent_shapes, trainer_state, untrained_names
from .checkpoint_writer import CheckpointWriter, PendingSave
from .communicator import ProcessCommunicator
from .compiling import BlockCompiler
from .data import microbatch_rows
from .diagnosis import diagnosis
from .exchange import Exchange
from .executor import StageExecutor
from .handover import Handover, split_boundaries
from .initial_values import Weights, constants_of, fill_stages, whole_tensors
from .lane_check import check_lanes
from .lanes import Lanes
from .membership import check_plan
from .mesh import build_meshes, stages_of_rank
from .optimizer import (
    BuildOptimizer,
    GradientNorm,
    build_optimizer,
    gradient_norm,
    published,
)
from .padded import SequencePadding
from .parameters import StageParameter
from .pipeline import Hooks, PipelineRunner
from .share_batch import ShareBatch, gather_whole
from .shared import group_for
from .sliced import SlicedExecutor, boundaries_of, slice_programs, slices_of
from .smaller_programs import smaller_runner
from .stage import StageModule
from .tied import find_tied
from .training_step import StepResult, TrainingStep, Used
from .update import BuildScheduler, Update, UpdateOptions, check_updates_itself
from .versions import WeightVersions


class Trainer:
    """Trains on this rank; ``stages`` are those it works for, none if the plan leaves it idle.

    ``parameters`` has each parameter once; two of the stages may both hold it. ``untrained`` is, on
    rank 0, what training leaves alone of the model's ``state_dict``, whose shapes are
    ``persistent``; ``beside`` has the parameters among it that a script has. ``parts`` are objects
    with ``state_dict`` and ``load_state_dict`` that checkpoints hold under their names.
    """

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
        buckets: Sequence[int] = (),
    ) -> None:
        """``weights`` are the initial ones, made or given by name. Collective over all ranks.

        ``seed`` is of dropout and other random numbers, the same on every rank. ``buckets`` are
        shorter lengths than the planned one: a step runs at the shortest that its batch fits.

        Raises PlanError (AP550) where the plan is for another model and MachineError (AP410)
        where there are fewer processes than the plan has devices, AP413 for bf16 without units.
        """
        check_plan(program, plan, device)
        check_asynchronous(plan, program.graph, program.blocks)
        self.plan = plan
        self.program = program.with_batch_size(plan.microbatch_size)
        self.device = device
        self.rank, self._lanes = dist.get_rank(), Lanes(device)
        meshes = build_meshes(plan, device.type)
        self.crossing = boundaries(self.program.graph, self.program.blocks, plan)
        pairs = {(b.source_stage, b.target_stage) for b in self.crossing}
        self.schedule = schedule_of(plan, pairs)
        self.batches = StepBatches(
            self.program, plan, rank=self.rank, device=device, crossing=frozenset(pairs),
            progress=progress,
        )  # fmt: skip
        self.slices = slices_of(self.program, plan)
        self._bucket = 0
        self._pad = SequencePadding(self.program.graph)
        self.buckets = tuple(buckets)
        self.of_buckets = bucket_graphs(
            self.program, updating_plan(plan, self.schedule), self.buckets
        )
        if self.schedule.parts:
            self.crossing = with_replicas(self.crossing, len(plan.stages))
            check_replicas(self.program.graph)
        self._compiler = BlockCompiler() if plan.compiled else None
        self.stages: dict[int, StageModule] = {}
        self.of_slices: dict[int, tuple[StageProgram, ...]] = {}
        for index in stages_of_rank(plan, self.rank):
            self.stages[index] = self._make_stage(index, ProcessCommunicator(meshes[index]))
        read = fill_stages(self.stages.values(), weights, self.program, progress)
        self.leaves = {name: tensor.clone() for name, tensor in read.items()}
        self.parameters: dict[str, StageParameter] = {}
        for parameter in self.all_parameters():
            self.parameters.setdefault(parameter.name, parameter)
        self.tied = find_tied({index: stage.by_name for index, stage in self.stages.items()})
        names = untrained_names(self.program, weights) if self.rank == 0 else ()
        self.untrained = whole_tensors(names, weights)
        self.persistent = persistent_shapes(program.model)
        self.beside: dict[str, nn.Parameter] = {}
        self.parts: dict[str, Stateful] = {}
        self.checkpoints = CheckpointWriter()
        self.executors = {index: self._make_executor(index, seed) for index in self.stages}
        self.progress = progress
        self.use_optimizer(build)
        sent = (self.crossing, *map(self._boundaries_of, self.of_buckets))
        self.runners = [self.make_runner(self.schedule, each) for each in sent]
        self._smaller: dict[int, int] = {}

    def _make_stage(self, index: int, communicator: ProcessCommunicator) -> StageModule:
        own = placed_stages(self.plan)[index]
        build = partial(
            build_stage,
            stage_index=self.schedule.part(index),
            coordinates=own.mesh.coordinates(own.devices.index(self.rank)),
            communicator=communicator,
        )
        self.of_slices[index] = slice_programs(
            self.slices, self.program.graph, index,
            lambda each, of: build(each.graph, each.blocks, each.plan, of_slice=of),
        )  # fmt: skip
        whole, plan = self.program, updating_plan(self.plan, self.schedule)
        programs = self.of_slices[index] or (
            build(whole.graph, whole.blocks, plan, outputs=whole.returned),
        )
        stage = StageModule(
            programs[0], communicator.device_mesh, zero=own.zero, device=self.device,
            precision=self.plan.model.precision,
            splits_backward=splits_backward(self.schedule, index), compiler=self._compiler,
        )  # fmt: skip
        shorter = bucket_programs(
            self.of_buckets, whole.graph, programs[0].draws,
            lambda each, of: build(each.graph, each.blocks, each.plan, of_slice=of),
        )  # fmt: skip
        if shorter:
            stage.run_slices((*programs, *shorter))
        return stage

    def _boundaries_of(self, bucket: SequenceSlice) -> tuple[Boundary, ...]:
        """What crosses stages in the graph of a bucket."""
        found = boundaries(bucket.graph, bucket.blocks, bucket.plan)
        return with_replicas(found, len(self.plan.stages)) if self.schedule.parts else found

    def constants_for(
        self, program: Program, stage: StageProgram
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The constants of a stage's program: for its blocks, and for what it counts."""
        counted = constants_of(program, stage, self.leaves, str(self.device))
        if stage.share is None:
            return counted, counted
        own = program.with_batch_size(stage.share.batch_size)
        return constants_of(own, stage, self.leaves, str(self.device)), counted

    def _make_executor(self, index: int, seed: int) -> StageExecutor:
        stage, count = self.stages[index], self.plan.num_microbatches
        constants, counted = self.constants_for(self.program, stage.program)
        if not self.slices:
            return StageExecutor(
                stage, num_microbatches=count, constants=constants, counted=counted, seed=seed,
                per_update=self.schedule.per_update, versions=self._make_versions(stage),
            )  # fmt: skip
        return SlicedExecutor(
            stage, self.of_slices[index], self.slices[-1].carried[index],
            num_microbatches=count, constants=constants, seed=seed,
        )  # fmt: skip

    def _make_versions(self, stage: StageModule) -> WeightVersions | None:
        held, index = stage.by_name.values(), stage.program.index
        asynchronous = self.schedule.is_asynchronous
        return WeightVersions(held, self.schedule, index) if asynchronous else None

    def make_runner(self, schedule: Schedule, crossing: Sequence[Boundary]) -> PipelineRunner:
        """What runs a schedule's steps with this rank's executors. Collective over all ranks.
        Raises as ``check_lanes`` does."""
        stages = placed_stages(self.plan)
        sent, handed = split_boundaries(crossing, stages)
        exchange = Exchange(
            boundaries_of(self.slices) or [sent], schedule=schedule, stages=stages,
            rank=self.rank, device=self.device, lanes=self._lanes, progress=self.progress,
        )  # fmt: skip
        check_lanes(*exchange.sequences())
        return PipelineRunner(
            schedule,
            self.executors,
            exchange,
            handover=Handover(handed, stages=stages, rank=self.rank, device=self.device),
            hooks=Hooks(
                self._sum_tied,
                self._update_early if self.schedule.is_asynchronous else None,
                self.progress,
            ),
        )

    def _update_early(self) -> None:
        """An update in the middle of a step, of this rank's only stage."""
        (executor,) = self.executors.values()
        executor.update(self.optimizer.step)

    def _sum_tied(self) -> None:
        self.tied.sum({index: stage.by_name for index, stage in self.stages.items()})

    def all_parameters(self) -> list[StageParameter]:
        """What this rank's stages hold, one stage after the other."""
        return [p for stage in self.stages.values() for p in stage.by_name.values()]

    def own_parameters(self) -> list[StageParameter]:
        """``all_parameters`` but for those that an earlier stage holds; of all ranks, the model."""
        return [
            parameter
            for index, stage in self.stages.items()
            for name, parameter in stage.by_name.items()
            if (index, name) not in self.tied.elsewhere
        ]

    def inputs(self, batch: object) -> RankInputs:
        """A batch's tensors by the names that the plan has for them."""
        return self.batches.named(batch)

    def step(self, *batches: Mapping[str, Tensor]) -> StepResult:
        """One step on the global batch: forward, backward, gradient sums, the update.

        Of several batches, as many as the options accumulate, the gradients are averaged. By an
        asynchronous schedule the optimizer runs several times, and the norm is that of the last
        update's gradient.
        """
        *others, last = batches
        for batch in others:
            self.steps.accumulate(batch)
        return self.steps.step(last)

    def backward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        scale: Tensor | float = 1.0,
        accumulates: bool = False,
        is_last: bool = True,
    ) -> Tensor:
        """The loss; every parameter's gradient is complete afterwards, if this ``is_last``.

        Gradients are those of the loss times ``scale``, added to those that are there if this
        ``accumulates``. By an asynchronous schedule the weights are updated as well.

        Raises as ``fitted`` does.
        """
        fitted = self.fitted(inputs)
        for executor in self.executors.values():
            executor.loss_scale, executor.keeps_gradients = scale, accumulates
        loss = self.runners[self._bucket].step(fitted, reduces=is_last)
        for executor in self.executors.values():
            executor.keeps_gradients = False
        return loss

    @property
    def batches_begun(self) -> int:
        """How many batches were run: they decide the random numbers of the next one."""
        return next((e.steps_begun for e in self.executors.values()), 0)

    @batches_begun.setter
    def batches_begun(self, count: int) -> None:
        for executor in self.executors.values():
            executor.steps_begun = count

    @property
    def updates_itself(self) -> bool:
        """Whether the schedule updates the weights in the middle of a step."""
        return self.schedule.is_asynchronous

    def norm(self) -> GradientNorm:
        """The norm of the complete gradient. Collective over all ranks."""
        norm = gradient_norm(self.own_parameters(), device=self.device, progress=self.progress)
        end_before_exit("norm", norm.arrival)
        return norm

    def gradients(self) -> list[Tensor]:
        """This rank's part of the gradients that the optimizer reads."""
        return published(self.all_parameters())

    def diagnosis(self, batches: Sequence[Used]) -> AutoparallelError:
        """The error that says where the first value came from that is not finite. Collective."""
        return diagnosis(self, batches)

    def fitted(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A step's batch in the plan's shapes: shorter sequences are padded.

        ``inputs`` are the global batch or this rank's share of it. The executors run it at the
        shortest bucket that it fits, and a batch of fewer rows than planned by programs of its
        own. Collective over all ranks.

        Raises as ``StepBatches.take`` does; UsageError AP130 for a batch of other shapes than the
        plan's, AP836 for a smaller one that the plan cannot run, and PlanError AP560 where
        padding would change the result.
        """
        batch, rows = self.batches.take(inputs)
        self._bucket = self._bucket_of(batch) if rows == self.batches.global_rows else 0
        padded = self._pad(batch)
        if isinstance(batch, ShareBatch):
            padded = ShareBatch(padded, batch.held, batch.dims)
        self.batches.check_shapes(padded, rows)
        if rows != self.batches.global_rows:
            self._bucket = self._program_of(rows)
        found = self.batches.batch(rows).rows
        for index, executor in self.executors.items():
            executor.use(self._bucket)
            of_stage = found[self.schedule.part(index)]
            if isinstance(padded, ShareBatch) and of_stage is not None:
                mesh, at = executor.program.mesh, executor.program.coordinates
                communicator = ProcessCommunicator(executor.stage.device_mesh)
                gather_whole(padded, of_stage, of_stage.part(mesh, at), communicator, self.device)
        return padded

    def _bucket_of(self, batch: Mapping[str, Tensor]) -> int:
        """The bucket that a step runs; of shares the one that fits the longest."""
        if not self.buckets:
            return 0
        length = self._pad.length(batch)
        if isinstance(batch, ShareBatch) or not batch:
            planned = self._pad.planned
            own = 0 if not batch else planned if length is None else length
            longest = torch.tensor(own)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group_for(longest))
            length = int(longest)
        return bucket_of(self.buckets, length)

    def _program_of(self, rows: int) -> int:
        """Which of the executors' programs runs global batches of ``rows``; made once.

        Collective over all ranks.
        """
        if rows not in self._smaller:
            self._smaller[rows] = len(self.runners)
            self.runners.append(smaller_runner(self, self.batches.batch(rows).plan))
        return self._smaller[rows]

    def fixed_buffers(self) -> set[str]:
        """The buffers that the model reads and training does not change."""
        return {*self.program.buffers} - self.program.graph.updates.keys()

    def take_constants(self, buffers: Mapping[str, Tensor]) -> None:
        """Compute with other values of the buffers that training does not change."""
        for name in self.leaves.keys() & buffers.keys():
            self.leaves[name].copy_(buffers[name].detach())
        for index, stage in self.stages.items():
            executor = self.executors[index]
            executor.use_constants(*self.constants_for(self.program, stage.program))
            for name in stage.program.buffers.keys() & buffers.keys():
                box = tuple(slice(start, stop) for start, stop in stage.buffer_regions[name])
                stage.buffer(name).copy_(buffers[name].detach()[box])

    def reference_split(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], ...]:
        """The parts of a global batch that one device has to run apart to do the same.

        Those of each update (the whole batch, unless the schedule is asynchronous), or the
        micro-batches where rows see each other.
        """
        count = self.plan.num_microbatches
        if not self.program.graph.accumulation.mixing:
            count //= self.schedule.per_update
        if count == 1:
            return (batch,)
        graph = self.program.graph.with_batch_size(self.plan.model.global_batch // count)
        return tuple(
            {
                name: microbatch_rows(name, tensor, graph[name].spec, part, count)
                for name, tensor in batch.items()
            }
            for part in range(count)
        )

    def use_optimizer(self, build: BuildOptimizer | None) -> None:
        """Replace the optimizer by the user's, or by the plan's; updates are plain again.

        ``build`` may read this trainer's parameters: all are there. Raises as
        ``runtime.optimizer.build_optimizer`` does.
        """
        self.optimizer: Optimizer = build_optimizer(
            self.all_parameters(), build, name=self.plan.model.optimizer,
            stand_ins=self._stand_ins(),
        )  # fmt: skip
        self.use_update(UpdateOptions())

    def _stand_ins(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters without memory for those of the whole model that are trained."""
        for node in self.program.graph.parameters:
            if node.spec.requires_grad:
                dtype = getattr(torch, node.spec.dtype)
                empty = torch.empty(node.spec.shape, dtype=dtype, device="meta")
                yield node.name, nn.Parameter(empty)

    def use_update(
        self, options: UpdateOptions, build_scheduler: BuildScheduler | None = None
    ) -> None:
        """Have steps clip, accumulate, scale and schedule as ``options`` say.

        Raises UsageError AP901 where the schedule is asynchronous: its updates are made stage
        by stage, before there is a norm.
        """
        options = options.for_precision(self.plan.model.precision, self.device.type)
        if self.schedule.is_asynchronous:
            check_updates_itself(options, self.schedule.name)
        self.steps = TrainingStep(
            self,
            Update(options, self.optimizer, device=self.device, build_scheduler=build_scheduler),
        )

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

        ``optimizer`` is the one that trains: the trainer's or the user's, or None to save only
        the model. With ``keep`` only that many checkpoints stay. ``asynchronous`` copies all to
        CPU memory and writes in the background. Collective over all ranks; raises as
        ``save_checkpoint`` does.
        """
        state = trainer_state(self, optimizer, {**self.parts, **(parts or {})})
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
        """Go on from the checkpoint ``path``, or the newest in it; the step that it is of.

        Random numbers of the forward go on from there. A checkpoint may lack the ``optional``
        parts. Collective over all ranks; raises as ``load_checkpoint`` does.
        """
        self.checkpoints.wait()
        given = {**self.parts, **(parts or {})}
        state = trainer_state(self, optimizer, given, optional=optional)
        found = load_checkpoint(path, state)
        draws = found.facts.get("draws") or {}
        for executor in self.executors.values():
            executor.steps_begun = draws.get("steps_begun", found.step)
            executor.seed = draws.get("seed", executor.seed)
            if self.leaves:
                executor.use_constants(*self.constants_for(self.program, executor.stage.program))
        for parameter in self.all_parameters():
            parameter.refresh()
        return found.step

    def changing_buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's stages that training changes."""
        return {
            name: buffer
            for stage in self.stages.values()
            for name, buffer in stage.changing_buffers().items()
        }
