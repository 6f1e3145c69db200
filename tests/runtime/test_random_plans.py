"""A captured transformer under random layouts, trained by the executor on real processes.

Every op gets any of its strategies on each mesh axis; ZeRO stages, recomputation, schedules
and stage cuts vary with it. Gradients equal one process in float64.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from any_tiles import cut_all
from marks import slow
from processes import run_processes
from stage_simulation import plan_of, random_layouts, with_states
from stages import given_constants, relative_error, whole
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_program import build_stage
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.messages.exchange import Exchange
from autoparallel.runtime.messages.groups import build_meshes, stages_of_rank
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.parameters import StageParameter
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.parameters.tied_parameters import find_tied
from autoparallel.runtime.step.executor import StageExecutor, StageVariant
from autoparallel.runtime.step.pipeline import Hooks, PipelineRunner

VOCABULARY, WIDTH, HEADS, SEQ = 24, 16, 4, 8
ROWS, NUM_MICROBATCHES = 4, 2
TOLERANCE = 1e-9


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.output(h.transpose(1, 2).contiguous().view(batch, seq, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Tied embeddings, learned positions, a skip from the first values to the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = first
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x) + 0.5 * first)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Case:
    seed: int
    meshes: tuple[Mesh, ...]
    zero: int
    recompute: Recompute = "none"
    schedule: str = "1f1b"
    tiles: int = 1


DP2, TP2, DP2_TP2 = Mesh(("dp",), (2,)), Mesh(("tp",), (2,)), Mesh(("dp", "tp"), (2, 2))
FOUR_RANKS = (
    *(Case(zero, (DP2_TP2,), zero) for zero in range(4)),
    Case(4, (DP2_TP2,), 3, "full"),
    Case(5, (DP2_TP2,), 2, "selective"),
    Case(6, (DP2, TP2), 3),
    Case(7, (TP2, DP2), 1, "full", "gpipe"),
    Case(8, (DP2, DP2), 2, "selective"),
    *(Case(seed, (DP2_TP2,), 3, "full", tiles=4) for seed in range(9, 12)),
)
QUICK = (FOUR_RANKS[0], FOUR_RANKS[7])
"""ZeRO 0 on two axes, and two stages of different meshes with ZeRO 1 and full recomputation."""


@dataclass(frozen=True)
class Truth:
    weights: dict[str, Tensor]
    batch: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]

    def check(self, parameters: Mapping[str, StageParameter], about: object) -> None:
        """Every parameter of a stage, by its name in the model, has the gradient of one process."""
        for name, parameter in parameters.items():
            gradient = parameter.master.grad
            assert gradient is not None, f"{about}: no gradient of {name}"
            error = relative_error(whole(gradient), self.gradients[name])
            assert error < TOLERANCE, f"{about}: gradient of {name}: {error}"


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = Model()
    batch = {
        key: torch.empty(2, SEQ, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    return replace(capture(model, batch, dtype="float64"), model=nn.Module())


def truth(program: Program) -> Truth:
    """One process on the whole batch."""
    whole = program.with_batch_size(ROWS * NUM_MICROBATCHES)
    torch.manual_seed(0)
    weights = {
        node.name: torch.randn(node.spec.shape, dtype=torch.float64).mul(0.3).requires_grad_()
        for node in whole.graph.parameters
    }
    batch = {n.name: torch.randint(0, VOCABULARY, n.spec.shape) for n in whole.graph.inputs}
    constants = evaluate(whole, [n.name for n in whole.graph if n.kind == "constant"])
    loss = run(whole.graph, {**weights, **batch, **constants, **whole.literals})
    loss.backward()
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    weights = {name: w.detach() for name, w in weights.items()}
    return Truth(weights, batch, loss.detach(), gradients)


def plan_for(case: Case, program: Program) -> Plan:
    """Random layouts; two stages are cut before the second layer."""
    chooser = random.Random(case.seed)
    layouts = [random_layouts(program.graph, program.blocks, m, chooser) for m in case.meshes]
    cuts = [2] if len(case.meshes) == 2 else []
    plan = plan_of(program.blocks, cuts, case.meshes, layouts)
    plan = with_states(plan, zero=case.zero, recompute=case.recompute)
    return replace(plan, num_microbatches=NUM_MICROBATCHES, tiles=case.tiles)


def train_step(case: Case, program: Program, expected: Truth) -> None:
    plan = plan_for(case, program)
    rank = dist.get_rank()
    (index,) = stages_of_rank(plan, rank)
    own = plan.stages[index]
    device_mesh = build_meshes(plan)[index]
    stage_program = build_stage(
        program.graph,
        program.blocks,
        plan,
        stage_index=index,
        coordinates=own.mesh.coordinates(own.devices.index(rank)),
        communicator=ProcessCommunicator(device_mesh),
    )
    stage = StageModule(stage_program, device_mesh, zero=own.zero, precision="fp64")
    materialize(stage, {**expected.weights, **program.literals})
    executor = StageExecutor(
        stage,
        StageVariant(NUM_MICROBATCHES),
        given_constants(evaluate(program, stage_program.constants)),
    )
    schedule = build_schedule(case.schedule, len(plan.stages), NUM_MICROBATCHES)
    exchange = Exchange(
        [(*stage_program.receives, *stage_program.sends)],
        schedule=schedule,
        stages=plan.stages,
        rank=rank,
        device=stage.device,
    )
    parameters = {index: stage.by_name}
    tied = find_tied(parameters)
    runner = PipelineRunner(
        schedule, {index: executor}, exchange, hooks=Hooks(lambda: tied.sum(parameters))
    )
    for _ in range(2):
        loss = runner.step(expected.batch)
        assert relative_error(loss, expected.loss) < TOLERANCE
        expected.check(executor.parameters, case)


def run_cases(cases: tuple[Case, ...], program: Program, expected: Truth) -> None:
    cut_all()
    for case in cases:
        try:
            train_step(case, program, expected)
        except Exception as error:
            raise AssertionError(str(case)) from error


@pytest.mark.parametrize(
    "cases",
    [QUICK, slow(tuple(set(FOUR_RANKS) - set(QUICK)))],
    ids=["quick", "others"],
)
def test_a_transformer_under_random_plans_has_the_gradients_of_one_process(
    program: Program, cases: tuple[Case, ...]
) -> None:
    run_processes(4, run_cases, cases, program.with_batch_size(ROWS), truth(program))
