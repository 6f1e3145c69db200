"""A recomputed layer of experts: its products run inside of one op, which is run again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from one_stage import plan
from test_recompute import Echo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.backward.recomputing import Recomputing
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_program import BlockProgram, build_stage
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.requests.request import Forced, Request

ROWS, SEQ, WIDTH, INNER, EXPERTS, CHOSEN = 4, 16, 8, 32, 4, 2
SILU = '[["functional.silu", [{"at": 0}], {}]]'


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x))
        rows = x.flatten(0, 1)
        scores, ids = self.router(rows).softmax(-1).topk(CHOSEN)
        made = torch.ops.autoparallel.experts(
            rows, ids, scores, self.up, self.down, activation=SILU, num_experts=EXPERTS
        )
        return x + made.view_as(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


@cache
def program() -> Program:
    with torch.device("meta"):
        model = Experts()
    batch = {name: torch.randn(ROWS, SEQ, WIDTH) for name in ("x", "y")}
    return capture(model, batch)


@cache
def planned() -> Plan:
    forced = Forced(dp=1, tp=1, pp=1, num_microbatches=1, recompute="selective")
    cluster = parse_cluster("1xH100")
    return plan(program().graph, program().blocks, cluster, Request(ROWS, forced=forced))


def last_layer(mode: Recompute) -> tuple[BlockProgram, tuple[Tensor, ...]]:
    own, graph = planned(), program().graph.with_batch_size(ROWS)
    (stage,) = own.stages
    blocks = tuple(replace(block, recompute=mode) for block in stage.blocks)
    own = replace(own, stages=(replace(stage, blocks=blocks),))
    coordinates = (0,) * len(stage.mesh.shape)
    built = build_stage(
        graph,
        program().blocks,
        own,
        stage_index=0,
        coordinates=coordinates,
        communicator=Echo(stage.mesh),
    )
    block = next(b for b in reversed(built.blocks) if any("up" in name for name in b.parameters))
    block.module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = [torch.randn(ROWS, SEQ, WIDTH, generator=generator) for _ in block.inputs]
    return block, tuple(each.requires_grad_() for each in inputs)


def gradients(mode: Recompute) -> list[Tensor]:
    block, inputs = last_layer(mode)
    if mode == "none":
        outputs = block.module(*inputs)
    else:
        recomputing = Recomputing(keeps_costly=True)
        recomputing.mark(block.module)
        outputs = checkpoint(
            block.module, *inputs, use_reentrant=False, context_fn=recomputing.contexts
        )
    torch.autograd.backward([each.square().sum() for each in outputs])
    wanted = [*inputs[:1], *block.module.parameters()]
    assert all(each.grad is not None for each in wanted)
    return [each.grad for each in wanted if each.grad is not None]


def test_products_inside_of_experts_are_not_kept() -> None:
    """The op is priced as run again: only the layer's own two products are kept."""
    block, inputs = last_layer("selective")
    recomputing = Recomputing(keeps_costly=True)
    recomputing.mark(block.module)
    forward, _ = recomputing.contexts()
    with forward:
        block.module(*inputs)
    assert sorted(each.numel() for each in forward.kept) == [
        ROWS * SEQ * EXPERTS,
        ROWS * SEQ * WIDTH,
    ]


def test_a_recomputed_layer_of_experts_has_the_gradients_of_one_that_is_not() -> None:
    for own, expected in zip(gradients("selective"), gradients("none"), strict=True):
        assert torch.equal(own, expected)
