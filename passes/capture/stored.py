"""Weights that the model says to hold quantized, marked in the captured graph.

In: the graph, and a model whose layers name the format of their ``weight`` (``STORED``). Out: the
graph, whose parameters carry the format. A quantized weight is frozen, and a linear layer's alone.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...cost_model.ops.memory import NF4_GROUP
from ...planner.errors import UsageError
from ...planner.graph.graph import Graph, Ref

STORED = "stored_weight"
"""Attribute of a layer with the format in which its weight is held: "nf4"."""


def with_stored(graph: Graph, model: nn.Module) -> Graph:
    """Return the graph with the format of each quantized weight. Raises UsageError AP868 if a
    weight cannot be held in it."""
    formats = {
        f"{path}.weight": form
        for path, module in model.named_modules()
        if (form := getattr(module, STORED, ""))
    }
    if not formats:
        return graph
    for name in formats.keys() & graph.by_name.keys():
        _check(graph, name, formats[name])
    nodes = (
        node.with_outputs((replace(node.spec, stored=formats[node.name]),))
        if node.name in formats
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _check(graph: Graph, name: str, form: str) -> None:
    spec, why, fix = graph[name].spec, "", ""
    readers = [graph[user] for user in graph.users[name]]
    others = [
        each
        for each in readers
        if each.op != "aten.linear.default" or [*each.args].index(Ref(name)) != 1
    ]
    if spec.requires_grad:
        why, fix = "it is trained", "freeze it, and train adapters beside it"
    elif spec.numel % NF4_GROUP:
        why = f"its {spec.numel} elements are no multiple of {NF4_GROUP}, a group of {form}"
        fix = "leave base=nf4 out of --lora"
    elif others:
        why = f"{others[0].op} reads it at {others[0].source or others[0].module}"
        fix = "leave base=nf4 out of --lora: only weights that linear layers read can be quantized"
    if why:
        raise UsageError("AP868", f"{name} cannot be held in {form}", why=why, fix=fix)
