"""TeraPipe on real processes: slices of the sequences, and the gradients of one process."""

from __future__ import annotations

import random
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
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.runtime.step.trainer import Trainer


@dataclass(frozen=True)
class Case:
    cuts: tuple[int, ...]
    mesh: Mesh
    slices: tuple[int, ...]
    zero: int = 0
    recompute: Recompute = "none"
    seed: int | None = None
    """Of random layouts; None for whole values."""


ONE = Mesh(("dp",), (1,))
CASES = (
    Case((1, 2, 3), ONE, (4, 4)),
    Case((1, 2, 3), ONE, (3, 2, 2, 1), recompute="full"),
)
SPLIT_CASES = (
    *(Case((2,), DP2, (4, 2, 2), zero, seed=zero) for zero in (0, 1, 3)),
    Case((3,), TP2, (4, 4), seed=4),
    Case((1,), TP2, (2, 6), recompute="selective", seed=5),
    Case((2,), DP2, (6, 2), 2, "full", seed=6),
)


def plan_for(case: Case, program: Program) -> Plan:
    meshes = (case.mesh,) * (len(case.cuts) + 1)
    chooser = random.Random(case.seed or 0)
    layouts = [random_layouts(program.graph, program.blocks, m, chooser) for m in meshes]
    plan = plan_of(program.blocks, list(case.cuts), meshes, layouts)
    model = replace(
        plan.model,
        fingerprint=program.graph.fingerprint,
        global_batch=ROWS * NUM_MICROBATCHES,
        optimizer="sgd",
    )
    return replace(
        with_states(plan, zero=case.zero, recompute=case.recompute),
        model=model,
        num_microbatches=NUM_MICROBATCHES,
        schedule="terapipe",
        slices=case.slices,
    )


def train(program: Program, expected: Truth, cases: tuple[Case, ...]) -> None:
    for case in cases:
        plan = plan_for(case, program)
        weights = {**expected.weights, **program.literals}
        trainer = Trainer(program, plan, weights, device=torch.device("cpu"))
        for _ in range(2):
            loss = trainer.runner.backward(expected.batch)
            assert relative_error(loss, expected.loss) < TOLERANCE, case
            for index, stage in trainer.model.stages.items():
                expected.check(stage.by_name, (case, index))


class Chain(Transformer):
    """As the transformer, without the skip from the first stage to the last."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = Chain()
    batch = {
        key: torch.empty(2, 8, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    return replace(capture(model, batch, dtype="float64"), model=nn.Module())


@pytest.mark.slow
def test_slices_of_split_stages_have_the_gradients_of_one_process(program: Program) -> None:
    run_processes(4, train, program.with_batch_size(ROWS), truth(program), SPLIT_CASES)


def test_slices_through_four_stages_have_the_gradients_of_one_process(program: Program) -> None:
    run_processes(4, train, program.with_batch_size(ROWS), truth(program), CASES)
