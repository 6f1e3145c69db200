"""Which dims count the batch, on graphs small enough to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from counted_calls import num_calls

from autoparallel.planner.dims.batch import (
    find_batch,
    meeting,
    meeting_text,
    rows_apart,
)
from autoparallel.planner.graph.graph import Accumulation, Graph, Node, Ref, TensorSpec


def spec(*shape: int, dtype: str = "float32", grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, dtype, grad and dtype == "float32")


def data(name: str, *shape: int, dtype: str = "float32") -> Node:
    return Node(name, "input", outputs=(spec(*shape, dtype=dtype, grad=False),))


def weight(name: str, *shape: int) -> Node:
    return Node(name, "parameter", outputs=(spec(*shape),))


def op(name: str, path: str, args: tuple[Any, ...], *outputs: TensorSpec) -> Node:
    return Node(name, "op", f"aten.{path}", args, outputs=outputs)


def constant(name: str, path: str, args: tuple[Any, ...], *shape: int) -> Node:
    return Node(name, "constant", f"aten.{path}", args, outputs=(spec(*shape, grad=False),))


def graph(*nodes: Node) -> Graph:
    return Graph(nodes, Ref(nodes[-1].name), 2)


def find_batch_dims(graph: Graph) -> Mapping[str, tuple[int | None, ...]] | None:
    found = find_batch(graph)
    return None if found is None else found[0]


def mean(of: str) -> Node:
    return op("loss", "mean.default", (Ref(of),), spec())


def test_the_batch_is_followed_through_views_and_products_to_a_mean() -> None:
    found = find_batch_dims(
        graph(
            data("x", 2, 3, 4),
            weight("w", 6, 4),
            op("y", "linear.default", (Ref("x"), Ref("w")), spec(2, 3, 6)),
            op("flat", "view.default", (Ref("y"), [6, 6]), spec(6, 6)),
            op("turned", "t.default", (Ref("flat"),), spec(6, 6)),
            mean("turned"),
        )
    )
    assert found == {
        "x": (0,),
        "w": (None,),
        "y": (0,),
        "flat": (0,),
        "turned": (1,),
        "loss": (None,),
    }


def test_a_model_that_mixes_rows_has_no_batch() -> None:
    assert (
        find_batch_dims(
            graph(
                data("x", 2, 4),
                weight("w", 4),
                op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
                op("mixed", "softmax.int", (Ref("y"), 0), spec(2, 4)),
                mean("mixed"),
            )
        )
        is None
    )


def test_the_batch_is_followed_up_to_where_rows_meet() -> None:
    """Two towers and a product of all rows with all: what comes after it may be split freely."""
    found = rows_apart(
        graph(
            data("x", 2, 4),
            data("y", 2, 4),
            weight("w", 4, 4),
            op("left", "linear.default", (Ref("x"), Ref("w")), spec(2, 4)),
            op("right", "t.default", (Ref("y"),), spec(4, 2)),
            op("logits", "matmul.default", (Ref("left"), Ref("right")), spec(2, 2)),
            op("more", "relu.default", (Ref("logits"),), spec(2, 2)),
            mean("more"),
        )
    )
    assert found == {"x": (0,), "y": (0,), "w": (None,), "left": (0,), "right": (1,)}


def test_a_loss_that_is_no_sum_over_rows_has_no_batch() -> None:
    assert (
        find_batch_dims(
            graph(
                data("x", 2, 4),
                weight("w", 4),
                op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
                mean("y"),
                op("root", "sqrt.default", (Ref("loss"),), spec()),
            )
        )
        is None
    )


def test_a_scaled_sum_of_two_losses_is_followed() -> None:
    found = find_batch_dims(
        graph(
            data("x", 2, 4),
            weight("w", 4),
            op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
            mean("y"),
            op("scaled", "mul.Tensor", (Ref("loss"), 0.5), spec()),
            op("total", "add.Tensor", (Ref("scaled"), Ref("loss")), spec()),
        )
    )
    assert found is not None


def test_a_parameter_expanded_over_the_batch_follows_it() -> None:
    """A class token (1, 1, 4) is expanded to (2, 1, 4) and joined to the rows."""
    found = find_batch_dims(
        graph(
            data("x", 2, 3, 4),
            weight("token", 1, 1, 4),
            op("tokens", "expand.default", (Ref("token"), [2, -1, -1]), spec(2, 1, 4)),
            op("all", "cat.default", ([Ref("tokens"), Ref("x")], 1), spec(2, 4, 4)),
            mean("all"),
        )
    )
    assert found is not None
    assert (found["token"], found["tokens"], found["all"]) == ((None,), (0,), (0,))


def test_a_parameter_of_the_batch_size_is_no_batch() -> None:
    assert (
        find_batch_dims(
            graph(
                data("x", 2, 4),
                weight("w", 2, 4),
                op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
                mean("y"),
            )
        )
        is None
    )


def masked(*recipe: Node) -> Graph:
    """x (2, 4) + the last of the recipe (2, 4)."""
    return graph(
        data("x", 2, 4),
        weight("w", 4),
        op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
        *recipe,
        op("z", "add.Tensor", (Ref("y"), Ref(recipe[-1].name)), spec(2, 4)),
        mean("z"),
    )


def test_a_constant_of_equal_rows_follows_the_batch() -> None:
    """Positions (4) are expanded to (2, 4), compared and looked up by row numbers."""
    positions = constant("positions", "arange.default", (4,), 4)
    rows = constant("rows", "expand.default", (Ref("positions"), [2, 4]), 2, 4)
    found = find_batch_dims(masked(positions, rows))
    assert found is not None
    assert (found["positions"], found["rows"]) == ((None,), (0,))
    counted = constant("counted", "cumsum.default", (Ref("rows"), -1), 2, 4)
    numbers = constant("numbers", "arange.default", (2,), 2)
    column = constant("column", "unsqueeze.default", (Ref("numbers"), 1), 2, 1)
    looked_up = constant(
        "looked_up", "index.Tensor", (Ref("counted"), [Ref("column"), Ref("positions")]), 2, 4
    )
    found = find_batch_dims(masked(positions, rows, counted, numbers, column, looked_up))
    assert found is not None
    assert (found["looked_up"], found["column"]) == ((0,), (None,))


def test_a_constant_of_different_rows_has_no_batch() -> None:
    numbers = constant("numbers", "arange.default", (8,), 8)
    table = constant("table", "view.default", (Ref("numbers"), [2, 4]), 2, 4)
    assert find_batch_dims(masked(numbers, table)) is None


def test_the_graph_is_rescaled_by_what_was_found() -> None:
    found = graph(
        data("x", 2, 3, 4),
        weight("w", 6, 4),
        op("y", "linear.default", (Ref("x"), Ref("w")), spec(2, 3, 6)),
        op("flat", "view.default", (Ref("y"), [6, 6]), spec(6, 6)),
        mean("flat"),
    )
    dims = find_batch_dims(found)
    assert dims is not None
    larger = Graph(found.nodes, found.loss, 2, dims).with_batch_size(10)
    assert larger["flat"].spec.shape == (30, 6)
    assert larger["w"].spec.shape == (6, 4)


def test_each_of_many_nodes_takes_as_few_calls_as_each_of_few() -> None:
    few, more, many = map(calls_for, (10, 110, 1210))
    assert many - more <= 1.05 * 11 * (more - few)
    assert more - few < 100 * 2 * 100


def calls_for(num_layers: int) -> int:
    large = deep(num_layers)
    return num_calls(lambda: find_batch_dims(large))


def deep(num_layers: int) -> Graph:
    """Equal layers of two ops each."""
    layers = [data("h0", 2, 3, 4), weight("w", 4, 4)]
    for index in range(num_layers):
        layers.append(
            op(f"m{index}", "linear.default", (Ref(f"h{index}"), Ref("w")), spec(2, 3, 4))
        )
        layers.append(op(f"h{index + 1}", "gelu.default", (Ref(f"m{index}"),), spec(2, 3, 4)))
    return graph(*layers, mean(f"h{num_layers}"))


def two_means(*after: Node) -> Graph:
    """A loss, to which the nodes ``after`` add what they make of two other means."""
    return graph(
        data("x", 2, 4),
        weight("w", 4),
        op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
        op("first", "mean.dim", (Ref("y"), [0]), spec(4)),
        op("exp", "exp.default", (Ref("y"),), spec(2, 4)),
        op("second", "mean.dim", (Ref("exp"), [0]), spec(4)),
        op("loss", "mean.default", (Ref("y"),), spec()),
        *after,
    )


def test_samples_meet_in_a_product_of_two_means() -> None:
    """The auxiliary losses of mixtures of experts: a micro-batch has a product of its own."""
    found = two_means(
        op("product", "mul.Tensor", (Ref("first"), Ref("second")), spec(4)),
        op("sum", "sum.default", (Ref("product"),), spec()),
        op("total", "add.Tensor", (Ref("sum"), Ref("loss")), spec()),
    )
    dims, accumulation = find_batch(found) or ({}, None)
    assert dims["y"] == (0,)
    assert accumulation is not None
    assert accumulation.mixing == ("product",)
    assert not accumulation.sums


def test_a_number_that_is_added_to_a_loss_lets_the_batch_divide() -> None:
    found = find_batch(two_means(op("total", "add.Tensor", (Ref("loss"), 1.0), spec())))
    assert found is not None
    assert not found[1].mixing


def counting(update: str, *args: Any) -> Graph:
    """A loss, and a buffer of counts of results that the op ``update`` changes."""
    counts = spec(4, dtype="int64", grad=False)
    return replace(
        graph(
            data("x", 2, 4),
            weight("w", 4),
            op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
            op("chosen", "gt.Scalar", (Ref("y"), 0.0), spec(2, 4, dtype="bool")),
            Node("buffer", "buffer", outputs=(counts,)),
            op("load", "sum.dim_IntList", (Ref("chosen"), [0]), counts),
            op("new", update, (*args, Ref("load")), counts),
            mean("y"),
        ),
        updates={"buffer": Ref("new")},
    )


def test_a_buffer_that_counts_is_the_mean_over_micro_batches() -> None:
    found = find_batch(counting("add.Tensor", Ref("buffer")))
    assert found is not None
    assert found[1] == Accumulation(sums=("load",), means=("buffer",))


def test_samples_meet_in_a_buffer_that_is_not_linear_in_counts() -> None:
    found = find_batch(counting("maximum.default", Ref("buffer")))
    assert found is not None
    assert found[1].mixing == ("new",)
    assert not found[1].means


def test_the_node_in_which_samples_meet_is_found_and_described() -> None:
    softmax = op("mixed", "softmax.int", (Ref("x"), 0), spec(2, 4))
    found = meeting(graph(data("x", 2, 4), softmax, mean("mixed")))
    assert found == softmax
    assert meeting_text(replace(softmax, module="gate", source="a/b.py:3")) == (
        "samples meet in softmax of gate (b.py:3)"
    )
    assert meeting(two_means()) is None


def test_a_total_that_is_added_to_a_buffer_is_the_same_in_every_micro_batch() -> None:
    count = spec(dtype="int64", grad=False)
    found = find_batch(
        replace(
            graph(
                data("mask", 2, 4, dtype="int64"),
                Node("seen", "buffer", outputs=(count,)),
                op("total", "sum.default", (Ref("mask"),), count),
                op("new", "add.Tensor", (Ref("seen"), Ref("total")), count),
                data("x", 2, 4),
                weight("w", 4),
                op("y", "mul.Tensor", (Ref("x"), Ref("w")), spec(2, 4)),
                op("sum", "sum.default", (Ref("y"),), spec()),
                op("loss", "div.Tensor", (Ref("sum"), Ref("total")), spec()),
            ),
            updates={"seen": Ref("new")},
        )
    )
    assert found is not None
    assert found[1].totals == (Ref("total"),)
    assert found[1].means == ("seen",)
    assert not found[1].mixing
