"""Batches that are made up for a graph: every op accepts their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoparallel.passes.programs.inputs import document_inputs, integer_bounds, random_batch
from autoparallel.passes.programs.interpret import run
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec


def graph_of(path: str, args: tuple[Any, ...], made: tuple[int, ...]) -> Graph:
    """Return a graph of a table, of integers through a view, and of an op that takes both."""
    nodes = (
        Node("table", "input", outputs=(TensorSpec((7, 3), "float32"),)),
        Node("given", "input", outputs=(TensorSpec((4,), "int64"),)),
        Node(
            "at",
            "op",
            "aten.view.default",
            (Ref("given"), [-1]),
            outputs=(TensorSpec((4,), "int64"),),
        ),
        Node("op", "op", f"aten.{path}", args, outputs=(TensorSpec(made, "float32"),)),
    )
    return Graph(nodes, Ref("op"), 4)


TABLE, AT = Ref("table"), Ref("at")


@pytest.mark.parametrize(
    ("path", "args", "made", "bound"),
    [
        ("embedding.default", (TABLE, AT), (4, 3), 7),
        ("index_select.default", (TABLE, 0, AT), (4, 3), 7),
        ("index_select.default", (TABLE, 1, AT), (7, 4), 3),
        ("index.Tensor", (TABLE, [AT]), (4, 3), 3),
        ("one_hot.default", (AT, 5), (4, 5), 5),
    ],
)
def test_an_op_accepts_the_largest_and_the_smallest_of_the_values_it_bounds(
    path: str, args: tuple[Any, ...], made: tuple[int, ...], bound: int
) -> None:
    graph = graph_of(path, args, made)
    assert integer_bounds(graph) == {"given": bound}
    drawn = [random_batch(graph, seed=seed) for seed in range(12)]
    values = torch.cat([batch["given"] for batch in drawn])
    assert 0 <= int(values.min()) <= int(values.max()) < bound
    for batch in drawn:
        assert run(graph, batch).shape == made


def test_integers_that_no_op_bounds_are_ones_and_a_batch_repeats() -> None:
    graph = graph_of("add.Tensor", (AT, 1), (4,))
    assert integer_bounds(graph) == {}
    batch, again = (random_batch(graph, seed=3) for _ in range(2))
    assert batch["given"].tolist() == [1, 1, 1, 1]
    assert torch.equal(batch["table"], again["table"])
    assert not torch.equal(batch["table"], random_batch(graph, seed=4)["table"])
    assert random_batch(graph, seed=3, dtype="float64")["table"].dtype == torch.float64


def packed_graph(*made: tuple[str, str, tuple[Any, ...]], bound: int | None = None) -> Graph:
    """Return a graph whose attention has ids made from the input "given" (3, 16) by the ops
    ``made``; with ``bound`` the input is the index of an embedding, too."""
    wide, heads = TensorSpec((3, 16), "int64"), TensorSpec((3, 1, 16, 2), "float32")
    nodes = [Node("given", "input", outputs=(wide,)), Node("q", "input", outputs=(heads,))]
    nodes += [Node(name, "op", f"aten.{op}", args, outputs=(wide,)) for name, op, args in made]
    ids, shape = Ref(nodes[-1].name if made else "given"), (3, 1, 1, 16)
    row = TensorSpec(shape, "int64")
    nodes.append(Node("row", "op", "aten.reshape.default", (ids, shape), outputs=(row,)))
    path = "autoparallel.scaled_dot_product_attention.default"
    args = (Ref("q"), Ref("q"), Ref("q"), None, 0.0, True)
    nodes.append(Node("out", "op", path, args, {"documents": Ref("row")}, (heads,)))
    if bound is not None:
        table, looked_up = (TensorSpec(each, "float32") for each in ((bound, 2), (3, 16, 2)))
        nodes.append(Node("table", "input", outputs=(table,)))
        given = (Ref("table"), Ref("given"))
        nodes.append(Node("e", "op", "aten.embedding.default", given, outputs=(looked_up,)))
    return Graph(tuple(nodes), Ref("out"), 3)


STEPS = (
    ("diff", "diff.default", (Ref("given"), 1, -1)),
    ("ne", "ne.Scalar", (Ref("diff"), 1)),
    ("sum", "cumsum.default", (Ref("ne"), -1)),
)
COUNTED = (("eq", "eq.Scalar", (Ref("given"), 0)), ("sum", "cumsum.default", (Ref("eq"), -1)))


def test_ids_of_documents_are_a_few_in_order() -> None:
    graph = packed_graph()
    assert document_inputs(graph) == {"given": "ids"}
    found = random_batch(graph, seed=0)["given"]
    assert bool((found.diff(dim=-1) >= 0).all())
    assert found.max() == 3
    assert len({tuple(row) for row in found.tolist()}) == 3


@pytest.mark.parametrize(("made", "bound"), [(STEPS, None), (STEPS, 16), (COUNTED, None)])
def test_positions_restart_with_each_of_a_few_documents(
    made: tuple[tuple[str, str, tuple[Any, ...]], ...], bound: int | None
) -> None:
    graph = packed_graph(*made, bound=bound)
    assert document_inputs(graph) == {"given": "positions"}
    found = random_batch(graph, seed=0)["given"]
    assert bool((found[:, 0] == 0).all())
    steps = found.diff(dim=-1)
    assert bool(((steps == 1) | (found[:, 1:] == 0)).all())
    assert 0 < int((steps != 1).sum()) <= 9


def test_words_that_end_documents_stay_words() -> None:
    assert document_inputs(packed_graph(*COUNTED, bound=50)) == {}
