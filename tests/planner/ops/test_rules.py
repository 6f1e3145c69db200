"""The strategies that rules offer, against those derived by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from counted_calls import num_calls
from kept_captures import capture_once

from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import AxisStrategy
from autoparallel.planner.ops import axis_strategies, has_rule, strategies_form
from autoparallel.planner.ops.annotation import bind, parse
from autoparallel.planner.ops.catalog import list_rules
from autoparallel.planner.ops.saved import saved
from autoparallel.planner.ops.views import match_dims
from autoparallel.target.load import load_target

F, INT, BOOL = "float32", "int64", "bool"
X = Ref("x0")


def spec(*shape: int, dtype: str = F, grad: bool | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, dtype == F if grad is None else grad)


def single(
    op: str,
    args: tuple[Any, ...],
    inputs: list[TensorSpec],
    *outputs: TensorSpec,
    kinds: str = "",
    **kwargs: Any,
) -> Graph:
    """A graph of one op on ``x0, x1, …``; ``kinds`` marks parameters by ``p``."""
    nodes = [
        Node(
            f"x{i}",
            "parameter" if kinds[i : i + 1] == "p" else "op",
            "aten.clone.default",
            outputs=(each,),
        )
        for i, each in enumerate(inputs)
    ]
    node = Node("op", "op", f"aten.{op}", args, kwargs, outputs)
    return Graph((*nodes, node), Ref("op"), 2)


def text(strategy: AxisStrategy) -> str:
    sides = (" ".join(map(str, side)) for side in (strategy.inputs, strategy.outputs))
    return " -> ".join(sides)


def offered(
    op: str,
    args: tuple[Any, ...],
    inputs: list[TensorSpec],
    *outputs: TensorSpec,
    size: int = 2,
    **rest: Any,
) -> set[str]:
    graph = single(op, args, inputs, *outputs, **rest)
    return {text(strategy) for strategy in axis_strategies(graph["op"], graph, size)}


def splits(found: set[str]) -> set[str]:
    return {strategy for strategy in found if "S(" in strategy}


def test_linear_is_split_by_rows_of_the_batch_by_columns_and_by_rows_of_megatron() -> None:
    """x (b, s, i) times w (o, i) plus bias (o).

    Column-parallel: w and the bias split on o, x whole with a partial gradient.
    Row-parallel: x split on its last dim, w on i; the output and the bias are partial.
    """
    assert offered(
        "linear.default",
        (X, Ref("x1"), Ref("x2")),
        [spec(2, 4, 8), spec(6, 8), spec(6)],
        spec(2, 4, 6),
        kinds="opp",
    ) == {
        "S(0) R R -> S(0)",
        "S(1) R R -> S(1)",
        "R S(0) S(0) -> S(2)",
        "S(2) S(1) P -> P",
        "P R P -> P",
        "R R R -> R",
        "I I I -> I",
    }


def test_only_dims_that_the_axis_divides_are_split() -> None:
    found = offered("linear.default", (X, Ref("x1")), [spec(2, 9), spec(6, 9)], spec(2, 6), size=3)
    assert splits(found) == {"S(1) S(1) -> P", "R S(0) -> S(1)"}


def test_a_frozen_weight_is_invariant_instead_of_replicated() -> None:
    found = offered(
        "linear.default", (X, Ref("x1")), [spec(2, 8), spec(6, 8, grad=False)], spec(2, 6)
    )
    assert "S(0) I -> S(0)" in found
    assert "R I -> R" in found


def test_a_vocabulary_split_embedding_is_partial() -> None:
    found = offered(
        "embedding.default",
        (X, Ref("x1")),
        [spec(16, 8), spec(2, 4, dtype=INT)],
        spec(2, 4, 8),
        kinds="po",
    )
    assert found == {
        "S(0) I -> P",
        "S(1) I -> S(2)",
        "R S(0) -> S(0)",
        "R S(1) -> S(1)",
        "R I -> R",
        "I I -> I",
    }


def test_addition_passes_partial_sums_of_both_and_a_number_of_none() -> None:
    both = offered("add.Tensor", (X, Ref("x1")), [spec(4, 6), spec(6)], spec(4, 6))
    assert both == {"S(0) R -> S(0)", "S(1) S(0) -> S(1)", "P P -> P", "R R -> R", "I I -> I"}
    number = offered("add.Tensor", (X, 2.0), [spec(4, 6)], spec(4, 6))
    assert "P -> P" not in number


def test_multiplication_passes_partial_sums_of_one_factor() -> None:
    found = offered("mul.Tensor", (X, Ref("x1")), [spec(4, 6), spec(4, 1)], spec(4, 6))
    assert {"P R -> P", "R P -> P", "S(1) R -> S(1)", "S(0) S(0) -> S(0)"} <= found
    assert "P -> P" in offered("mul.Tensor", (X, 2.0), [spec(4, 6)], spec(4, 6))
    squares = offered("pow.Tensor_Scalar", (X, 2), [spec(4, 6)], spec(4, 6))
    assert "P -> P" not in squares


def test_division_passes_partial_sums_of_the_dividend_only() -> None:
    found = offered("div.Tensor", (X, Ref("x1")), [spec(4, 6), spec(4, 6)], spec(4, 6))
    assert "P R -> P" in found
    assert "R P -> P" not in found


def test_integers_are_never_asked_to_be_partial() -> None:
    found = offered("mul.Tensor", (X, 2), [spec(4, dtype=INT)], spec(4, dtype=INT))
    assert found == {"S(0) -> S(0)", "I -> I"}


@pytest.mark.parametrize(
    ("op", "args", "shape", "split"),
    [
        ("sum.dim_IntList", (X, [1]), (4, 8), {"S(0) -> S(0)", "S(1) -> P", "S(2) -> S(1)"}),
        ("mean.dim", (X, [-1], True), (4, 6, 1), {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> P"}),
        ("mean.default", (X,), (), {"S(0) -> P", "S(1) -> P", "S(2) -> P"}),
        ("amax.default", (X, [1]), (4, 8), {"S(0) -> S(0)", "S(2) -> S(1)"}),
        ("var.correction", (X, [-1]), (4, 6), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("softmax.int", (X, -1), (4, 6, 8), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("cumsum.default", (X, 0), (4, 6, 8), {"S(1) -> S(1)", "S(2) -> S(2)"}),
        ("select.int", (X, 1, 0), (4, 8), {"S(0) -> S(0)", "S(2) -> S(1)"}),
        ("slice.Tensor", (X, 1, 0, 3), (4, 3, 8), {"S(0) -> S(0)", "S(2) -> S(2)"}),
        ("transpose.int", (X, 0, -1), (8, 6, 4), {"S(0) -> S(2)", "S(1) -> S(1)", "S(2) -> S(0)"}),
        (
            "permute.default",
            (X, [2, 0, 1]),
            (8, 4, 6),
            {"S(0) -> S(1)", "S(1) -> S(2)", "S(2) -> S(0)"},
        ),
        ("tril.default", (X,), (4, 6, 8), {"S(0) -> S(0)"}),
    ],
)
def test_what_is_worked_along_stays_whole(
    op: str, args: tuple[Any, ...], shape: tuple[int, ...], split: set[str]
) -> None:
    assert splits(offered(op, args, [spec(4, 6, 8)], spec(*shape))) == split


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        ((2, 8, 32), (2, 8, 4, 8), {(0, 0), (1, 1), (2, 2)}),
        ((2, 8, 4, 8), (2, 8, 32), {(0, 0), (1, 1), (2, 2)}),
        ((2, 8, 32), (16, 32), {(0, 0), (2, 1)}),
        ((16, 32), (2, 8, 32), {(0, 0), (1, 2)}),
        ((2, 2, 3, 8, 4), (2, 6, 8, 4), {(0, 0), (1, 1), (3, 2), (4, 3)}),
        ((4, 6), (6, 4), {(0, 0)}),
        ((4, 1, 6), (4, 6), {(0, 0), (2, 1)}),
        ((4, 6), (1, 4, 1, 6), {(0, 1), (1, 3)}),
        ((4, 6), (24,), {(0, 0)}),
        ((), (1,), set()),
        ((0, 4), (4, 0), set()),
        ((2, 3, 4, 5), (6, 20), {(0, 0), (2, 1)}),
    ],
)
def test_a_reshape_carries_a_split_through_outermost_factors(
    source: tuple[int, ...], target: tuple[int, ...], pairs: set[tuple[int, int]]
) -> None:
    before, after = match_dims(source, target)
    found = {(dim, after.index(letter)) for dim, letter in enumerate(before) if letter}
    assert found == pairs
    assert {letter for letter in after if letter} == {letter for letter in before if letter}


def test_a_view_offers_a_split_only_where_both_shapes_divide() -> None:
    """32 features are 2 heads of 16: an axis of 4 divides the features but not the heads."""
    found = offered("view.default", (X, [4, 2, 16]), [spec(4, 32)], spec(4, 2, 16), size=4)
    assert splits(found) == {"S(0) -> S(0)"}


def test_an_expanded_dim_is_split_from_a_whole_input_with_a_partial_gradient() -> None:
    found = offered("expand.default", (X, [4, 6, 8]), [spec(1, 8)], spec(4, 6, 8))
    assert splits(found) == {"R -> S(0)", "R -> S(1)", "S(1) -> S(2)"}


def offered_to_groups(size: int) -> set[str]:
    """Return the strategies of causal attention on an axis of ``size``. It has eight heads of
    queries and two of keys, each of which four heads of queries read."""
    keys = spec(2, 2, 6, 4)
    return offered(
        "scaled_dot_product_attention.default",
        (X, Ref("x1"), Ref("x2"), None, 0.0, True),
        [spec(2, 8, 6, 4), keys, keys],
        spec(2, 8, 6, 4),
        size=size,
        enable_gqa=True,
    )


def test_attention_splits_batch_heads_and_queries_with_grouped_keys_along() -> None:
    assert splits(offered_to_groups(size=2)) == {
        "S(0) S(0) S(0) -> S(0)",
        "S(1) S(1) S(1) -> S(1)",
        "S(2) R R -> S(2)",
        "S(2) S(2) S(2) -> S(2)",
    }


def test_an_axis_with_more_ranks_than_key_heads_splits_those_of_queries_alone() -> None:
    assert splits(offered_to_groups(size=4)) == {"S(1) R R -> S(1)"}


def test_one_key_head_is_shared_by_all_query_heads() -> None:
    found = offered(
        "scaled_dot_product_attention.default",
        (X, Ref("x1"), Ref("x2")),
        [spec(2, 8, 6, 4), spec(2, 1, 6, 4), spec(2, 1, 6, 4)],
        spec(2, 8, 6, 4),
        enable_gqa=True,
    )
    assert "S(1) R R -> S(1)" in found


def test_a_mask_of_attention_is_split_only_where_it_has_the_dim() -> None:
    query = spec(2, 4, 6, 8)
    found = offered(
        "scaled_dot_product_attention.default",
        (X, Ref("x1"), Ref("x2"), Ref("x3")),
        [query, query, query, spec(2, 1, 6, 6, dtype=BOOL)],
        query,
    )
    assert splits(found) == {
        "S(0) S(0) S(0) S(0) -> S(0)",
        "S(1) S(1) S(1) I -> S(1)",
        "S(2) R R S(2) -> S(2)",
    }


def test_random_dropout_is_whole_and_no_dropout_is_the_identity() -> None:
    assert offered("dropout.default", (X, 0.1, True), [spec(4)], spec(4)) == {"R -> R", "I -> I"}
    assert "S(0) -> S(0)" in offered("dropout.default", (X, 0.0, True), [spec(4)], spec(4))
    assert "P -> P" in offered("dropout.default", (X, 0.1, False), [spec(4)], spec(4))


def test_counted_dropout_is_split_anywhere_and_linear_and_saves_nothing() -> None:
    graph = single("clone.default", (X,), [spec(4, 6)], spec(4, 6))
    op = "autoparallel.counter_dropout.default"
    node = replace(graph["op"], op=op, args=(X, 0.1), kwargs={"number": 0})
    found = {text(strategy) for strategy in axis_strategies(node, graph, 2)}
    assert found == {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P", "R -> R", "I -> I"}
    assert saved(node, graph) == ()


def test_cross_entropy_of_split_rows_is_partial_and_of_a_split_vocabulary_whole() -> None:
    graph = single(
        "cross_entropy_loss.default", (X, Ref("x1")), [spec(12, 8), spec(12, dtype=INT)], spec()
    )
    found = {text(each): each for each in axis_strategies(graph["op"], graph, 2)}
    assert set(found) == {"S(0) S(0) -> P", "S(1) I -> I", "R I -> R", "I I -> I"}
    assert [c.num_bytes for c in found["S(0) S(0) -> P"].collectives] == [8]
    assert [c.num_bytes for c in found["S(1) I -> I"].collectives] == [12 * 4, 2 * 12 * 4]


def test_a_summed_cross_entropy_needs_no_count() -> None:
    graph = single(
        "cross_entropy_loss.default",
        (X, Ref("x1"), None, 2),
        [spec(12, 8), spec(12, dtype=INT)],
        spec(),
    )
    strategies = {text(each): each for each in axis_strategies(graph["op"], graph, 2)}
    assert strategies["S(0) S(0) -> P"].collectives == ()


def test_a_mean_loss_of_elements_is_partial_over_any_dim() -> None:
    found = offered("mse_loss.default", (X, Ref("x1")), [spec(4, 6), spec(4, 6)], spec())
    assert found == {"S(0) S(0) -> P", "S(1) S(1) -> P", "R R -> R", "I I -> I"}


def test_concatenation_passes_partial_sums_of_all_inputs() -> None:
    found = offered("cat.default", ([X, Ref("x1")], -1), [spec(4, 2), spec(4, 4)], spec(4, 6))
    assert found == {"S(0) S(0) -> S(0)", "P P -> P", "R R -> R", "I I -> I"}


def test_an_empty_tensor_joins_any_others() -> None:
    found = offered("cat.default", ([X, Ref("x1")], -1), [spec(0), spec(4, 6)], spec(4, 6))
    assert found == {"R S(0) -> S(0)", "R P -> P", "R R -> R", "I I -> I"}


def test_every_output_of_a_split_is_listed() -> None:
    found = offered("split.Tensor", (X, 2, 1), [spec(4, 6)], spec(4, 2), spec(4, 2), spec(4, 2))
    assert found == {
        "S(0) -> S(0) S(0) S(0)",
        "P -> P P P",
        "R -> R R R",
        "I -> I I I",
    }


def test_padding_with_zeros_is_linear_and_with_other_numbers_is_not() -> None:
    zeros = offered("pad.default", (X, [0, 1], "constant", 0.0), [spec(4, 6)], spec(4, 7))
    assert zeros == {"S(0) -> S(0)", "P -> P", "R -> R", "I -> I"}
    ones = offered("constant_pad_nd.default", (X, [0, 1], 1.0), [spec(4, 6)], spec(4, 7))
    assert "P -> P" not in ones


def test_convolution_is_split_by_batch_and_by_channels_of_both_kinds() -> None:
    found = offered(
        "conv2d.default",
        (X, Ref("x1"), Ref("x2")),
        [spec(2, 4, 8, 8), spec(6, 4, 3, 3), spec(6)],
        spec(2, 6, 6, 6),
        kinds="opp",
    )
    assert splits(found) == {"S(0) R R -> S(0)", "S(1) S(1) P -> P", "R S(0) S(0) -> S(1)"}


def test_matrix_products_of_any_ranks_are_split_by_every_letter() -> None:
    found = offered("matmul.default", (X, Ref("x1")), [spec(2, 4, 6), spec(6, 8)], spec(2, 4, 8))
    assert splits(found) == {
        "S(0) R -> S(0)",
        "S(1) R -> S(1)",
        "S(2) S(0) -> P",
        "R S(1) -> S(2)",
    }
    vector = offered("matmul.default", (X, Ref("x1")), [spec(4, 6), spec(6)], spec(4))
    assert splits(vector) == {"S(0) R -> S(0)", "S(1) S(0) -> P"}
    einsum = offered(
        "einsum.default",
        ("bij,bjk->bki", [X, Ref("x1")]),
        [spec(2, 4, 6), spec(2, 6, 8)],
        spec(2, 8, 4),
    )
    assert splits(einsum) == {
        "S(0) S(0) -> S(0)",
        "S(1) R -> S(2)",
        "S(2) S(1) -> P",
        "R S(2) -> S(1)",
    }


def test_indices_are_split_from_a_whole_source_or_read_whole_from_a_split_one() -> None:
    found = offered(
        "index.Tensor", (X, [None, Ref("x1")]), [spec(4, 6), spec(8, dtype=INT)], spec(4, 8)
    )
    assert splits(found) == {"S(0) I -> S(0)", "R S(0) -> S(1)", "S(1) I -> P"}
    mask = offered("index.Tensor", (X, [Ref("x1")]), [spec(4, 6), spec(4, dtype=BOOL)], spec(2, 6))
    assert splits(mask) == set()


def test_an_op_without_a_rule_is_whole() -> None:
    assert offered("svdvals.default", (X,), [spec(4, 4)], spec(4)) == {"R -> R", "I -> I"}
    assert not has_rule("aten.svdvals.default")
    assert not has_rule("higher_order.something")
    assert has_rule("aten.relu_.default")


def test_a_comparison_has_no_gradient_so_nothing_is_replicated() -> None:
    found = offered("gt.Scalar", (X, 0), [spec(4)], spec(4, dtype=BOOL))
    assert found == {"S(0) -> S(0)", "I -> I"}


def test_a_parameter_is_held_split_or_replicated() -> None:
    node = Node("w", "parameter", outputs=(spec(6, 9),))
    graph = Graph((node,), Ref("w"), 2)
    assert [text(each) for each in axis_strategies(node, graph, 3)] == [
        " -> S(0)",
        " -> S(1)",
        " -> R",
    ]


def test_every_listed_op_has_an_annotation_or_says_its_splits() -> None:
    listed = {each.op: each for each in list_rules()}
    assert all(has_rule(f"aten.{op}.default") and each.splits for op, each in listed.items())
    assert listed["linear"].annotation == "*b i, o i + o -> *b o"


def test_annotations_that_do_not_fit_the_shapes_bind_to_nothing() -> None:
    assert bind("i k, k j -> i j", [(2, 3, 4), (4, 5)], [(2, 3, 5)]) is None
    assert bind("* -> *", [(2,), (2,)], [(2,)]) is None
    assert parse("[*], * + * -> *").terms == ((1,), (2,))


def test_strategies_of_a_node_take_few_calls() -> None:
    """There are thousands of nodes: of 400 calls each, they take less than a second."""
    graph = single(
        "linear.default",
        (X, Ref("x1"), Ref("x2")),
        [spec(2, 4, 8), spec(6, 8), spec(6)],
        spec(2, 4, 6),
    )
    axis_strategies(graph["op"], graph, 2)  # what a rule says is read once
    assert num_calls(lambda: axis_strategies(graph["op"], graph, 2)) < 400


@pytest.mark.parametrize("name", ["examples/gpt.py", "hf:tests/models/mixtral"])
def test_equal_forms_have_equal_strategies_and_equal_layers_have_equal_forms(name: str) -> None:
    """Of all nodes of a model with tied weights and dropout, and of a mixture of experts."""
    target = load_target(name, {})
    graph = capture_once(target, target.example_batch(2, None), "fp32")[1].graph
    by_form: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph:
        by_form.setdefault(strategies_form(node, graph), []).append(node)
    for nodes in by_form.values():
        for size in (2, 3, 4):
            every = [axis_strategies(node, graph, size) for node in nodes]
            assert all(each == every[0] for each in every)
    assert 1.5 * len(by_form) < len(graph.nodes)
