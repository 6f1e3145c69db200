"""Blocks written by hand, split as the literature splits them, equal one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from communicator import ThreadCommunicator, make_communicators, run_ranks
from sharding import assert_close, collect, distribute, gradient_layout
from torch import Tensor, fx

from autoparallel.passes.local.localize import (
    BlockInterface,
    localize_block,
    parse_key,
    reference_layouts,
    value_key,
)
from autoparallel.passes.ops.collectives import Rank
from autoparallel.passes.programs.interpret import run
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Layout, Mesh, NodeLayout, parse_layout

TP = Mesh(("tp",), (2,))
DP_TP = Mesh(("dp", "tp"), (2, 2))


def parameter(name: str, *shape: int) -> Node:
    return Node(name, "parameter", outputs=(TensorSpec(shape, "float64", True),))


def given(name: str, *shape: int, dtype: str = "float64") -> Node:
    return Node(name, "input", outputs=(TensorSpec(shape, dtype),))


def op(name: str, path: str, *args: object, shape: tuple[int, ...], **kwargs: object) -> Node:
    spec = TensorSpec(shape, "float64", True)
    return Node(name, "op", f"aten.{path}", args, kwargs, (spec,), source="model.py:7")


def layouts_of(texts: Mapping[str, str]) -> dict[str, NodeLayout]:
    """``{"up": "R, S(0), S(0) -> S(1)"}`` as node layouts."""
    found = {}
    for name, text in texts.items():
        inputs, _, outputs = text.rpartition("->")
        sides = [
            tuple(parse_layout(part) for part in side.split(",") if part.strip())
            for side in (inputs, outputs)
        ]
        found[name] = NodeLayout(*sides)
    return found


def build(
    graph: Graph, layouts: Mapping[str, NodeLayout], mesh: Mesh, communicator: ThreadCommunicator
) -> fx.GraphModule:
    """The whole graph as one block of one rank; its loss leaves as I."""
    ops = tuple(node.name for node in graph if node.kind == "op")
    whole: Layout = (INVARIANT,) * len(mesh.shape)
    interface = BlockInterface(
        nodes=ops,
        inputs={node.name: layouts[node.name].outputs[0] for node in graph.inputs},
        parameters={node.name: layouts[node.name].outputs[0] for node in graph.parameters},
        outputs={graph.loss.name: whole},
    )
    rank = Rank(mesh, communicator.coordinates, communicator)
    return localize_block(graph, interface, layouts=layouts, rank=rank)


def check(
    graph: Graph, texts: Mapping[str, str], mesh: Mesh, values: Mapping[str, Tensor]
) -> list[list[tuple[object, ...]]]:
    """The split loss and gradients equal one device's; returns each rank's collectives."""
    layouts = layouts_of(texts)
    whole = {n: v.clone().requires_grad_(graph[n].spec.requires_grad) for n, v in values.items()}
    expected = run(graph, whole)
    expected.backward()
    parts = {n: distribute(v, layouts[n].outputs[0], mesh) for n, v in values.items()}

    def work(communicator: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        rank = mesh.index(communicator.coordinates)
        module = build(graph, layouts, mesh, communicator)
        for node in graph.parameters:
            owner_path, _, leaf = node.name.rpartition(".")
            owner = module.get_submodule(owner_path)
            assert getattr(owner, leaf).shape == parts[node.name][rank].shape
            setattr(owner, leaf, torch.nn.Parameter(parts[node.name][rank]))
        (loss,) = module(*(parts[node.name][rank] for node in graph.inputs))
        loss.backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    communicators = make_communicators(mesh)
    ranks = run_ranks(mesh, work, communicators)
    for loss, _ in ranks:
        assert_close(loss, expected.detach(), "loss")
    for node in graph.parameters:
        held = gradient_layout(layouts[node.name].outputs[0])
        found = collect([grads[node.name] for _, grads in ranks], held, mesh, of=node.name)
        own = whole[node.name].grad
        assert own is not None
        assert_close(found, own, f"gradient of {node.name}")
    return [communicator.calls for communicator in communicators]


def random_values(graph: Graph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        node.name: torch.randn(node.spec.shape, dtype=torch.float64)
        for node in (*graph.parameters, *graph.inputs)
    }


def mlp() -> Graph:
    nodes = (
        given("x", 4, 6),
        given("y", 4, 6),
        parameter("norm", 6),
        parameter("mlp.up.weight", 8, 6),
        parameter("mlp.up.bias", 8),
        parameter("mlp.down.weight", 6, 8),
        parameter("mlp.down.bias", 6),
        op("scaled", "mul.Tensor", Ref("x"), Ref("norm"), shape=(4, 6)),
        op(
            "up",
            "linear.default",
            Ref("scaled"),
            Ref("mlp.up.weight"),
            Ref("mlp.up.bias"),
            shape=(4, 8),
        ),
        op("act", "gelu.default", Ref("up"), shape=(4, 8)),
        op(
            "down",
            "linear.default",
            Ref("act"),
            Ref("mlp.down.weight"),
            Ref("mlp.down.bias"),
            shape=(4, 6),
        ),
        op("residual", "add.Tensor", Ref("down"), Ref("scaled"), shape=(4, 6)),
        op("loss", "mse_loss.default", Ref("residual"), Ref("y"), shape=()),
    )
    return Graph(nodes, Ref("loss"), 4)


MEGATRON = {
    "x": "-> I",
    "y": "-> I",
    "norm": "-> R",
    "mlp.up.weight": "-> S(0)",
    "mlp.up.bias": "-> S(0)",
    "mlp.down.weight": "-> S(1)",
    "mlp.down.bias": "-> R",
    "scaled": "I, I -> I",
    "up": "R, S(0), S(0) -> S(1)",
    "act": "S(1) -> S(1)",
    "down": "S(1), S(1), P -> P",
    "residual": "I, I -> I",
    "loss": "I, I -> I",
}


def test_megatron_mlp_equals_one_device_with_one_all_reduce_each_way() -> None:
    """The bias of the contraction-split product enters as P: its value is divided by n."""
    for calls in check(mlp(), MEGATRON, TP, random_values(mlp())):
        assert calls == [("all_reduce", 0, "sum")] * 2


def test_sequence_parallel_mlp_gathers_and_scatters_instead() -> None:
    """Between the products rows are split: all-gather before, reduce-scatter after."""
    split = MEGATRON | {
        "x": "-> S(0)",
        "y": "-> S(0)",
        "scaled": "S(0), R -> S(0)",
        "residual": "S(0), S(0) -> S(0)",
        "loss": "S(0), S(0) -> P",
    }
    for calls in check(mlp(), split, TP, random_values(mlp())):
        forward = [("all_gather", 0, 0), ("reduce_scatter", 0, 0), ("all_reduce", 0, "sum")]
        assert calls == [*forward, ("all_gather", 0, 0), ("reduce_scatter", 0, 0)]


def test_data_and_tensor_parallel_mlp_equals_one_device() -> None:
    both = {name: _beside(text, name) for name, text in MEGATRON.items()}
    check(mlp(), both, DP_TP, random_values(mlp()))


def _beside(text: str, name: str) -> str:
    """A layout on tp with data parallelism on an outer axis."""

    def outer(part: str, *, leaf: bool) -> str:
        return f"R {part}" if leaf else f"S(0) {part}"

    inputs, _, output = text.partition("->")
    parameters = {"scaled": (1,), "up": (1, 2), "down": (1, 2)}.get(name, ())
    sides = [part.strip() for part in inputs.split(",") if part.strip()]
    sides = [outer(part, leaf=index in parameters) for index, part in enumerate(sides)]
    if name == "down":
        sides[2] = "R P"
    result = outer(output.strip(), leaf=name.startswith("mlp") or name == "norm")
    return ", ".join(sides) + " -> " + ("P I" if name == "loss" else result)


def attention() -> Graph:
    """Query, key and value products, heads, causal attention, output product."""
    heads = op("heads", "transpose.int", Ref("split"), 1, 2, shape=(2, 4, 6, 2))
    nodes = [
        given("x", 2, 6, 8),
        given("y", 2, 6, 8),
        parameter("norm", 8),
        op("h", "mul.Tensor", Ref("x"), Ref("norm"), shape=(2, 6, 8)),
    ]
    for which in "qkv":
        nodes += [
            parameter(f"{which}.weight", 8, 8),
            parameter(f"{which}.bias", 8),
            op(
                which,
                "linear.default",
                Ref("h"),
                Ref(f"{which}.weight"),
                Ref(f"{which}.bias"),
                shape=(2, 6, 8),
            ),
            op(f"{which}_split", "view.default", Ref(which), [2, 6, 4, 2], shape=(2, 6, 4, 2)),
            replace(heads, name=f"{which}_heads", args=(Ref(f"{which}_split"), 1, 2)),
        ]
    nodes += [
        op(
            "attention",
            "scaled_dot_product_attention.default",
            Ref("q_heads"),
            Ref("k_heads"),
            Ref("v_heads"),
            None,
            0.0,
            True,
            shape=(2, 4, 6, 2),
        ),
        op("joined", "transpose.int", Ref("attention"), 1, 2, shape=(2, 6, 4, 2)),
        op("merged", "view.default", Ref("joined"), [2, 6, 8], shape=(2, 6, 8)),
        parameter("out.weight", 8, 8),
        parameter("out.bias", 8),
        op(
            "out",
            "linear.default",
            Ref("merged"),
            Ref("out.weight"),
            Ref("out.bias"),
            shape=(2, 6, 8),
        ),
        op("loss", "mse_loss.default", Ref("out"), Ref("y"), shape=()),
    ]
    return Graph(tuple(nodes), Ref("loss"), 2)


HEADS_SPLIT = {
    "x": "-> I",
    "y": "-> I",
    "norm": "-> R",
    "h": "I, I -> I",
    **{f"{w}.weight": "-> S(0)" for w in "qkv"},
    **{f"{w}.bias": "-> S(0)" for w in "qkv"},
    **dict.fromkeys("qkv", "R, S(0), S(0) -> S(2)"),
    **{f"{w}_split": "S(2) -> S(2)" for w in "qkv"},
    **{f"{w}_heads": "S(2) -> S(1)" for w in "qkv"},
    "attention": "S(1), S(1), S(1) -> S(1)",
    "joined": "S(1) -> S(2)",
    "merged": "S(2) -> S(2)",
    "out.weight": "-> S(1)",
    "out.bias": "-> R",
    "out": "S(2), S(1), P -> P",
    "loss": "I, I -> I",
}


def test_attention_split_by_heads_converts_its_input_once_for_three_products() -> None:
    for calls in check(attention(), HEADS_SPLIT, TP, random_values(attention())):
        assert calls == [("all_reduce", 0, "sum")] * 2


def test_attention_split_by_query_positions_keeps_the_causal_mask() -> None:
    """Each rank's queries see keys up to their own position in the whole sequence."""
    held = {f"{n}.{p}": "-> R" for n in ("q", "k", "v", "out") for p in ("weight", "bias")}
    whole = held | dict.fromkeys("qkv", "R, R, R -> R")
    split = (
        HEADS_SPLIT
        | whole
        | {
            **{f"{w}_split": "R -> R" for w in "qkv"},
            **{f"{w}_heads": "R -> R" for w in "qkv"},
            "attention": "S(2), R, R -> S(2)",
            "joined": "S(2) -> S(1)",
            "merged": "S(1) -> S(1)",
            "out": "S(1), R, R -> S(1)",
            "loss": "S(1), S(1) -> P",
        }
    )
    check(attention(), split, TP, random_values(attention()))


