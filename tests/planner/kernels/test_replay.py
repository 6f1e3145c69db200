"""What a recomputed block runs again and keeps: of layers taken apart by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import leaf, op, weight

from autoparallel.planner import ops as rules
from autoparallel.planner.graph.graph import Block, Graph, Node, Ref
from autoparallel.planner.kernels.recompute import RECOMPUTE_MODES, Replay, find_replay
from autoparallel.planner.plan import Recompute

ROWS, WIDTH, INNER = 8, 16, 64


def linear(name: str, data: str, out: int, into: int) -> list[Node]:
    key = f"{name}.weight"
    return [
        weight(key, out, into),
        op(name, "linear.default", (Ref(data), Ref(key)), ROWS, out),
    ]


def wide(name: str, path: str, *reads: str) -> Node:
    return op(name, path, tuple(map(Ref, reads)), ROWS, WIDTH)


def attention_then_mlp() -> list[Node]:
    """h = x + proj(tanh(query(x · x))), x' = h + down(relu(up(h · h)))."""
    return [
        leaf("start", ROWS, WIDTH),
        *linear("x", "start", WIDTH, WIDTH),
        wide("first norm", "mul.Tensor", "x", "x"),
        *linear("query", "first norm", WIDTH, WIDTH),
        wide("tanh", "tanh.default", "query"),
        *linear("proj", "tanh", WIDTH, WIDTH),
        wide("h", "add.Tensor", "x", "proj"),
        wide("second norm", "mul.Tensor", "h", "h"),
        *linear("up", "second norm", INNER, WIDTH),
        op("relu", "relu.default", (Ref("up"),), ROWS, INNER),
        *linear("down", "relu", WIDTH, INNER),
        wide("out", "add.Tensor", "h", "down"),
    ]


def replay_of(nodes: list[Node], first: str) -> Replay:
    """Of the block from ``first`` on."""
    loss = op("loss", "mean.default", (Ref(nodes[-1].name),))
    graph = Graph((*nodes, loss), Ref("loss"), ROWS)
    names = [node.name for node in nodes if node.kind == "op"]
    block = Block("b", "b", tuple(names[names.index(first) :]), ())
    return find_replay(block, graph, rules, rules.storage_of(graph))


def test_a_residual_sum_is_kept_for_the_product_that_goes_into_it() -> None:
    found = replay_of(attention_then_mlp(), "first norm")
    assert found.kept["selective"] == {"query", "h", "up"}
    assert found.skipped["selective"] == {"query", "proj", "h", "up", "down", "out"}
    assert found.repeats([("first norm", 0), ("h", 0)]) == (True, True, True)
    assert found.repeats([("h", 1)]) == (True, False, True), "proj is not reduced again"
    assert found.repeats([("second norm", 0), ("out", 0)]) == (True, True, True)
    assert found.repeats([("down", 0)]) == (True, True, True), "its weight's gradient reads that"


def test_nothing_after_the_last_that_keeps_is_run_again() -> None:
    """The last product keeps what it reads, and is not computed for that."""
    found = replay_of(attention_then_mlp(), "first norm")
    assert found.skipped["full"] == {"down", "out"}
    assert found.repeats([("out", 1)]) == (False, False, False)
    assert found.repeats([("out", 0), ("second norm", 0)]) == (True, True, True)


def test_a_product_that_a_gradient_reads_is_kept_itself() -> None:
    """The sum goes into a product with the product that it is made of."""
    nodes = [
        leaf("start", ROWS, WIDTH),
        *linear("x", "start", WIDTH, WIDTH),
        *linear("proj", "x", WIDTH, WIDTH),
        wide("sum", "add.Tensor", "x", "proj"),
        wide("both", "mul.Tensor", "sum", "proj"),
    ]
    found = replay_of(nodes, "proj")
    assert found.kept["selective"] == {"proj"}
    assert found.skipped["selective"] == {"proj"}
    assert found.skipped["full"] == frozenset()


