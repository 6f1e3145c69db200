"""Execution of a graph node by node on real tensors of one device: the reference for every plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref, map_refs
from ..ops.torch_ops import resolve

_SIZED = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.expand.default",
    }
)


def run(graph: Graph, values: Mapping[str, Tensor], *, device: str = "cpu") -> Tensor:
    """Execute ``graph`` and return its loss, differentiable by autograd. ``values`` holds inputs,
    parameters and buffers by name, and any constants that are known; other constants are
    computed."""
    loss = graph.loss
    outputs = run_nodes(graph, graph.nodes, values, keep=(loss.name,), device=device)
    return outputs[loss.name][loss.index]


def run_nodes(
    graph: Graph,
    nodes: Iterable[Node],
    values: Mapping[str, Tensor],
    *,
    keep: Iterable[str],
    device: str = "cpu",
) -> dict[str, tuple[Tensor, ...]]:
    """Execute ``nodes`` (in topological order); return the outputs of the nodes named in ``keep``.
    ``values`` has the known values by name. Other values are freed after their last use."""
    order = list(nodes)
    last_use = {ref.name: position for position, node in enumerate(order) for ref in node.inputs}
    kept = set(keep)
    held: dict[str, tuple[Tensor, ...]] = {name: (value,) for name, value in values.items()}
    for position, node in enumerate(order):
        if node.name not in held:
            sized = replace(node, args=_sized(node)) if node.kind == "op" else node
            held[node.name] = run_node(sized, held, device=device)
        for name in {node.name, *(ref.name for ref in node.inputs)} - kept:
            if last_use.get(name, -1) <= position:
                held.pop(name, None)
    return {name: held[name] for name in kept}


def run_node(
    node: Node, held: Mapping[str, tuple[Tensor, ...]], *, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Execute one node; return its outputs. ``held`` has the outputs of earlier nodes by name.
    ``device`` replaces devices among the node's literal arguments."""
    if node.op == LITERAL:
        return (torch.tensor(node.args[0], device=device, **node.kwargs),)

    def value_of(ref: Ref) -> Tensor:
        return held[ref.name][ref.index]

    args, kwargs = map_refs((node.args, dict(node.kwargs)), value_of)
    kwargs = {key: _on(device, value) for key, value in kwargs.items()}
    result: Any = resolve(node.op)(*(_on(device, arg) for arg in args), **kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


LITERAL = "autoparallel.literal.default"
"""Op name of a constant whose value is written in its first argument as nested lists."""


def _on(device: str, value: Any) -> Any:
    return torch.device(device) if isinstance(value, torch.device) else value


def _sized(node: Node) -> tuple[Any, ...]:
    """Return a node's arguments with arguments for sizes replaced by the shape of its output, so
    that they fit the graph's batch size."""
    if node.op not in _SIZED:
        return node.args
    return (node.args[0], list(node.outputs[0].shape), *node.args[2:])
