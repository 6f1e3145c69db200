"""A plan carried out by threads: every stage's ranks, and the boundaries between stages.

The simplest executor there can be: one micro-batch, global tensors at every boundary. What
it does with a ``StageProgram`` is what the runtime has to do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from communicator import ThreadCommunicator, make_communicators, run_ranks
from sharding import collect, distribute, gradient_layout
from torch import Tensor, nn

from autoparallel.cost_model.cluster.cluster import Cluster, Link
from autoparallel.passes.local.stage_cut import Boundary
from autoparallel.passes.local.stage_program import StageProgram, build_stage
from autoparallel.planner.graph.graph import Blocks, Graph, Node
from autoparallel.planner.graph.layout import (
    Layout,
    Mesh,
    NodeLayout,
    combine,
    divides,
    local_region,
)
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.plan import (
    BlockPlan,
    ModelInfo,
    Plan,
    Prediction,
    Recompute,
    SolverInfo,
    StagePlan,
    StagePrediction,
)


def plan_of(
    blocks: Blocks,
    cuts: Sequence[int],
    meshes: Sequence[Mesh],
    layouts: Sequence[Mapping[str, NodeLayout]],
) -> Plan:
    """A plan whose stages end before the blocks ``cuts``; everything else is made up."""
    edges = [0, *cuts, len(blocks.blocks)]
    stages, device = [], 0
    for index, mesh in enumerate(meshes):
        stages.append(
            StagePlan(
                blocks=tuple(
                    BlockPlan(b.name, b.kind, "none")
                    for b in blocks.blocks[edges[index] : edges[index + 1]]
                ),
                devices=tuple(range(device, device + mesh.size)),
                mesh=mesh,
                zero=0,
                layouts=layouts[index],
                prediction=StagePrediction({}, {}),
            )
        )
        device += mesh.size
    return Plan(
        model=ModelInfo("", {}, "", 0, 1, None, "fp64", "adamw"),
        cluster=Cluster("none", (), Link("none", 0.0, 1.0)),
        num_microbatches=1,
        schedule="gpipe",
        stages=tuple(stages),
        prediction=Prediction(0.0, 0.0, 0.0, 0.0, 0, {}),
        alternatives=(),
        solver=SolverInfo(0.0, 0, {}),
    )


def with_states(plan: Plan, *, zero: int, recompute: Recompute = "none") -> Plan:
    """``plan`` with a ZeRO stage and a recomputation in all its stages."""
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                zero=zero,
                blocks=tuple(replace(block, recompute=recompute) for block in stage.blocks),
            )
            for stage in plan.stages
        ),
    )


def random_layouts(
    graph: Graph, blocks: Blocks, mesh: Mesh, chooser: random.Random
) -> dict[str, NodeLayout]:
    """For every template node any of its strategies on each axis, as long as they divide."""
    named = {blocks.template.get(node.name, node.name) for node in graph}
    return {name: _random_layout(graph, graph[name], mesh, chooser) for name in sorted(named)}


def _random_layout(graph: Graph, node: Node, mesh: Mesh, chooser: random.Random) -> NodeLayout:
    offered = [axis_strategies(node, graph, size) for size in mesh.shape]
    while True:
        layout = combine(tuple(chooser.choice(strategies) for strategies in offered))
        pairs = [(graph.spec(r).shape, h) for r, h in zip(node.inputs, layout.inputs, strict=False)]
        pairs += [(s.shape, h) for s, h in zip(node.outputs, layout.outputs, strict=True)]
        if all(divides(shape, held, mesh.shape) for shape, held in pairs):
            return layout


@dataclass
class _Stage:
    """The ranks of one stage between their forward and their backward."""

    mesh: Mesh
    communicators: list[ThreadCommunicator]
    programs: list[StageProgram]
    parameters: list[dict[str, Tensor]]
    values: list[dict[str, Tensor]]


def simulate(
    graph: Graph, blocks: Blocks, plan: Plan, values: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and every parameter's gradient; ``values`` are all leaves of the graph."""
    crossing: dict[str, Tensor] = {}
    stages = []
    for index in range(len(plan.stages)):
        stages.append(_forward(graph, blocks, plan, index, leaves=values, crossing=crossing))
    last = stages[-1]
    loss_key = last.programs[0].loss
    assert loss_key is not None
    loss = collect(
        [v[loss_key] for v in last.values],
        last.programs[0].layouts[loss_key],
        last.mesh,
        of="loss",
    )
    gradients: dict[str, Tensor] = {}
    back: dict[str, Tensor] = {}
    for stage in reversed(stages):
        _backward(stage, back, gradients)
    return loss.detach(), gradients


