"""A graph of one attention, its strategies on a mesh axis, and prices on toy clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from small_graphs import cluster

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import AxisStrategy, Mesh, NodeLayout, combine
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.plan import Plan

HEADS, SEQ, SIZE = 4, 16, 8
CAUSAL = (None, 0.0, True)


def attention(
    *rest: Any, seq: int = SEQ, keys: int | None = None, key_heads: int = HEADS, window: int = 0
) -> Graph:
    """Queries of ``seq`` positions, and keys of as many or ``keys``; ``rest`` of the arguments."""
    query = TensorSpec((1, HEADS, seq, SIZE), "float32", requires_grad=True)
    key = replace(query, shape=(1, key_heads, keys or seq, SIZE))
    mask = TensorSpec((seq, keys or seq), "bool")
    specs = {"q": query, "k": key, "v": key, "mask": mask}
    nodes = [Node(name, "op", "aten.clone.default", (), outputs=(s,)) for name, s in specs.items()]
    args = (Ref("q"), Ref("k"), Ref("v"), *rest)
    path, named = "aten.scaled_dot_product_attention.default", {"window": window} if window else {}
    nodes.append(Node("op", "op", path, args, named, (query,)))
    return Graph(tuple(nodes), Ref("op"), 1)


def strategy(graph: Graph, size: int, label: str) -> AxisStrategy:
    (found,) = [each for each in axis_strategies(graph["op"], graph, size) if each.label == label]
    return found


def labels(graph: Graph, size: int) -> list[str]:
    return [each.label for each in axis_strategies(graph["op"], graph, size)]


def layout_of(*strategies: AxisStrategy) -> NodeLayout:
    return combine(strategies)


def prices_on(sizes: tuple[int, ...], own: Cluster | None = None) -> Prices:
    mesh = Mesh(("cp", "tp")[: len(sizes)], sizes)
    number = mesh.size
    return Prices(mesh, own or cluster(number), tuple(range(number)), "fp32", "adamw", rules)


def attention_labels(found: Plan) -> set[str]:
    layouts = found.stages[0].layouts
    return {each.labels[0] for name, each in layouts.items() if name.startswith("scaled_dot")}
