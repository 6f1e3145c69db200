"""Programs for batches of fewer rows than planned, over the parameters that stages have.

In: a trainer and the plan of such a batch (``smaller``). Out: a runner of its steps; each
executor then has a program more, which ``StageExecutor.use`` chooses.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..passes.stage_cut import boundaries, with_replicas
from ..passes.stage_program import OfSlice, build_stage
from ..planner.plan import Plan
from ..planner.plan_schedule import schedule_of
from .communicator import ProcessCommunicator
from .pipeline import PipelineRunner

if TYPE_CHECKING:
    from .trainer import Trainer


def smaller_runner(trainer: Trainer, plan: Plan) -> PipelineRunner:
    """Has the executors run batches of ``plan`` too. Collective over all ranks."""
    program = trainer.program.with_batch_size(plan.microbatch_size)
    crossing = boundaries(program.graph, program.blocks, plan)
    if trainer.schedule.parts:
        crossing = with_replicas(crossing, len(plan.stages))
    schedule = schedule_of(plan, {(b.source_stage, b.target_stage) for b in trainer.crossing})
    for index, executor in trainer.executors.items():
        stage = executor.stage
        made = build_stage(
            program.graph, program.blocks, plan,
            stage_index=trainer.schedule.part(index), coordinates=stage.program.coordinates,
            communicator=ProcessCommunicator(stage.device_mesh),
            of_slice=OfSlice(program.graph, (), stage.program.draws), outputs=program.returned,
        )  # fmt: skip
        stage.run_slices((*stage.programs, made))
        executor.add_program(plan.num_microbatches, partial(trainer.constants_for, program, made))
    return trainer.make_runner(schedule, crossing)
