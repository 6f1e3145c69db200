"""Fused kernels: what is left for each op to move, to launch and to keep, derived by hand."""

from __future__ import annotations

import pytest

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.compute import work_seconds
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.choices import input_specs
from autoparallel.planner.costs.kept_bytes import working_bytes
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Mesh, NodeLayout
from autoparallel.planner.kernels.fusion import with_fusion
from autoparallel.planner.ops.work import Work

ROWS, WIDTH = 64, 32
X = TensorSpec((ROWS, WIDTH), "float32", requires_grad=True)
W = TensorSpec((WIDTH, WIDTH), "float32", requires_grad=True)
SIZE = X.num_bytes
WHOLE = (INVARIANT,)


def leaf(name: str, spec: TensorSpec) -> Node:
    return Node(name, "parameter" if spec is W else "input", outputs=(spec,))


def op(name: str, target: str, *args: object, spec: TensorSpec = X) -> Node:
    return Node(name, "op", f"aten.{target}", args, outputs=(spec,))


def graph_of(*nodes: Node) -> tuple[Graph, Blocks]:
    """A graph of one block whose loss is its last node."""
    names = tuple(node.name for node in nodes if node.kind == "op")
    parameters = tuple(node.name for node in nodes if node.kind == "parameter")
    blocks = Blocks((Block("block", "block", names, parameters),))
    return Graph(nodes, Ref(nodes[-1].name), ROWS), blocks


def work_of(graph: Graph, name: str) -> Work:
    node = graph[name]
    found: Work = rules.work(node, input_specs(node, graph), node.outputs)
    return found


def total(graph: Graph, blocks: Blocks) -> tuple[int, int, int, int]:
    """Bytes forward and backward, kernels forward and backward, of the first block."""
    every = [work_of(graph, name) for name in blocks.blocks[0].nodes]
    return (
        sum(work.bytes_forward for work in every),
        sum(work.bytes_backward for work in every),
        sum(work.kernels_forward for work in every),
        sum(work.kernels_backward for work in every),
    )


def gate() -> tuple[Graph, Blocks]:
    """silu(x) * y, of two inputs that want gradients."""
    silu = op("silu", "silu.default", Ref("x"))
    product = op("product", "mul.Tensor", Ref("silu"), Ref("y"))
    return graph_of(leaf("x", X), leaf("y", X), silu, product)


def test_a_gate_reads_both_factors_once_and_writes_the_product() -> None:
    """Eager: 2 sizes for silu, 3 for the product. Compiled: x and y read, the product written."""
    graph, blocks = gate()
    assert total(graph, blocks)[0] == 5 * SIZE
    assert total(with_fusion(graph, blocks), blocks)[0] == 3 * SIZE


def test_the_backward_of_a_gate_is_one_kernel_that_computes_silu_again() -> None:
    """It reads x, y and the product's gradient and writes two gradients: 5 sizes."""
    graph, blocks = gate()
    _, backward, kernels, kernels_backward = total(with_fusion(graph, blocks), blocks)
    assert (backward, kernels, kernels_backward) == (5 * SIZE, 1, 1)


def test_a_gate_keeps_its_factors_and_not_what_it_computes_between() -> None:
    graph, blocks = gate()
    compiled = with_fusion(graph, blocks)

    def kept(graph: Graph) -> set[str]:
        return {ref.name for name in ("silu", "product") for ref in rules.saved(graph[name], graph)}

    assert kept(graph) == {"x", "y", "silu"}
    assert kept(compiled) == {"x", "y"}


def test_a_value_between_fused_ops_takes_no_memory_while_they_run() -> None:
    """Eager, the product reads the result of silu from memory; compiled, it is in registers."""
    graph, blocks = gate()
    prices = Prices(Mesh(("dp",), (1,)), parse_cluster("1xH100"), (0,), "fp32", "adamw", rules)

    def working(graph: Graph) -> list[int]:
        found = []
        for node in (graph[name] for name in ("silu", "product")):
            layout = NodeLayout((WHOLE,) * len(node.inputs), (WHOLE,))
            found.append(working_bytes(node, layout, graph, prices))
        return found

    assert working(graph) == [2 * SIZE, 3 * SIZE]
    assert working(with_fusion(graph, blocks)) == [SIZE, 2 * SIZE]


def around_a_product() -> tuple[Graph, Blocks]:
    """relu(x), a product, and exp(tanh(·)) of it plus relu(x)."""
    return graph_of(
        leaf("x", X),
        leaf("w", W),
        op("relu", "relu.default", Ref("x")),
        op("linear", "linear.default", Ref("relu"), Ref("w")),
        op("tanh", "tanh.default", Ref("linear")),
        op("sum", "add.Tensor", Ref("tanh"), Ref("relu")),
    )


def test_no_kernel_reaches_over_a_product() -> None:
    """relu alone reads and writes; the two after the product read it and relu and write."""
    graph, blocks = around_a_product()
    compiled = with_fusion(graph, blocks)
    assert compiled["linear"].fused is None
    assert work_of(compiled, "linear") == work_of(graph, "linear")
    own = {name: work_of(compiled, name) for name in ("relu", "tanh", "sum")}
    assert own["relu"].bytes_forward == 2 * SIZE
    assert own["tanh"].bytes_forward + own["sum"].bytes_forward == 3 * SIZE
    assert [work.kernels_forward for work in own.values()] == [1, 0, 1]


def test_what_a_product_keeps_anyway_is_not_computed_again() -> None:
    """relu's backward reads its result, which the product has kept for its weight's gradient."""
    graph, blocks = around_a_product()
    compiled = with_fusion(graph, blocks)
    assert rules.saved(compiled["relu"], compiled) == (Ref("relu"),)


def test_blocks_are_compiled_apart() -> None:
    graph, _ = gate()
    apart = Blocks((Block("a", "a", ("silu",), ()), Block("b", "b", ("product",), ())))
    compiled = with_fusion(graph, apart)
    assert sum(work_of(compiled, name).bytes_forward for name in ("silu", "product")) == 5 * SIZE


def test_fused_ops_launch_one_kernel_on_the_device() -> None:
    """The two ops' seconds without bytes are one launch, where eager ones are two."""
    graph, blocks = gate()
    compiled = with_fusion(graph, blocks)
    device = parse_cluster("1xH100").hosts[0].device

    def launches(graph: Graph) -> float:
        every = (work_seconds(device, work_of(graph, n), "float32") for n in ("silu", "product"))
        return sum(forward for forward, _ in every) / device.launch_seconds

    assert launches(compiled) == pytest.approx(1, abs=0.2)
    assert launches(graph) == pytest.approx(2, abs=0.2)


def test_fusion_survives_another_batch() -> None:
    graph, blocks = gate()
    dims = dict.fromkeys(("x", "y", "silu", "product"), (0,))
    scaled = Graph(graph.nodes, graph.loss, ROWS, dims)
    compiled = with_fusion(scaled, blocks)
    assert total(compiled.with_batch_size(2 * ROWS), blocks)[0] == 2 * 3 * SIZE