def language_model() -> Graph:
    labels = TensorSpec((12,), "int64")
    nodes = (
        given("tokens", 12, dtype="int64"),
        Node("labels", "input", outputs=(labels,)),
        parameter("embedding", 8, 6),
        parameter("head", 8, 6),
        op("h", "embedding.default", Ref("embedding"), Ref("tokens"), 5, shape=(12, 6)),
        op("logits", "linear.default", Ref("h"), Ref("head"), shape=(12, 8)),
        op(
            "loss",
            "cross_entropy_loss.default",
            Ref("logits"),
            Ref("labels"),
            None,
            1,
            -1,
            0.1,
            shape=(),
        ),
    )
    return Graph(nodes, Ref("loss"), 12)


def token_values() -> dict[str, Tensor]:
    values = random_values(language_model())
    values["tokens"] = torch.randint(0, 8, (12,))
    labels = torch.randint(0, 8, (12,))
    labels[:5] = -1
    return values | {"labels": labels}


def test_vocabulary_split_embedding_and_loss_with_ignored_labels_equal_one_device() -> None:
    """The loss exchanges one number per row and reduction, never the logits."""
    split = {
        "tokens": "-> I",
        "labels": "-> I",
        "embedding": "-> S(0)",
        "head": "-> S(0)",
        "h": "S(0), I -> P",
        "logits": "R, S(0) -> S(1)",
        "loss": "S(1), I -> I",
    }
    for calls in check(language_model(), split, TP, token_values()):
        kinds = [call[0] for call in calls]
        assert calls.count(("all_reduce", 0, "max")) == 1
        assert kinds == ["all_reduce"] * len(kinds)