def _forward(
    graph: Graph,
    blocks: Blocks,
    plan: Plan,
    index: int,
    *,
    leaves: Mapping[str, Tensor],
    crossing: dict[str, Tensor],
) -> _Stage:
    """Runs a stage; reads what it receives from ``crossing`` and adds what it sends."""
    mesh = plan.stages[index].mesh
    communicators = make_communicators(mesh)

    def work(
        communicator: ThreadCommunicator,
    ) -> tuple[StageProgram, dict[str, Tensor], dict[str, Tensor]]:
        program = build_stage(
            graph,
            blocks,
            plan,
            stage_index=index,
            coordinates=communicator.coordinates,
            communicator=communicator,
        )
        return program, *run_stage(program, leaves, crossing)

    ranks = run_ranks(mesh, work, communicators)
    stage = _Stage(
        mesh, communicators, [r[0] for r in ranks], [r[1] for r in ranks], [r[2] for r in ranks]
    )
    for boundary in stage.programs[0].sends:
        parts = [v[boundary.key].detach() for v in stage.values]
        crossing[boundary.key] = collect(parts, boundary.source_layout, mesh, of=boundary.key)
    return stage


def run_stage(
    program: StageProgram, leaves: Mapping[str, Tensor], crossing: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One rank's forward: its parameters' local tensors, and every value by key."""

    def part(value: Tensor, layout: Layout) -> Tensor:
        region = local_region(value.shape, layout, program.mesh, program.coordinates)
        return value.detach()[tuple(slice(*bounds) for bounds in region)].clone()

    parameters = {
        name: nn.Parameter(part(leaves[name], held.layout), requires_grad=held.spec.requires_grad)
        for name, held in program.parameters.items()
    }
    values: dict[str, Tensor] = {
        n: p for n, p in parameters.items() if program.parameters[n].shared
    }
    for name, leaf in {**program.inputs, **program.constants}.items():
        values[name] = part(leaves[name], leaf.layout)
    buffers = {name: part(leaves[name], held.layout) for name, held in program.buffers.items()}
    values.update({name: buffers[name] for name, held in program.buffers.items() if held.shared})
    if program.counting is not None:  # each op sums its own rows' count over the ranks
        values.update(dict.fromkeys(loss.key for loss in program.counting.losses))
    for boundary in program.receives:
        received = part(crossing[boundary.key], boundary.target_layout)
        values[boundary.key] = received.requires_grad_(boundary.spec.requires_grad)
    for block in program.blocks:
        for name in (*block.parameters, *block.buffers):
            path, _, leaf_name = name.rpartition(".")
            owner = block.module.get_submodule(path)
            own = parameters[name] if name in parameters else buffers[name]
            assert getattr(owner, leaf_name).shape == own.shape
            setattr(owner, leaf_name, own)
        outputs = block.module(*(values[key] for key in block.inputs))
        values.update(zip(block.outputs, outputs, strict=True))
    return dict(parameters), values


def _backward(stage: _Stage, back: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """The stage's backward; ``back`` holds gradients of boundary values by key."""
    mesh, program = stage.mesh, stage.programs[0]
    sent = {b.key: b for b in program.sends if b.spec.requires_grad}
    parts = {
        key: distribute(back[key], gradient_layout(b.source_layout), mesh)
        for key, b in sent.items()
    }

    def work(communicator: ThreadCommunicator) -> None:
        rank = mesh.index(communicator.coordinates)
        values = stage.values[rank]
        keys = [*sent, *([program.loss] if program.loss else [])]
        grads = [parts[k][rank] if k in sent else torch.ones_like(values[k]) for k in keys]
        torch.autograd.backward([values[key] for key in keys], grads)

    run_ranks(mesh, work, stage.communicators)
    for boundary in program.receives:
        if boundary.spec.requires_grad:
            _add(back, boundary.key, _received_gradient(stage, boundary))
    for name, held in program.parameters.items():
        if held.spec.requires_grad:
            grads = [_grad(p[name]) for p in stage.parameters]
            layout = gradient_layout(held.layout)
            _add(gradients, name, collect(grads, layout, mesh, of=f"gradient of {name}"))


def _received_gradient(stage: _Stage, boundary: Boundary) -> Tensor:
    grads = [_grad(v[boundary.key]) for v in stage.values]
    layout = gradient_layout(boundary.target_layout)
    return collect(grads, layout, stage.mesh, of=f"gradient of {boundary.key}")


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _add(sums: dict[str, Tensor], key: str, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value
