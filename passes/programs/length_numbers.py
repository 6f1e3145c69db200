"""Numbers that a model computes from the length of its sequences, which padding changes.

In: the programs of a model at the planned length and at a shorter length. Out: the first op that
computes with another number, or takes another path. ``x * x.shape[1] ** -0.5`` is a product with a
number in both, but with different numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ...planner.graph.graph import Graph, Node
from ..ops.torch_ops import resolve
from .constants import ancestors, evaluate
from .program import Program


def find_length_number(program: Program, shorter: Program) -> Node | None:
    """Return the first node of ``program`` that depends on the sequence length in more than sizes
    of tensors; None if there is none. ``shorter``: the program captured at a shorter length."""
    nodes, others = program.graph.nodes, shorter.graph.nodes
    for node, twin in zip(nodes, others, strict=False):
        if (node.name, node.op) != (twin.name, twin.op):
            return node
        if node.kind == "op" and _numbers(node) != _numbers(twin):
            return node
    if len(nodes) != len(others):
        return nodes[-1]
    names = [node.name for node in nodes if node.kind == "constant" and _is_known(program, node)]
    values, shorter_values = evaluate(program, names), evaluate(shorter, names)
    return next(
        (program.graph[name] for name in names if not _begins(values[name], shorter_values[name])),
        None,
    )


def _numbers(node: Node) -> list[Any]:
    """Return the arguments of an op that are numbers to compute with, by its schema; sizes and
    positions, which are integers there, are left out."""
    if not node.op.startswith("aten."):
        return []
    arguments = resolve(node.op)._schema.arguments
    named = ((each, node.kwargs.get(each.name)) for each in arguments if each.kwarg_only)
    given = itertools.chain(zip(arguments, node.args, strict=False), named)
    return [
        value
        for argument, value in given
        if isinstance(value, int | float) and str(argument.type) in ("number", "float", "Tensor")
    ]


def _is_known(program: Program, node: Node) -> bool:
    """Return whether a constant depends on no buffer of the model (literals are allowed)."""
    graph: Graph = program.graph
    return all(
        graph[name].kind != "buffer" or name in program.literals
        for name in ancestors(graph, [node.name])
    )


def _begins(value: Tensor, shorter: Tensor) -> bool:
    """Return whether ``value`` and ``shorter`` are equal where they overlap, from the first index
    on."""
    if value.dim() != shorter.dim():
        return False
    sizes = [min(pair) for pair in zip(value.shape, shorter.shape, strict=True)]
    region = tuple(slice(0, size) for size in sizes)
    return torch.equal(value[region], shorter[region])