def test_two_products_into_one_sum_keep_that_alone() -> None:
    """As where attention and MLP read the same: x + attention(x) + mlp(x), read on."""
    nodes = [
        leaf("start", ROWS, WIDTH),
        *linear("x", "start", WIDTH, WIDTH),
        *linear("attention", "x", WIDTH, WIDTH),
        *linear("mlp", "x", WIDTH, WIDTH),
        wide("both", "add.Tensor", "attention", "mlp"),
        wide("h", "add.Tensor", "x", "both"),
        wide("square", "mul.Tensor", "h", "h"),
    ]
    found = replay_of(nodes, "attention")
    assert found.kept["selective"] == {"h"}
    assert found.skipped["selective"] == {"attention", "mlp", "both", "h"}
    assert found.unread["selective"] == {("both", 0), ("both", 1), ("h", 0), ("h", 1)}


def test_a_product_with_a_frozen_weight_still_reads_what_it_is_given() -> None:
    """It keeps its weight alone, but is called again: no sum stands for the value it reads."""
    nodes = [
        leaf("start", ROWS, WIDTH),
        *linear("x", "start", WIDTH, WIDTH),
        *linear("proj", "x", WIDTH, WIDTH),
        wide("h", "add.Tensor", "x", "proj"),
        wide("square", "mul.Tensor", "h", "h"),
        *linear("frozen", "proj", WIDTH, WIDTH),
        wide("out", "add.Tensor", "square", "frozen"),
    ]
    replaced = replay_of(
        [node for node in nodes if "frozen" not in node.name and node.name != "out"], "proj"
    )
    assert replaced.kept["selective"] == {"h"}
    still = [
        replace(node, outputs=(replace(node.spec, requires_grad=False),))
        if node.name == "frozen.weight"
        else node
        for node in nodes
    ]
    assert replay_of(still, "proj").kept["selective"] == {"proj"}
    found = replay_of(still, "proj")
    assert "frozen" in found.skipped["selective"]
    assert found.repeats([("frozen", 0)]) == (True, True, True)


def test_attention_with_a_learned_mask_makes_its_scores_again_with_it() -> None:
    """The mask is read when the softmax runs again, though no gradient keeps it."""
    shape = (ROWS, 2, 3, 4)
    nodes = [
        leaf("start", *shape),
        op("heads", "mul.Tensor", (Ref("start"), Ref("start")), *shape),
        op("bias", "mul.Tensor", (Ref("start"), Ref("start")), ROWS, 2, 3, 3),
        op("mask", "add.Tensor", (Ref("bias"), Ref("bias")), ROWS, 2, 3, 3),
        op(
            "attention",
            "scaled_dot_product_attention.default",
            (Ref("heads"), Ref("heads"), Ref("heads"), Ref("mask")),
            *shape,
        ),
    ]
    found = replay_of(nodes, "mask")
    for mode in ("selective", "attention"):
        assert found.kept[mode] == {"attention"}
        assert found.skipped[mode] == {"attention"}
    assert found.repeats([("attention", 3)]) == (True, True, True)
    assert found.repeats([("attention", 0)]) == (True, True, True)


def test_a_sum_that_is_larger_is_made_again() -> None:
    """What is kept is then the product: it is in half of the sum's number format."""
    nodes = [
        leaf("start", ROWS, WIDTH),
        *linear("x", "start", WIDTH, WIDTH),
        *linear("proj", "x", WIDTH, WIDTH),
        op("wide", "add.Tensor", (Ref("x"), Ref("proj")), 2, ROWS, WIDTH),
        op("square", "mul.Tensor", (Ref("wide"), Ref("wide")), 2, ROWS, WIDTH),
    ]
    found = replay_of(nodes, "proj")
    assert found.kept["selective"] == {"proj"}
    assert found.skipped["selective"] == {"proj"}


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_of_a_block_that_keeps_nothing_nothing_is_run_again(mode: Recompute) -> None:
    nodes = [
        leaf("start", ROWS, WIDTH),
        *linear("x", "start", WIDTH, WIDTH),
        wide("twice", "add.Tensor", "x", "x"),
        wide("turned", "neg.default", "twice"),
    ]
    found = replay_of(nodes, "twice")
    assert found.skipped[mode] == {"twice", "turned"}
    assert found.kept["selective"] == frozenset()
    assert found.repeats([("twice", 0), ("twice", 1)]) == (False, False, False)
