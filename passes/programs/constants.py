"""Values of constants, computed in each process that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd

import torch
from torch import Tensor

from ...planner.graph.graph import Graph
from .interpret import run_nodes
from .program import Program


def evaluate(
    program: Program,
    names: Iterable[str],
    device: str = "cpu",
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compute the constants ``names`` of a program at its batch size; return their values by name.
    ``buffers`` has the values of the buffers that they read, in the model's dtypes (cast to float64
    for a float64 program)."""
    given = {name: value.to(device) for name, value in program.literals.items()}
    given.update({name: value.to(device) for name, value in (buffers or {}).items()})
    return evaluate_constants(program.graph, names, device=device, buffers=given)


def evaluate_constants(
    graph: Graph, names: Iterable[str], *, device: str, buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compute the constants ``names`` of a graph on ``device``; return their values by name.
    ``buffers`` has every buffer that they read, on that device."""
    wanted = tuple(names)
    order = ancestors(graph, wanted)
    nodes = [node for node in graph.nodes if node.name in order and node.kind == "constant"]
    with torch.no_grad():
        outputs = run_nodes(graph, nodes, buffers, keep=wanted, device=device)
    return {name: _at_batch(outputs[name][0], graph[name].spec.shape) for name in wanted}


def ancestors(graph: Graph, names: Iterable[str]) -> set[str]:
    """Return ``names`` and the names of all nodes that they depend on."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(ref.name for ref in graph[name].inputs)
    return found


def descendants(graph: Graph, name: str) -> set[str]:
    """Return the names of all nodes that depend on the node ``name``."""
    found: set[str] = set()
    pending = [name]
    while pending:
        users = set(graph.users[pending.pop()]) - found
        found |= users
        pending.extend(users)
    return found


def _at_batch(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a constant's ``value``, captured at one batch size, in ``shape``, which it has at
    another: a dimension that grows with the batch repeats equal parts, of which there are now more
    or fewer."""
    for dim, size in enumerate(shape):
        if value.shape[dim] != size:
            part = value.narrow(dim, 0, gcd(value.shape[dim], size))
            whole = _tiled(part, dim, value.shape[dim])
            assert torch.equal(value, whole), "a constant differs between rows of the batch"
            value = _tiled(part, dim, size)
    return value


def _tiled(part: Tensor, dim: int, size: int) -> Tensor:
    times = size // part.shape[dim]
    return part.repeat(*(times if d == dim else 1 for d in range(part.dim())))
