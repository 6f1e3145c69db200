"""Captured models run by stage programs under random plans, and equal one device.

A random plan gives every op any of its strategies on every mesh axis: whatever the solver
may choose is among them.
"""

from __future__ import annotations

import random

import pytest
import torch
from random_suites import seeds
from sharding import assert_close
from stage_simulation import plan_of, random_layouts, simulate
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_program import ParameterProgram, StageProgram
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import REPLICATE, Mesh, shard

VOCABULARY, WIDTH, HEADS, SEQ = 24, 16, 4, 8
ROWS = 4


class Layer(nn.Module):
    """A transformer layer with grouped key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        h = self.norm(x)
        query = self.query(h).view(batch, seq, HEADS, -1).transpose(1, 2)
        key, value = self.key_value(h).chunk(2, -1)
        key = key.reshape(batch, seq, HEADS // 2, -1).transpose(1, 2).repeat_interleave(2, 1)
        value = value.reshape(batch, seq, HEADS // 2, -1).transpose(1, 2).repeat_interleave(2, 1)
        h = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(h.transpose(1, 2).contiguous().view(batch, seq, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Tied embeddings, learned positions, a skip from the first values to the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
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


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = Model()
    batch = {
        key: torch.empty(2, SEQ, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    return capture(model, batch, dtype="float64").with_batch_size(ROWS)


def leaves_of(program: Program) -> dict[str, Tensor]:
    """Random parameters and a random batch with ignored labels, and the constants' values."""
    torch.manual_seed(0)
    values = {
        node.name: torch.randn(node.spec.shape, dtype=torch.float64).mul(0.3).requires_grad_()
        for node in program.graph.parameters
    }
    for node in program.graph.inputs:
        values[node.name] = torch.randint(0, VOCABULARY, node.spec.shape)
    values["labels"][torch.rand(ROWS, SEQ) < 0.3] = -100
    constants = [node.name for node in program.graph if node.kind == "constant"]
    return {**values, **evaluate(program, constants)}


def compare(program: Program, cuts: list[int], meshes: list[Mesh], seed: int) -> None:
    """A random plan with these stages equals one device."""
    leaves = leaves_of(program)
    expected = run(program.graph, leaves)
    expected.backward()
    chooser = random.Random(seed)
    layouts = [random_layouts(program.graph, program.blocks, mesh, chooser) for mesh in meshes]
    plan = plan_of(program.blocks, cuts, meshes, layouts)
    loss, gradients = simulate(program.graph, program.blocks, plan, leaves)
    assert_close(loss, expected.detach(), "loss")
    assert set(gradients) == {node.name for node in program.graph.parameters}
    for name, gradient in gradients.items():
        own = leaves[name].grad
        assert own is not None
        assert_close(gradient, own, f"gradient of {name}", 1e-9)


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(("tp",), (2,)),
        Mesh(("tp",), (4,)),
        Mesh(("dp", "tp"), (2, 2)),
        Mesh(("dp", "sp", "tp"), (2, 2, 2)),
    ],
    ids=lambda mesh: str(mesh.shape),
)
def test_one_stage_under_a_random_plan_equals_one_device(
    program: Program, mesh: Mesh, seed: int
) -> None:
    compare(program, [], [mesh], seed)


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(
    "shapes", [((1,), (1,)), ((2,), (2,)), ((2, 1), (1, 2)), ((4,), (2, 2))], ids=str
)
def test_two_stages_on_meshes_of_any_shape_equal_one_device(
    program: Program, shapes: tuple[tuple[int, ...], ...], seed: int
) -> None:
    """The tied embedding is in both stages, and the first values skip to the second."""
    meshes = [Mesh(("dp", "tp")[-len(shape) :], shape) for shape in shapes]
    compare(program, [2], meshes, seed)


def test_a_stage_per_block_equals_one_device(program: Program) -> None:
    count = len(program.blocks.blocks)
    compare(program, list(range(1, count)), [Mesh(("tp",), (2,))] * count, 0)


def test_parameters_of_several_blocks_are_sharded_over_the_axes_on_which_all_are_whole() -> None:
    """They are gathered in one group; weights of experts in one block keep to axes of their own."""
    mesh, spec = Mesh(("dp", "ep"), (2, 2)), TensorSpec((8, 2), "float32", requires_grad=True)
    whole, split = (REPLICATE, REPLICATE), (REPLICATE, shard(0))

    def axes_of(shared: bool) -> list[tuple[int, ...]]:
        held = {"dense": ParameterProgram(spec, whole, True)}
        held |= {"experts": ParameterProgram(spec, split, shared)}
        program = StageProgram(
            index=0,
            mesh=mesh,
            coordinates=(0, 0),
            blocks=(),
            parameters=held,
            buffers={},
            inputs={},
            constants={},
            receives=(),
            sends=(),
            layouts={},
            loss=None,
        )
        return [program.shard_axes(name, 1) for name in held]

    assert axes_of(shared=False) == [(0, 1), (0,)]
    assert axes_of(shared=True) == [(0,), (0,)]
