"""The graph type: references, rescaling and the fingerprint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref, TensorSpec


def _graph(dtype: str = "float32", batch: int = 2) -> Graph:
    x = TensorSpec((batch, 4), dtype)
    w = TensorSpec((3, 4), dtype, requires_grad=True)
    y = TensorSpec((batch, 3), dtype, requires_grad=True)
    return Graph(
        nodes=(
            Node("x", "input", outputs=(x,)),
            Node("fc.weight", "parameter", outputs=(w,)),
            Node("linear", "op", "aten.linear.default", (Ref("x"), Ref("fc.weight")), outputs=(y,)),
            Node(
                "sum",
                "op",
                "aten.sum.default",
                (Ref("linear"),),
                outputs=(TensorSpec((), dtype, True),),
            ),
        ),
        loss=Ref("sum"),
        batch_size=batch,
        batch_dims={"x": (0,), "fc.weight": (None,), "linear": (0,), "sum": (None,)},
    )


def test_rescaling_changes_batch_dimensions_alone() -> None:
    graph = _graph().with_batch_size(6)
    assert graph["x"].spec.shape == (6, 4)
    assert graph["linear"].spec.shape == (6, 3)
    assert graph["fc.weight"].spec.shape == (3, 4)
    assert graph.batch_size == 6


def test_a_graph_without_batch_dimensions_is_not_rescaled() -> None:
    with pytest.raises(ValueError, match="cannot be rescaled"):
        replace(_graph(), batch_dims={}).with_batch_size(4)


def test_the_fingerprint_ignores_dtype_and_batch_but_not_structure() -> None:
    graph = _graph()
    assert graph.fingerprint == _graph("float64").fingerprint
    assert graph.fingerprint == graph.with_batch_size(8).fingerprint
    wider = tuple(
        replace(n, outputs=(replace(n.spec, shape=(5, 4)),)) if n.name == "fc.weight" else n
        for n in graph.nodes
    )
    assert graph.fingerprint != replace(graph, nodes=wider).fingerprint


def test_inputs_are_found_in_nested_arguments_in_call_order() -> None:
    node = Node(
        "cat", "op", "aten.cat.default", ([Ref("a"), Ref("b", 1)], -1), {"x": (Ref("a"), None)}
    )
    assert node.inputs == (Ref("a"), Ref("b", 1), Ref("a"))


def test_users_are_listed_once_in_order() -> None:
    assert _graph().users["x"] == ("linear",)
    assert _graph().users["sum"] == ()


def test_blocks_of_one_kind_correspond_by_position() -> None:
    blocks = Blocks(
        (
            Block("layers.0", "layers", ("a0", "b0"), ("w0",)),
            Block("layers.1", "layers", ("a1", "b1"), ("w1",)),
        )
    )
    assert blocks.template == {
        "a0": "a0",
        "b0": "b0",
        "w0": "w0",
        "a1": "a0",
        "b1": "b0",
        "w1": "w0",
    }
    assert blocks.of_node["w1"] == 1
    assert blocks.kinds["layers"].name == "layers.0"
