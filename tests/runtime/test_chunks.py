"""Four stages on two sets of two ranks, of different meshes, with a skip and a tied parameter."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from processes import run_processes
from stage_simulation import plan_of, random_layouts
from stages import given_constants, relative_error
from test_random_plans import DP2, NUM_MICROBATCHES, ROWS, TOLERANCE, TP2, Truth, truth
from test_random_plans import Model as Transformer
from torch import nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_cut import boundaries
from autoparallel.passes.local.stage_program import build_stage
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.program import Program
from autoparallel.planner.evaluate.step import schedule_of, splits_backward
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import Plan
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.messages.exchange import Exchange
from autoparallel.runtime.messages.groups import build_meshes, stages_of_rank
from autoparallel.runtime.messages.local_transfer import LocalTransfer, split_boundaries
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.parameters.tied_parameters import find_tied
from autoparallel.runtime.step.executor import StageExecutor, StageVariant
from autoparallel.runtime.step.pipeline import Hooks, PipelineRunner


@dataclass(frozen=True)
class Case:
    seed: int
    schedule: str
    meshes: tuple[Mesh, ...]
    zero: int = 0


CASES = (
    Case(0, "interleaved", (DP2, DP2, TP2, TP2)),
    Case(1, "bfs", (TP2, DP2, DP2, TP2), 1),
    Case(2, "zbv", (DP2, TP2, DP2, TP2)),
    Case(3, "zbv", (DP2, DP2, DP2, DP2), 3),
)


def plan_for(case: Case, program: Program) -> Plan:
    """One block per stage, random layouts, devices as the schedule puts the stages."""
    chooser = random.Random(case.seed)
    layouts = [random_layouts(program.graph, program.blocks, m, chooser) for m in case.meshes]
    plan = plan_of(program.blocks, [1, 2, 3], case.meshes, layouts)
    owners = (0, 1, 1, 0) if case.schedule == "zbv" else (0, 1, 0, 1)
    stages = tuple(
        replace(stage, zero=case.zero, devices=(2 * owner, 2 * owner + 1))
        for stage, owner in zip(plan.stages, owners, strict=True)
    )
    return replace(plan, stages=stages, num_microbatches=NUM_MICROBATCHES, schedule=case.schedule)


def make_stage(program: Program, plan: Plan, index: int, splits: bool, meshes) -> StageModule:
    own = plan.stages[index]
    stage_program = build_stage(
        program.graph,
        program.blocks,
        plan,
        stage_index=index,
        coordinates=own.mesh.coordinates(own.devices.index(dist.get_rank())),
        communicator=ProcessCommunicator(meshes[index]),
    )
    return StageModule(
        stage_program, meshes[index], zero=own.zero, precision="fp64", splits_backward=splits
    )


def train_step(case: Case, program: Program, expected: Truth) -> None:
    plan = plan_for(case, program)
    assert plan.num_chunks == 2
    meshes, rank = build_meshes(plan), dist.get_rank()
    crossing = boundaries(program.graph, program.blocks, plan)
    pairs = {(b.source_stage, b.target_stage) for b in crossing}
    assert (0, 3) in pairs
    schedule = schedule_of(plan, pairs)
    stages, executors = {}, {}
    for index in stages_of_rank(plan, rank):
        stage = make_stage(program, plan, index, splits_backward(schedule, index), meshes)
        materialize(stage, {**expected.weights, **program.literals})
        constants = evaluate(program, stage.program.constants)
        stages[index] = stage
        executors[index] = StageExecutor(
            stage, StageVariant(NUM_MICROBATCHES), given_constants(constants)
        )
    sent, handed = split_boundaries(crossing, plan.stages)
    parameters = {index: stage.by_name for index, stage in stages.items()}
    tied, device = find_tied(parameters), torch.device("cpu")
    runner = PipelineRunner(
        schedule,
        executors,
        Exchange([sent], schedule=schedule, stages=plan.stages, rank=rank, device=device),
        handover=LocalTransfer(handed, stages=plan.stages, rank=rank, device=device),
        hooks=Hooks(lambda: tied.sum(parameters)),
    )
    for _ in range(2):
        assert relative_error(runner.step(expected.batch), expected.loss) < TOLERANCE
        for held in parameters.values():
            expected.check(held, case)


def run_cases(program: Program, expected: Truth) -> None:
    for case in CASES:
        try:
            train_step(case, program, expected)
        except Exception as error:
            raise AssertionError(str(case)) from error


def test_stages_of_different_meshes_share_ranks_and_have_the_gradients_of_one_process() -> None:
    with torch.device("meta"):
        model = Transformer()
    batch = {
        key: torch.empty(2, 8, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    program = replace(capture(model, batch, dtype="float64"), model=nn.Module())
    run_processes(4, run_cases, program.with_batch_size(ROWS), truth(program))
