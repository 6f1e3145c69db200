"""Graphs made by hand, small enough to try every layout, and clusters to plan them for."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.planner.dims.batch import find_batch
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref, TensorSpec


def cluster(
    num_devices: int = 2,
    *,
    memory_bytes: int = 10**12,
    bytes_per_second: float = 1e9,
    flops: float = 1e12,
    num_hosts: int = 1,
) -> Cluster:
    """Equal devices; the network between hosts is ten times slower than within."""
    device = Device(
        "toy",
        "cpu",
        memory_bytes,
        memory_bytes,
        1e11,
        {"float32": flops, "float64": flops},
        launch_seconds=0.0,
    )
    link = Link("wire", 1e-6, bytes_per_second)
    hosts = (Host(device, num_devices, link),) * num_hosts
    return Cluster("toys", hosts, Link("slow wire", 1e-5, bytes_per_second / 10))


def spec(*shape: int, grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, "float32", grad)


def op(name: str, path: str, args: tuple[Any, ...], *shape: int, module: str = "") -> Node:
    return Node(name, "op", f"aten.{path}", args, outputs=(spec(*shape),), module=module)


def leaf(name: str, *shape: int) -> Node:
    return Node(name, "input", outputs=(spec(*shape, grad=False),))


def weight(name: str, *shape: int) -> Node:
    return Node(name, "parameter", outputs=(spec(*shape),))


def with_batch(graph: Graph) -> Graph:
    dims, _ = find_batch(graph) or (None, None)
    assert dims is not None
    return replace(graph, batch_dims=dims)


def mlp(
    num_layers: int = 2, *, rows: int = 4, width: int = 16, inner: int = 64
) -> tuple[Graph, Blocks]:
    """Layers x + down(gelu(up(x))), and the mean as loss: blocks "in", layers, "out".

    The first block makes x from the input with a square weight.
    """
    nodes = [leaf("x", rows, width), weight("stem.weight", width, width)]
    nodes.append(op("stem", "linear.default", (Ref("x"), Ref("stem.weight")), rows, width))
    blocks = [Block("in", "in", ("stem",), ("stem.weight",))]
    last = "stem"
    for i in range(num_layers):
        up, down = f"layers.{i}.up", f"layers.{i}.down"
        nodes += [weight(f"{up}.weight", inner, width), weight(f"{down}.weight", width, inner)]
        nodes += [
            op(up, "linear.default", (Ref(last), Ref(f"{up}.weight")), rows, inner),
            op(f"gelu.{i}", "gelu.default", (Ref(up),), rows, inner),
            op(down, "linear.default", (Ref(f"gelu.{i}"), Ref(f"{down}.weight")), rows, width),
            op(f"add.{i}", "add.Tensor", (Ref(last), Ref(down)), rows, width),
        ]
        blocks.append(
            Block(
                f"layers.{i}",
                "layer",
                (up, f"gelu.{i}", down, f"add.{i}"),
                (f"{up}.weight", f"{down}.weight"),
            )
        )
        last = f"add.{i}"
    nodes.append(op("loss", "mean.default", (Ref(last),)))
    blocks.append(Block("out", "out", ("loss",), ()))
    return with_batch(Graph(tuple(nodes), Ref("loss"), rows)), Blocks(tuple(blocks))


def random_graph(seed: int, num_ops: int = 3, *, num_blocks: int = 1) -> tuple[Graph, Blocks]:
    """A random graph on matrices of 8 by 8, cut into blocks of different kinds."""
    rng = random.Random(seed)
    nodes = [leaf("x", 8, 8), weight("w0", 8, 8)]
    nodes.append(op("op0", "linear.default", (Ref("x"), Ref("w0")), 8, 8))
    values = ["op0"]
    for i in range(1, num_ops):
        source = rng.choice(values)
        match rng.choice(("linear", "relu", "add", "mul", "t", "softmax")):
            case "linear":
                nodes.append(weight(f"w{i}", 8, 8))
                args: tuple[Any, ...] = (Ref(source), Ref(f"w{i}"))
                nodes.append(op(f"op{i}", "linear.default", args, 8, 8))
            case "add" | "mul" as name:
                args = (Ref(source), Ref(rng.choice(values)))
                nodes.append(op(f"op{i}", f"{name}.Tensor", args, 8, 8))
            case "softmax":
                nodes.append(op(f"op{i}", "softmax.int", (Ref(source), 1), 8, 8))
            case name:
                path = "t.default" if name == "t" else "relu.default"
                nodes.append(op(f"op{i}", path, (Ref(source),), 8, 8))
        values.append(f"op{i}")
    nodes.append(op("loss", "mean.default", (Ref(values[-1]),)))
    graph = Graph(tuple(nodes), Ref("loss"), 8)
    return graph, _cut(graph, num_blocks)


def _cut(graph: Graph, num_blocks: int) -> Blocks:
    names = [node.name for node in graph if node.kind == "op"]
    bounds = [len(names) * i // num_blocks for i in range(num_blocks + 1)]
    owned: set[str] = set()
    blocks = []
    for i in range(num_blocks):
        own = names[bounds[i] : bounds[i + 1]]
        read = {ref.name for name in own for ref in graph[name].inputs}
        parameters = tuple(
            node.name for node in graph.parameters if node.name in read and node.name not in owned
        )
        owned |= set(parameters)
        blocks.append(Block(f"block{i}", f"kind{i}", tuple(own), parameters))
    return Blocks(tuple(blocks))