def test_rows_and_vocabulary_split_at_once_count_all_ranks_labels() -> None:
    """The ignored labels are all on the first rank of dp."""
    split = {
        "tokens": "-> S(0) I",
        "labels": "-> S(0) I",
        "embedding": "-> R S(0)",
        "head": "-> R S(0)",
        "h": "R S(0), S(0) I -> S(0) P",
        "logits": "S(0) R, R S(0) -> S(0) S(1)",
        "loss": "S(0) S(1), S(0) I -> P I",
    }
    check(language_model(), split, DP_TP, token_values())


def test_generated_code_reads_as_the_model_with_its_conversions() -> None:
    code = build(mlp(), layouts_of(MEGATRON), TP, make_communicators(TP)[0]).code
    assert "'tp: I -> R'" in code
    assert "'tp: P -> I'" in code
    for name in ("scaled", "up", "act", "down", "residual", "loss"):
        assert f"    {name} = " in code
    assert code.count("apply_steps(scaled") == 1


def test_size_arguments_follow_a_rescaled_batch() -> None:
    graph = attention()
    dims = {
        node.name: (None if node.kind == "parameter" or not node.spec.shape else 0,)
        for node in graph
    }
    check(
        rescaled := replace(graph, batch_dims=dims).with_batch_size(4),
        HEADS_SPLIT,
        TP,
        random_values(rescaled),
    )


def test_a_split_that_does_not_divide_is_a_plan_error_that_names_the_node() -> None:
    layouts = layouts_of(MEGATRON)
    three = Mesh(("tp",), (3,))
    with pytest.raises(PlanError, match="as up requires") as caught:
        build(mlp(), layouts, three, make_communicators(three)[0])
    assert caught.value.where == "model.py:7"


def test_a_layout_of_another_op_is_a_plan_error() -> None:
    layouts = layouts_of(MEGATRON | {"up": "R -> S(1)"})
    with pytest.raises(PlanError, match="belongs to another op"):
        build(mlp(), layouts, TP, make_communicators(TP)[0])


def test_the_reference_layouts_need_no_collective() -> None:
    graph = mlp()
    layouts = reference_layouts(graph, 1)
    calls = make_communicators(TP)[0]
    module = build(graph, layouts, TP, calls)
    assert "apply_steps" not in module.code


@pytest.mark.parametrize("ref", [Ref("split"), Ref("split", 2), Ref("layers.0:weird", 1)])
def test_a_value_key_reads_back(ref: Ref) -> None:
    assert parse_key(value_key(ref)) == ref
