"""Every strategy that a rule offers, run by ranks on parts, equals the op on the whole.

Values and every input's gradient, in float64, to 1e-10 of the largest magnitude.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from communicator import ThreadCommunicator, run_ranks
from op_cases import OpCase, cases, graph_of
from sharding import assert_close, collect, distribute, gradient_layout
from torch import Tensor

from autoparallel.passes.collectives import Rank
from autoparallel.passes.localize import BlockInterface, localize_block, value_key
from autoparallel.planner.graph import Graph, Ref
from autoparallel.planner.layout import Mesh, divides
from autoparallel.planner.rules import axis_strategies
from autoparallel.planner.strategy import NodeLayout, combine

CASES = cases()
PAIRS_ON_TWO_AXES = 10


def node_layouts(graph: Graph, mesh: Mesh) -> list[NodeLayout]:
    """Every combination of the node's strategies on the mesh axes that divides its tensors."""
    node = graph["op"]
    per_axis = [axis_strategies(node, graph, size) for size in mesh.shape]
    found = []
    for chosen in itertools.product(*per_axis):
        layout = combine(chosen)
        pairs = [
            (graph.spec(r).shape, held) for r, held in zip(node.inputs, layout.inputs, strict=True)
        ]
        pairs += [(s.shape, held) for s, held in zip(node.outputs, layout.outputs, strict=True)]
        if all(divides(shape, held, mesh.shape) for shape, held in pairs):
            found.append(layout)
    return found


def run_whole(
    case: OpCase, cotangents: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    inputs = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors)
    outputs = case.call(inputs)
    return outputs, gradients(outputs, inputs, cotangents)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor] | None
) -> list[Tensor | None]:
    wanted = [t for t in inputs if t.requires_grad]
    made = [i for i, o in enumerate(outputs) if o.requires_grad]
    if not wanted or not made or cotangents is None:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(
        [outputs[i] for i in made], wanted, [cotangents[i] for i in made], allow_unused=True
    ))  # fmt: skip
    return [
        (lambda g, t=t: torch.zeros_like(t) if g is None else g)(next(found))
        if t.requires_grad else None for t in inputs
    ]  # fmt: skip


def check(case: OpCase, graph: Graph, mesh: Mesh, layout: NodeLayout) -> None:
    """One layout of one case: sharded equals whole."""
    outputs, _ = run_whole(case, None)
    cotangents = [torch.randn_like(o) if o.is_floating_point() else o for o in outputs]
    outputs, grads = run_whole(case, cotangents)
    node = graph["op"]
    parts = [
        distribute(tensor.detach(), held, mesh)
        for tensor, held in zip(case.tensors, layout.inputs, strict=True)
    ]
    cotangent_parts = [
        distribute(c, gradient_layout(held), mesh)
        for c, held in zip(cotangents, layout.outputs, strict=True)
    ]
    interface = BlockInterface(
        ("op",), {ref.name: held for ref, held in zip(node.inputs, layout.inputs, strict=True)}, {},
        {value_key(Ref("op", i)): held for i, held in enumerate(layout.outputs)},
    )  # fmt: skip

    def work(communicator: ThreadCommunicator) -> tuple[list[Tensor], list[Tensor | None]]:
        rank = mesh.index(communicator.coordinates)
        module = localize_block(
            graph, interface, layouts={"op": layout},
            rank=Rank(mesh, communicator.coordinates, communicator),
        )  # fmt: skip
        inputs = [
            part[rank].requires_grad_(whole.requires_grad)
            for part, whole in zip(parts, case.tensors, strict=True)
        ]
        results = module(*inputs)
        own = gradients(results, inputs, [c[rank] for c in cotangent_parts])
        return [r.detach() for r in results], own

    ranks = run_ranks(mesh, work)
    for index, (output, held) in enumerate(zip(outputs, layout.outputs, strict=True)):
        found = collect([r[0][index] for r in ranks], held, mesh, of=f"output {index}")
        assert_close(found, output.detach(), f"output {index}")
    tolerance = 1e-6 if any(o.dtype == torch.float32 for o in outputs) else 1e-10
    for index, (grad, held) in enumerate(zip(grads, layout.inputs, strict=True)):
        own = [r[1][index] for r in ranks]
        if grad is not None:
            parts_of_gradient = [g for g in own if g is not None]
            of = f"gradient of input {index}"
            whole = gradient_layout(held)
            found = collect(parts_of_gradient, whole, mesh, of=of, tolerance=tolerance)
            assert_close(found, grad, of, tolerance)


def describe(layout: NodeLayout) -> str:
    texts = [
        [" ".join(map(str, held)) for held in side] for side in (layout.inputs, layout.outputs)
    ]
    return f"{layout.labels}: {', '.join(texts[0])} -> {', '.join(texts[1])}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_offered_layout_of_an_op_equals_one_device(
    case: OpCase, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    graph, proven = graph_of(case), 0
    chooser = random.Random(str(case))
    meshes = [Mesh(("tp",), (2,)), Mesh(("tp",), (3,)), Mesh(("dp", "tp"), (2, 2))]
    for mesh in meshes:
        layouts = node_layouts(graph, mesh)
        if len(mesh.shape) > 1 and len(layouts) > PAIRS_ON_TWO_AXES:
            layouts = chooser.sample(layouts, PAIRS_ON_TWO_AXES)
        for layout in layouts:
            try:
                check(case, graph, mesh, layout)
            except Exception as error:
                error.add_note(f"{case} on {mesh.shape} as {describe(layout)}")
                raise
            proven += 1
    assert proven >= len(meshes)
    record_property("proven", proven)
    print(f"{case}: {proven} layouts proven")
