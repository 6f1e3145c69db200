"""Proof by execution: an op run by ranks on parts equals the op on the whole.

In: a graph of one op, tensors for its inputs, a mesh and a layout that a rule offers. Out: nothing,
or an ``AssertionError`` that names the value or gradient that differs. The ranks are threads of
this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Ref
from ...planner.graph.layout import Mesh, NodeLayout, combine, divides, keeps_groups
from ...planner.ops import axis_strategies
from ..ops.collectives import Rank
from .localize import BlockInterface, localize_block, value_key
from .parts import assert_close, collect, distribute, gradient_layout
from .simulated import ThreadCommunicator, run_ranks

OP = "op"
"""Name of the graph node whose op is to be checked; the other nodes only supply its inputs."""

Call = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def node_layouts(graph: Graph, mesh: Mesh) -> list[NodeLayout]:
    """Return every layout on a mesh of the graph's only op: all combinations of its sharding
    strategies, one per mesh axis, that divide its tensors evenly."""
    node = graph[OP]
    per_axis = [axis_strategies(node, graph, size) for size in mesh.shape]
    found = []
    for chosen in itertools.product(*per_axis):
        layout = combine(chosen)
        pairs = [
            (graph.spec(r).shape, held) for r, held in zip(node.inputs, layout.inputs, strict=True)
        ]
        pairs += [(s.shape, held) for s, held in zip(node.outputs, layout.outputs, strict=True)]
        fits = all(divides(shape, held, mesh.shape) for shape, held in pairs)
        if fits and keeps_groups(chosen, mesh.shape):
            found.append(layout)
    return found


def run_whole(
    call: Call, tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    """Compute the op ``call`` on whole tensors; return its outputs, and the gradient of each input
    if ``cotangents`` (gradients of the outputs) are given."""
    inputs = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
    outputs = call(inputs)
    return outputs, gradients(outputs, inputs, cotangents)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """Return the gradient of each input: zeros if the input is unused, None if it requires no
    gradient. ``cotangents`` are the gradients of the outputs."""
    wanted = [t for t in inputs if t.requires_grad]
    made = [i for i, o in enumerate(outputs) if o.requires_grad]
    if not wanted or not made or cotangents is None:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [outputs[i] for i in made], wanted, [cotangents[i] for i in made], allow_unused=True
        )
    )
    return [
        (lambda g, t=t: torch.zeros_like(t) if g is None else g)(next(found))
        if t.requires_grad
        else None
        for t in inputs
    ]


def prove(
    graph: Graph, call: Call, tensors: Sequence[Tensor], *, mesh: Mesh, layout: NodeLayout
) -> None:
    """Check that ``layout`` is correct for an op: the results and gradients of all ranks of
    ``mesh`` together equal the whole op's (``call``). Raises AssertionError if they differ; errors
    of the op on shards are passed on."""
    outputs, _ = run_whole(call, tensors, None)
    cotangents = [torch.randn_like(o) if o.is_floating_point() else o for o in outputs]
    outputs, grads = run_whole(call, tensors, cotangents)
    ranks = _run_parts(graph, tensors, cotangents, mesh=mesh, layout=layout)
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
            gathered = collect(parts_of_gradient, whole, mesh, of=of, tolerance=tolerance)
            assert_close(gathered, grad, of, tolerance)


def _run_parts(
    graph: Graph,
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    mesh: Mesh,
    layout: NodeLayout,
) -> list[tuple[list[Tensor], list[Tensor | None]]]:
    """Compute the op on every rank's shards of ``tensors``; return each rank's outputs and
    gradients of its inputs. ``cotangents`` are the gradients of the whole outputs."""
    node = graph[OP]
    parts = [
        distribute(tensor.detach(), held, mesh)
        for tensor, held in zip(tensors, layout.inputs, strict=True)
    ]
    cotangent_parts = [
        distribute(c, gradient_layout(held), mesh)
        for c, held in zip(cotangents, layout.outputs, strict=True)
    ]
    interface = BlockInterface(
        (OP,),
        {ref.name: held for ref, held in zip(node.inputs, layout.inputs, strict=True)},
        {},
        {value_key(Ref(OP, i)): held for i, held in enumerate(layout.outputs)},
    )

    def work(communicator: ThreadCommunicator) -> tuple[list[Tensor], list[Tensor | None]]:
        rank = mesh.index(communicator.coordinates)
        module = localize_block(
            graph,
            interface,
            layouts={OP: layout},
            rank=Rank(mesh, communicator.coordinates, communicator),
        )
        inputs = [
            part[rank].requires_grad_(whole.requires_grad)
            for part, whole in zip(parts, tensors, strict=True)
        ]
        results = module(*inputs)
        own = gradients(results, inputs, [c[rank] for c in cotangent_parts])
        return [r.detach() for r in results], own

    return run_ranks(mesh, work)


def describe(layout: NodeLayout) -> str:
    """Return the layout of a node as one line of text.

    >>> from autoparallel.planner.graph.layout import INVARIANT
    >>> describe(NodeLayout(((INVARIANT,),), ((INVARIANT,),), ("I",)))
    'I: I -> I'
    """
    texts = [
        [" ".join(map(str, held)) for held in side] for side in (layout.inputs, layout.outputs)
    ]
    return f"{', '.join(layout.labels)}: {', '.join(texts[0])} -> {', '.join(texts[1])}"
