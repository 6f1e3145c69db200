"""One rank's trainer: a captured program and a plan in, training steps out.

Everything that a process needs to train by a plan is put together here: the stage's
program, its module with this rank's shards, optimizer, messages and schedule. Every rank of
the world makes a ``Trainer``, and calls ``step`` with the same global batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..passes.program import Program
from ..passes.stage_cut import Boundary, boundaries, with_replicas
from ..passes.stage_program import StageProgram, build_stage
from ..planner.arranged.asynchronous import check_asynchronous
from ..planner.arranged.sequence_slices import SequenceSlice
from ..planner.errors import MachineError, PlanError
from ..planner.plan import Plan
from ..planner.replicas import check_replicas, placed_stages
from .arriving import end_before_exit
from .buckets import bucket_graphs, bucket_of, bucket_programs
from .checkpoint import load_checkpoint, save_checkpoint
from .communicator import ProcessCommunicator
from .data import check_batch, microbatch_rows
from .exchange import Exchange
from .executor import StageExecutor
from .handover import Handover, split_boundaries
from .initial_values import Weights, constants_of, fill_stage
from .mesh import build_meshes, stages_of_rank
from .optimizer import BuildOptimizer, GradientNorm, build_optimizer, gradient_norm
from .padded import SequencePadding
from .parameters import StageParameter
from .pipeline import Hooks, PipelineRunner
from .plan_schedule import schedule_of, splits_backward, updating_plan
from .replay import UpdateRule
from .sliced import SlicedExecutor, boundaries_of, slice_programs, slices_of
from .stage import StageModule
from .tied import find_tied
from .versions import WeightVersions


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss of the global batch and the norm of the whole gradient, on every rank.

    Both are on their way when the step returns: who reads the loss waits for the last stage,
    who reads the norm for the gradients of all ranks; the step itself waits for neither.
    """

    loss: Tensor
    norm: GradientNorm

    @property
    def gradient_norm(self) -> Tensor:
        return self.norm.value()


