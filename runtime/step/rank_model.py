"""One rank's part of a model: its stages' programs, parameters, buffers and constants.

In: the planned variant of the step, and the initial weights. Out: the modules of this rank's
stages with this rank's shards, and, by the model's own names, all that training, checkpoints and
comparisons read of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...passes.local.live_numbers import LiveNumbers, make_live
from ...passes.local.stage_program import StageProgram
from ...passes.programs.program import Program
from ...planner.evaluate.step import splits_backward
from ...planner.graph.layout import region_slices
from ...planner.plan import Plan
from ...planner.variants.replicas import placed_stages
from ..data.variants import Variant, refused_batch, stage_programs
from ..messages.communicator import ProcessCommunicator
from ..messages.groups import build_meshes, stages_of_rank
from ..parameters.compiling import BlockCompiler
from ..parameters.initial_values import Weights, constants_of, fill_stages, whole_tensors
from ..parameters.offloading import share_window
from ..parameters.parameters import StageParameter
from ..parameters.stage import StageModule
from ..parameters.tied_parameters import find_tied
from ..parameters.weight_versions import WeightVersions
from ..update.gradients import PlannedSums
from .checkpoint_state import persistent_shapes, untrained_names
from .executor import Constants, StageExecutor, StageVariant


class RankModel:
    """The part of a model that this rank holds: its ``stages`` by index, empty if the plan leaves
    it idle.

    ``parameters`` has each parameter once, even if two of the stages hold it. ``leaves`` are the
    unsharded buffers from which constants are computed. ``untrained`` are, on rank 0, the
    entries of the model's ``state_dict`` that training does not change; ``persistent`` has the
    shapes of all its entries; ``beside`` are parameters of the user's script outside the model,
    which are not trained.
    """

    def __init__(
        self,
        planned: Variant,
        weights: Weights,
        *,
        device: torch.device,
        progress: Callable[..., None] | None = None,
        meshes: Mapping[int, DeviceMesh] | None = None,
    ) -> None:
        """Make the stages and fill in their weights. Collective over all ranks, unless ``meshes``
        are given."""
        self.planned, self.program, self.plan = planned, planned.program, planned.plan
        self._programs = {(self.plan.model.global_batch, 0): self.program}
        self.device, self.rank = device, dist.get_rank()
        compiler = BlockCompiler() if self.plan.compiled else None
        if meshes is None:
            meshes = build_meshes(self.plan, device.type)
        self.stages = {
            index: self.make_stage(index, ProcessCommunicator(meshes[index]), compiler)
            for index in stages_of_rank(self.plan, self.rank)
        }
        share_window(stage.offloader for stage in self.stages.values())
        read = fill_stages(self.stages.values(), weights, self.program, progress)
        self.leaves = {name: tensor.clone() for name, tensor in read.items()}
        self.parameters: dict[str, StageParameter] = {}
        for parameter in self.all_parameters():
            self.parameters.setdefault(parameter.name, parameter)
        self.tied = find_tied({index: stage.by_name for index, stage in self.stages.items()})
        names = untrained_names(self.program, weights) if self.rank == 0 else ()
        self.untrained = whole_tensors(names, weights)
        self.persistent = persistent_shapes(self.program.model)
        self.beside: dict[str, nn.Parameter] = {}

    def make_stage(
        self, index: int, communicator: ProcessCommunicator, compiler: BlockCompiler | None
    ) -> StageModule:
        """Make the module of stage ``index``, weights unset; a ``compiler`` compiles its ops."""
        own = placed_stages(self.plan)[index]
        first, *others = stage_programs(
            self.planned,
            index,
            communicator=communicator,
            coordinates=own.mesh.coordinates(own.devices.index(self.rank)),
        )
        stage = StageModule(
            first,
            communicator.device_mesh,
            zero=own.zero,
            device=self.device,
            precision=self.plan.model.precision,
            states=self.plan.states,
            compiler=compiler,
            splits_backward=splits_backward(self.planned.schedule, index),
        )
        for program in others:
            stage.add_program(program)
        return stage

    def add_variant(
        self, variant: Variant, index: int, numbers: LiveNumbers | None = None
    ) -> StageVariant | None:
        """Add to a stage the programs of another variant of the step, over the same parameters.
        Return None if they need other parts of parameters than the stage holds, or if a value that
        a rank computes from one of the ``numbers`` cannot be read anew in each step."""
        stage = self.stages[index]
        programs = stage_programs(
            variant,
            index,
            communicator=ProcessCommunicator(stage.device_mesh),
            coordinates=stage.program.coordinates,
            draws=stage.program.draws,
        )
        if not all(_is_over_same(stage.program, each) for each in programs):
            return None
        if numbers is not None and not make_live(programs, variant.program.graph, numbers):
            return None
        return _stage_variant(variant, index, tuple(map(stage.add_program, programs)))

    def executor(self, index: int, seed: int) -> StageExecutor:
        """Make the executor of stage ``index``, which runs the planned batches at first."""
        stage, schedule = self.stages[index], self.planned.schedule
        versions = None
        if schedule.is_asynchronous:
            versions = WeightVersions(stage.by_name.values(), schedule, index)
        parts = tuple(range(len(self.planned.slices)))
        sums = PlannedSums.of(self.plan, placed_stages(self.plan)[index])
        return StageExecutor(
            stage,
            _stage_variant(self.planned, index, parts),
            self._constants,
            seed=seed,
            versions=versions,
            sums=sums,
        )

    def program_of(self, rows: int, capture: int = 0) -> Program:
        """Return trace number ``capture`` of the model for global batches of ``rows`` rows, made
        now if it is not stored. Raises UsageError AP836 if the model's code takes another path for
        so many rows."""
        if (rows, capture) not in self._programs:
            found = self.program.of_global_batch(rows)
            if found is None:
                why = "the model's code takes another path for so many samples"
                raise refused_batch(self.plan, rows, why)
            self._programs[rows, capture] = found
        return self._programs[rows, capture]

    def can_run(self, plan: Plan) -> bool:
        """Return whether ``plan`` has the same stages, micro-batches and schedule as this model."""

        def form(plan: Plan) -> tuple[Any, ...]:
            stages = [
                (s.devices, s.mesh, s.zero, s.shard_degree, len(s.blocks)) for s in plan.stages
            ]
            return stages, plan.num_microbatches, plan.schedule

        return form(plan) == form(self.plan)

    def take_program(self, rows: int, capture: int, program: Program) -> None:
        """Store trace number ``capture`` of the model, for global batches of ``rows`` rows."""
        self._programs[rows, capture] = program

    def _constants(self, variant: StageVariant, stage: StageProgram) -> Constants:
        """Return two dicts of constants (values that depend on no input or parameter) of a stage's
        program: for its blocks, at this rank's rows, and for the counts in its loss, at all
        rows."""
        size = variant.rows // variant.num_microbatches
        program = self.program_of(variant.rows, variant.capture).with_batch_size(size)
        counted = constants_of(program, stage, self.leaves, str(self.device))
        if stage.share is None:
            return counted, counted
        own = program.with_batch_size(stage.share.batch_size)
        return constants_of(own, stage, self.leaves, str(self.device)), counted

    def sum_tied(self) -> None:
        """Sum tied parameters' gradients over stages. Collective over those stages' ranks."""
        self.tied.sum({index: stage.by_name for index, stage in self.stages.items()})

    def all_parameters(self) -> list[StageParameter]:
        """Return the parameters of this rank's stages, one stage after the other."""
        return [p for stage in self.stages.values() for p in stage.by_name.values()]

    def own_parameters(self) -> list[StageParameter]:
        """Return this rank's parameters that no earlier stage holds; over all ranks, each once."""
        return [
            parameter
            for index, stage in self.stages.items()
            for name, parameter in stage.by_name.items()
            if (index, name) not in self.tied.elsewhere
        ]

    def stand_ins(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and a stand-in without memory of each trained parameter of the model."""
        for node in self.program.graph.parameters:
            if node.spec.requires_grad:
                dtype = getattr(torch, node.spec.dtype)
                empty = torch.empty(node.spec.shape, dtype=dtype, device="meta")
                yield node.name, nn.Parameter(empty)

    def fixed_buffers(self) -> set[str]:
        """Return the names of the buffers that the model reads and training does not change."""
        return {*self.program.buffers} - self.program.graph.updates.keys()

    def changing_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of this rank's stages that training changes, by name."""
        return {
            name: buffer
            for stage in self.stages.values()
            for name, buffer in stage.changing_buffers().items()
        }

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Overwrite the buffers that training does not change with new values."""
        for name in self.leaves.keys() & buffers.keys():
            self.leaves[name].copy_(buffers[name].detach())
        for stage in self.stages.values():
            for name in stage.program.buffers.keys() & buffers.keys():
                box = region_slices(stage.buffer_regions[name])
                stage.buffer(name).copy_(buffers[name].detach()[box])


def _is_over_same(one: StageProgram, other: StageProgram) -> bool:
    """Return whether two programs of a stage have the same blocks and hold the same parts of
    parameters."""
    blocks = [
        [({*block.parameters}, {*block.buffers}, block.recompute) for block in program.blocks]
        for program in (one, other)
    ]
    return (
        one.parameters == other.parameters
        and one.buffers == other.buffers
        and one.updates.keys() == other.updates.keys()
        and blocks[0] == blocks[1]
    )


def _stage_variant(variant: Variant, index: int, parts: tuple[int, ...]) -> StageVariant:
    count, schedule = variant.plan.num_microbatches, variant.schedule
    return StageVariant(
        count,
        parts,
        variant.slices[-1].carried[schedule.part(index)],
        variant.shape.rows,
        variant.shape.capture,
        count // schedule.per_update,
    )
