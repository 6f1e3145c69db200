"""Chimera on real processes: two replicas of every stage, and the gradients of one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from processes import run_processes
from stage_simulation import plan_of, random_layouts, with_states
from stages import relative_error
from test_random_plans import DP2, NUM_MICROBATCHES, ROWS, TOLERANCE, TP2, Truth, truth
from test_random_plans import Model as Transformer
from torch import nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.graph import Graph, Ref
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import Plan
from autoparallel.planner.variants.replicas import check_replicas, placed_stages
from autoparallel.runtime.messages.groups import stages_of_rank
from autoparallel.runtime.step.trainer import Trainer


@dataclass(frozen=True)
class Case:
    cuts: tuple[int, ...]
    mesh: Mesh
    zero: int = 0


ONE = Mesh(("dp",), (1,))
CASES = (
    Case((1, 2, 3), ONE),
    Case((3,), DP2, 1),
    Case((2,), TP2),
    Case((1,), DP2, 3),
)
"""Four ranks each: four stages of one (with a skip from the first to the last), two of two."""


def plan_for(case: Case, program: Program) -> Plan:
    import random

    meshes = (case.mesh,) * (len(case.cuts) + 1)
    chooser = random.Random(len(case.cuts) + case.zero)
    layouts = [random_layouts(program.graph, program.blocks, m, chooser) for m in meshes]
    plan = plan_of(program.blocks, list(case.cuts), meshes, layouts)
    model = replace(
        plan.model,
        fingerprint=program.graph.fingerprint,
        global_batch=ROWS * NUM_MICROBATCHES,
        optimizer="sgd",
    )
    return replace(
        with_states(plan, zero=case.zero),
        model=model,
        num_microbatches=NUM_MICROBATCHES,
        schedule="chimera",
    )


def train(program: Program, expected: Truth) -> None:
    for case in CASES:
        plan = plan_for(case, program)
        weights = {**expected.weights, **program.literals}
        trainer = Trainer(program, plan, weights, device=torch.device("cpu"))
        assert len(trainer.model.stages) == 2, "each rank has a stage of either direction"
        loss = trainer.runner.backward(expected.batch)
        assert relative_error(loss, expected.loss) < TOLERANCE, case
        for index, stage in trainer.model.stages.items():
            expected.check(stage.by_name, (case, index))
        own = {id(parameter) for parameter in trainer.model.own_parameters()}
        first = min(trainer.model.stages)
        assert {
            id(p)
            for n, p in trainer.model.stages[first].by_name.items()
            if (first, n) not in trainer.model.tied.elsewhere
        } == own


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = Transformer()
    batch = {
        key: torch.empty(2, 8, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    return replace(capture(model, batch, dtype="float64"), model=nn.Module())


def test_both_replicas_of_every_stage_have_the_gradients_of_one_process(program: Program) -> None:
    run_processes(4, train, program.with_batch_size(ROWS), truth(program))


def test_a_replica_is_on_the_devices_of_the_stage_as_far_from_the_other_end(
    program: Program,
) -> None:
    plan = plan_for(CASES[0], program)
    devices = [stage.devices[0] for stage in placed_stages(plan)]
    assert devices == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [stages_of_rank(plan, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert placed_stages(replace(plan, schedule="1f1b")) == plan.stages


def test_buffers_that_replicas_would_change_each_its_own_way_are_refused() -> None:
    with pytest.raises(PlanError, match="AP547") as raised:
        check_replicas(Graph((), Ref("loss"), 1, updates={"norm.running_mean": Ref("new")}))
    assert "norm.running_mean" in str(raised.value)