class Trainer:
    """Trains on this rank; ``stages`` are those it works for, none if the plan leaves it idle.

    ``parameters`` has each parameter once; two of the stages may both hold it.
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
        where there are fewer processes than the plan has devices.
        """
        check_plan(program, plan)
        check_asynchronous(plan, program.graph, program.blocks)
        self.plan = plan
        self.program = program.with_batch_size(plan.microbatch_size)
        self.device = device
        self.rank = dist.get_rank()
        meshes = build_meshes(plan, device.type)
        self.crossing = boundaries(self.program.graph, self.program.blocks, plan)
        pairs = {(b.source_stage, b.target_stage) for b in self.crossing}
        self.schedule = schedule_of(plan, pairs)
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
        self.stages: dict[int, StageModule] = {}
        self.of_slices: dict[int, tuple[StageProgram, ...]] = {}
        for index in stages_of_rank(plan, self.rank):
            self.stages[index] = self._make_stage(index, ProcessCommunicator(meshes[index]))
            fill_stage(self.stages[index], weights, self.program)
        self.parameters: dict[str, StageParameter] = {}
        for parameter in self.all_parameters():
            self.parameters.setdefault(parameter.name, parameter)
        self.tied = find_tied({index: stage.by_name for index, stage in self.stages.items()})
        self.executors = {index: self._make_executor(index, weights, seed) for index in self.stages}
        self.optimizer: Optimizer = build_optimizer(
            self.all_parameters(), build, name=plan.model.optimizer
        )
        sent = [self.crossing, *(self._boundaries_of(each) for each in self.of_buckets)]
        self.runners = [self._make_runner(each, progress) for each in sent]

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
        whole = self.program
        plan = updating_plan(self.plan, self.schedule)
        programs = self.of_slices[index] or (
            build(whole.graph, whole.blocks, plan, outputs=whole.returned),
        )
        stage = StageModule(
            programs[0],
            communicator.device_mesh,
            zero=own.zero,
            precision=self.plan.model.precision,
            device=self.device,
            splits_backward=splits_backward(self.schedule, index),
        )
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

    def _make_executor(self, index: int, weights: Weights, seed: int) -> StageExecutor:
        stage, count = self.stages[index], self.plan.num_microbatches
        share, device = stage.program.share, str(self.device)
        constants = counted = constants_of(self.program, stage, weights, device)
        if share is not None:
            own = self.program.with_batch_size(share.batch_size)
            constants = constants_of(own, stage, weights, device)
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
        if not self.schedule.is_asynchronous:
            return None
        return WeightVersions(stage.by_name.values(), self.schedule, stage.program.index)

    def _make_runner(
        self, crossing: Sequence[Boundary], progress: Callable[..., None] | None
    ) -> PipelineRunner:
        stages = placed_stages(self.plan)
        sent, handed = split_boundaries(crossing, stages)
        return PipelineRunner(
            self.schedule,
            self.executors,
            Exchange(
                boundaries_of(self.slices) or [sent],
                stages=stages,
                rank=self.rank,
                device=self.device,
                progress=progress,
            ),
            handover=Handover(handed, stages=stages, rank=self.rank, device=self.device),
            hooks=Hooks(
                self._sum_tied,
                self._update_early if self.schedule.is_asynchronous else None,
                progress,
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

    def inputs(self, batch: object) -> dict[str, Tensor]:
        """A batch's tensors by the names that the plan has for them."""
        return {name: batch[key] for name, key in self.program.inputs.items()}  # type: ignore[index]

    def step(self, inputs: Mapping[str, Tensor]) -> StepResult:
        """One step on the global batch: forward, backward, gradient sums, optimizer.

        By an asynchronous schedule the optimizer runs several times, and the norm is that of
        the last update's gradient.
        """
        loss = self.backward(inputs)
        norm = gradient_norm(self.own_parameters(), device=self.device)
        end_before_exit("norm", norm.arrival)
        if not self.schedule.is_asynchronous:
            self.update()
        return StepResult(loss, norm)

    def backward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loss; every parameter's gradient is complete afterwards.

        By an asynchronous schedule the weights are updated as well.

        Raises as ``fitted`` does.
        """
        fitted = self.fitted(inputs)
        return self.runners[self._bucket].step(fitted)

    def fitted(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The global batch in the plan's shapes: shorter sequences are padded.

        The executors run it at the shortest bucket that it fits.

        Raises UsageError (AP130), on every rank, for a batch of other shapes than the plan's,
        and PlanError AP560 where padding would change the result.
        """
        length = self._pad.length(inputs) if self.buckets else None
        self._bucket = bucket_of(self.buckets, length)
        for executor in self.executors.values():
            executor.use(self._bucket)
        inputs = self._pad(inputs)
        specs = {name: self.program.graph[name].spec for name in self.program.inputs}
        check_batch(inputs, specs, self.plan.num_microbatches)
        return inputs

    def fixed_buffers(self) -> set[str]:
        """The buffers that the model reads and training does not change."""
        return {*self.program.buffers} - self.program.graph.updates.keys()

    def take_constants(self, buffers: Mapping[str, Tensor]) -> None:
        """Compute with other values of the buffers that training does not change."""
        for index, executor in self.executors.items():
            stage = self.stages[index]
            executor.take_constants(constants_of(self.program, stage, buffers, str(self.device)))
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

    def update_rule(self) -> UpdateRule | None:
        """What an asynchronous schedule does to the weights; None for others."""
        if not self.schedule.is_asynchronous:
            return None
        stage_of: dict[str, int] = {}
        blocks = iter(self.program.blocks.blocks)
        for index, stage in enumerate(self.plan.stages):
            for block in itertools.islice(blocks, len(stage.blocks)):
                stage_of.update(dict.fromkeys(block.parameters, index))
        return UpdateRule(
            self.schedule.weights,
            self.plan.num_microbatches // self.schedule.per_update,
            len(self.plan.stages),
            stage_of,
        )

    def use_optimizer(self, build: BuildOptimizer) -> None:
        """Replace the optimizer by ``build(parameters)``."""
        self.optimizer = build_optimizer(self.all_parameters(), build)

    def save(self, path: str | Path, *, step: int) -> None:
        """Write a checkpoint under the model's own names, for this or any other plan.

        Collective over all ranks.
        """
        save_checkpoint(
            path,
            self.own_parameters(),
            self.optimizer,
            step=step,
            tied=self.program.graph.tied,
            buffers=self.changing_buffers(),
        )

    def load(self, path: str | Path) -> int:
        """Take weights, buffers and optimizer state from a checkpoint; the step it is of.

        Random numbers of the forward go on from that step. Collective over all ranks.
        """
        slots = max(len(stages_of_rank(self.plan, r)) for r in range(dist.get_world_size()))
        stages = list(self.stages.values())
        step = 0
        for slot in range(slots):
            held = stages[slot].by_name.values() if slot < len(stages) else ()
            buffers = stages[slot].changing_buffers() if slot < len(stages) else {}
            step = load_checkpoint(path, held, self.optimizer, buffers)
        for executor in self.executors.values():
            executor.steps_begun = step
        return step

    def changing_buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's stages that training changes."""
        return {
            name: buffer
            for stage in self.stages.values()
            for name, buffer in stage.changing_buffers().items()
        }

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()


def join(device_type: str, local_rank: int) -> torch.device:
    """Joins the process group of the environment, unless the caller has; this rank's device.

    Raises MachineError (AP411) where the machine lacks that device.
    """
    if device_type != "cuda":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise MachineError(
            "AP411",
            f"the plan needs GPU {local_rank} of this machine, which has {count}",
            fix="plan for the devices at hand: --cluster local",
        )
    torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl")
    return torch.device("cuda", local_rank)


def check_plan(program: Program, plan: Plan) -> None:
    """Raises where ``plan`` is not of this model, or there are too few processes."""
    found = program.graph.fingerprint
    if plan.model.fingerprint != found:
        raise PlanError(
            "AP550",
            "the plan was made for another model",
            why=f"the plan's model is {plan.model.fingerprint}, this one {found}",
            where=plan.model.target,
            fix="the model file or its settings changed: plan again",
        )
    needed = 1 + max(rank for stage in plan.stages for rank in stage.devices)
    if dist.get_world_size() < needed:
        raise MachineError(
            "AP410",
            f"the plan needs {needed} processes, but there are {dist.get_world_size()}",
            fix=f"start {needed} processes, or plan for the machines at hand",
        )
