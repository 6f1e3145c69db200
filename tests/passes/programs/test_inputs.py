"""Batches that are made up for a graph: every op accepts their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoparallel.passes.programs.inputs import integer_bounds, random_batch
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
