"""Where positions are counted, and ops that cannot run on slices of sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_graphs import op, weight

from autoparallel.planner.dims.sequence_places import SeqDim, find_places
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec

ROWS, LENGTH, WIDTH = 2, 6, 4
HEADS = (ROWS, 2, LENGTH, WIDTH)


def tokens(*ops: Node, loss: Node | None = None) -> Graph:
    """Return a graph of token numbers, an embedding, ops, and a mean as loss."""
    nodes = (
        Node("ids", "input", outputs=(TensorSpec((ROWS, LENGTH), "int64"),)),
        weight("table", 9, WIDTH),
        op("embedded", "embedding.default", (Ref("table"), Ref("ids")), ROWS, LENGTH, WIDTH),
        *ops,
        loss or op("loss", "mean.default", (Ref(ops[-1].name if ops else "embedded"),)),
    )
    whole = {"table", *(node.name for node in nodes if not node.spec.shape)}
    dims = {node.name: (None if node.name in whole else 0,) for node in nodes}
    return Graph(nodes, Ref("loss"), ROWS, batch_dims=dims)


def after(path: str, args: tuple[Any, ...], *shape: int) -> Node:
    return op("after", path, (Ref("embedded"), *args), *shape)


def heads(source: str = "embedded", length: int = LENGTH) -> Node:
    return op(f"heads_of_{source}", "unsqueeze.default", (Ref(source), 1), ROWS, 1, length, WIDTH)


def attention(*options: Any, key: str = "heads_of_embedded") -> Node:
    query = Ref("heads_of_embedded")
    return op(
        "attention",
        "scaled_dot_product_attention.default",
        (query, Ref(key), query, *options),
        ROWS,
        1,
        LENGTH,
        WIDTH,
    )


def test_positions_are_followed_through_views_slices_and_causal_attention() -> None:
    flat = after("reshape.default", ([ROWS * LENGTH, WIDTH],), ROWS * LENGTH, WIDTH)
    places = find_places(tokens(flat)).places
    assert places[Ref("embedded")] == SeqDim(1, count=LENGTH)
    assert places[Ref("after")] == SeqDim(0, outer=ROWS, count=LENGTH)
    cut = after("slice.Tensor", (1, -4, -1), ROWS, 3, WIDTH)
    assert find_places(tokens(cut)).places[Ref("after")] == SeqDim(1, first=2, count=3)
    causal = find_places(tokens(heads(), attention(None, 0.0, True)))
    assert causal.attention == ["attention"]
    assert causal.places[Ref("attention")] == SeqDim(2, count=LENGTH)
    assert causal.length == LENGTH
    assert set(causal.means) == {"loss"}


FLIPPED = op("flipped", "flip.default", (Ref("embedded"), [2]), ROWS, LENGTH, WIDTH)
SHORTER = after("slice.Tensor", (1, 0, 3), ROWS, 3, WIDTH)
LATER = op("later", "slice.Tensor", (Ref("embedded"), 1, 3, 6), ROWS, 3, WIDTH)

REFUSED: dict[str, tuple[Graph, str]] = {
    "softmax over positions": (
        tokens(after("softmax.int", (1,), ROWS, LENGTH, WIDTH)),
        "depends on others",
    ),
    "attention that sees later positions": (
        tokens(heads(), attention(None, 0.0, False)),
        "not causal",
    ),
    "dropout in attention": (
        tokens(heads(), attention(None, 0.1, True)),
        "random numbers are not counted",
    ),
    "attention within packed documents": (
        tokens(
            heads(),
            replace(attention(None, 0.0, True), kwargs={"documents": Ref("ids")}),
        ),
        "a window or packed documents",
    ),
    "keys of fewer positions": (
        tokens(
            heads(),
            SHORTER,
            heads("after", 3),
            attention(None, 0.0, True, key="heads_of_after"),
        ),
        "not along the same positions",
    ),
    "classes that are positions": (
        tokens(loss=op("loss", "cross_entropy_loss.default", (Ref("embedded"), Ref("ids")))),
        "scores are not along positions",
    ),
    "targets that are probabilities": (
        tokens(
            after("reshape.default", ([ROWS * LENGTH, WIDTH],), ROWS * LENGTH, WIDTH),
            loss=op("loss", "cross_entropy_loss.default", (Ref("after"), Ref("after"))),
        ),
        "rows are not counted",
    ),
    "every second position": (
        tokens(after("slice.Tensor", (1, 0, 6, 2), ROWS, 3, WIDTH)),
        "not consecutive",
    ),
    "a view through positions": (
        tokens(after("view.default", ([ROWS, 4, WIDTH * LENGTH // 4],), ROWS, 4, 6)),
        "cut through positions",
    ),
    "early positions meet late ones": (
        tokens(
            SHORTER,
            LATER,
            op("sum", "add.Tensor", (Ref("after"), Ref("later")), ROWS, 3, WIDTH),
        ),
        "different positions",
    ),
    "a square of the sum": (
        tokens(
            op("total", "sum.default", (Ref("embedded"),)),
            loss=op("loss", "pow.Tensor_Scalar", (Ref("total"), 2)),
        ),
        "not linear in a sum",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_that_mixes_positions_is_named_with_its_reason(name: str) -> None:
    graph, why = REFUSED[name]
    with pytest.raises(PlanError, match=why) as raised:
        find_places(graph)
    assert raised.value.code == "AP548"
