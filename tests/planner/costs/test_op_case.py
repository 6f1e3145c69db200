"""A case to measure is the call that a rank makes: its outputs have the local shapes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from op_cases import OpCase as Example
from op_cases import cases, graph_of
from small_graphs import mlp

from autoparallel.cost_model.profile.arguments import build_call
from autoparallel.cost_model.profile.case import OpCase
from autoparallel.passes.local.prove import node_layouts
from autoparallel.planner.costs.op_case import op_case
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import Mesh, local_shape
from autoparallel.planner.ops.work import work

MESHES = (Mesh(("tp",), (2,)), Mesh(("dp", "tp"), (2, 2)))


def local_case(
    graph: Graph, layout: object, mesh: Mesh
) -> tuple[OpCase | None, tuple[TensorSpec, ...]]:
    """The case of the graph's node ``op`` in a layout, and its local outputs."""
    node = graph["op"]

    def local(spec: TensorSpec, held: object) -> TensorSpec:
        return replace(spec, shape=local_shape(spec.shape, held, mesh.shape))  # type: ignore[arg-type]

    inputs = tuple(map(local, map(graph.spec, node.inputs), layout.inputs))  # type: ignore[attr-defined]
    outputs = tuple(map(local, node.outputs, layout.outputs))  # type: ignore[attr-defined]
    return op_case(node, inputs, outputs, work(node, inputs, outputs)), outputs


EVERY = cases()


@pytest.mark.parametrize("example", EVERY, ids=str)
def test_the_case_of_every_layout_runs_and_makes_the_local_output(example: Example) -> None:
    torch.manual_seed(0)
    graph, made = graph_of(example), 0
    for mesh in MESHES:
        for layout in node_layouts(graph, mesh)[:12]:
            case, outputs = local_case(graph, layout, mesh)
            if case is None:
                continue
            call = build_call(case, "cpu")
            args, kwargs = call.prepare()
            result = call.op(*args, **kwargs)
            results = result if isinstance(result, tuple | list) else (result,)
            found = [tuple(each.shape) for each in results]
            if "exchange" not in layout.labels:  # there ranks exchange what they have cut
                assert found == [spec.shape for spec in outputs], (case.key(), layout)
            made += 1
    assert made or work(graph["op"], *_whole(graph)).family == "view" or not _works(graph)


def _whole(graph: Graph) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    node = graph["op"]
    return tuple(map(graph.spec, node.inputs)), node.outputs


def _works(graph: Graph) -> bool:
    found = work(graph["op"], *_whole(graph))
    return bool(found.bytes_forward or found.bytes_backward)


def test_equal_layers_have_one_case() -> None:
    graph, _ = mlp(3)
    keys = set()
    for node in graph:
        if node.kind == "op" and node.op.startswith("aten.linear"):
            inputs = tuple(map(graph.spec, node.inputs))
            case = op_case(node, inputs, node.outputs, work(node, inputs, node.outputs))
            assert case is not None
            keys.add(case.key())
    assert len(keys) == 3  # the stem (16 to 16), up (16 to 64) and down (64 to 16)


def test_the_number_of_a_random_op_is_no_part_of_its_case() -> None:
    spec = TensorSpec((4, 8), "float32", True)

    def made(number: int) -> str:
        path = "autoparallel.counter_dropout.default"
        node = Node("d", "op", path, (Ref("x"), 0.1), {"number": number}, outputs=(spec,))
        case = op_case(node, (spec,), (spec,), work(node, (spec,), (spec,)))
        assert case is not None
        return case.key()

    assert made(1) == made(7)


def test_a_free_view_has_no_case_and_one_whose_backward_works_has() -> None:
    whole, half = TensorSpec((4, 8), "float32", True), TensorSpec((4, 4), "float32", True)
    view = Node("v", "op", "aten.view.default", (Ref("x"), [8, 4]), outputs=(whole,))
    assert op_case(view, (whole,), (whole,), work(view, (whole,), (whole,))) is None
    cut = Node("s", "op", "aten.slice.Tensor", (Ref("x"), 1, 0, 4), outputs=(half,))
    found = op_case(cut, (whole,), (half,), work(cut, (whole,), (half,)))
    assert found is not None
    assert json.loads(found.arguments) == [[{"tensor": 0}, 1, 0, 4], {}]


def test_causal_attention_of_split_positions_is_measured_as_the_last_part() -> None:
    """Not as the op itself, which would align the mask of a part to its upper left corner."""
    specs = [TensorSpec((2, 4, length, 8), "float32", requires_grad=True) for length in (16, 4)]
    whole, part = specs
    args = (Ref("q"), Ref("k"), Ref("v"), None, 0.0, True)
    node = Node(
        "op", "op", "aten.scaled_dot_product_attention.default", args, {"scale": 0.5}, (whole,)
    )
    inputs = (part, whole, whole)
    priced = work(node, inputs, (part,))
    assert priced.flops_forward == 2 * (2 * 4 * (4 * 16 - 4 * 4 // 2)) * (8 + 8)
    case = op_case(node, inputs, (part,), priced)
    assert case is not None
    assert case.op == "autoparallel.lower_right_attention.default"
    call = build_call(case, "cpu")
    args, kwargs = call.prepare()
    assert kwargs == {"dropout_p": 0.0, "scale": 0.5}
    assert call.op(*args, **kwargs).shape == part.shape
    alone = op_case(node, (whole,) * 3, (whole,), work(node, (whole,) * 3, (whole,)))
    assert alone is not None
    assert alone.op == node.op
