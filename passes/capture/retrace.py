"""Repeated trace or capture of a model's forward and loss under the current Python values.

In: a model, its batch, its loss. Out: a ``CallTrace`` in the time of a forward on fake tensors, and
for changed numbers a ``Program`` with stand-ins as numbers: each occurs at one place of the trace,
so that the nodes which compute with it are known. A second capture with other stand-ins shows
whether anything else depends on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...planner.graph.graph import Graph, Node
from ..programs.batch import Example
from ..programs.interpret import LITERAL
from ..programs.program import Dtype, Program
from ..tracing.call_trace import CallTrace, Place, tracing_calls
from .export import LossFn, trace_loss

Capture = Callable[[], Program]


@dataclass(frozen=True)
class LiveProgram:
    """Captured program in which Python numbers of the model's code may change during training. In
    it, a unique number (stand-in) replaces each: ``stand_ins`` by place in the trace. ``tensors``
    maps the position of a changing tensor in the trace to the nodes that hold it. ``trace`` lists
    the model's calls of torch at the capture."""

    program: Program
    trace: CallTrace
    stand_ins: Mapping[Place, float]
    tensors: Mapping[int, tuple[str, ...]]


def trace_calls(
    model: nn.Module,
    example: Example,
    loss_fn: LossFn | None,
    dtype: Dtype,
    before: Callable[[], None],
    watched: int | None = None,
) -> CallTrace:
    """Compute ``loss_fn(model(batch))`` for the example batch on fake tensors; return the trace of
    its calls of torch functions. ``before`` is called before the forward. Of call number
    ``watched`` the user's source line is recorded."""
    with tracing_calls(before=before, watched=watched) as trace:
        trace.outputs = trace_loss(model, example, loss_fn=loss_fn, dtype=dtype)
    return trace


def capture_live(
    capture: Capture,
    trace: CallTrace,
    places: Iterable[Place],
    tensors: Iterable[int],
    before: Callable[[], None],
) -> LiveProgram | None:
    """Capture a program with unique numbers (stand-ins) for the Python numbers at ``places`` of the
    trace, and random values in the ``tensors``. Returns None if a number affects more than the
    arguments of ops, as when torch computes another number from it or branches on it."""
    found = []
    for seed in (1, 2):
        draw = random.Random(seed)
        numbers = {place: _stand_in(trace.numbers[place], draw) for place in places}
        arrays = {at: _shuffled(trace.tensors[at], draw) for at in tensors}
        with tracing_calls(numbers, arrays, before) as again:
            program = capture()
        if not again.is_like(trace):
            return None
        found.append((program, numbers, arrays))
    (first, numbers, arrays), (second, others, other_arrays) = found
    tokens = {value: place for place, value in numbers.items()}
    other_tokens = {value: place for place, value in others.items()}
    nodes = _nodes_of(first.graph, arrays), _nodes_of(second.graph, other_arrays)
    if nodes[0] is None or nodes[0] != nodes[1]:
        return None
    of_arrays = {name for names in nodes[0].values() for name in names}
    if _described(first, tokens, of_arrays) != _described(second, other_tokens, of_arrays):
        return None
    return LiveProgram(first, trace, numbers, nodes[0])


def _stand_in(value: float, draw: random.Random) -> float:
    """Return a number close to ``value``, with the same sign, that very probably occurs nowhere
    else; ``draw`` makes it random."""
    return value * (1 + draw.uniform(1e-7, 2e-7)) if value else draw.uniform(1e-9, 2e-9)


def _shuffled(array: np.ndarray[Any, Any], draw: random.Random) -> Any:
    """Return a random array of the dtype and shape of ``array``, with values in the same range."""
    numbers = np.random.RandomState(draw.randrange(2**31))
    if array.dtype == bool:
        return np.less(numbers.rand(*array.shape), 0.5)
    if array.size == 0:
        return array
    low, high = array.min(), array.max()
    if np.issubdtype(array.dtype, np.integer):
        return numbers.randint(low, int(high) + 1, array.shape).astype(array.dtype)
    return numbers.uniform(low, high + 1e-9, array.shape).astype(array.dtype)


def _nodes_of(
    graph: Graph, arrays: Mapping[int, np.ndarray[Any, Any]]
) -> dict[int, tuple[str, ...]] | None:
    """Map the key of each of ``arrays`` to the literal node that holds its values; None if there is
    not exactly one such node for each."""
    found: dict[int, tuple[str, ...]] = {}
    taken: set[str] = set()
    for at, array in arrays.items():
        names = tuple(node.name for node in graph if node.op == LITERAL and _is_value(node, array))
        if len(names) != 1 or taken & {*names}:
            return None
        taken.update(names)
        found[at] = names
    return found


def _is_value(node: Node, array: np.ndarray[Any, Any]) -> bool:
    value = torch.tensor(node.args[0], **node.kwargs)
    if value.shape != array.shape:
        return False
    return torch.equal(value, torch.tensor(array).to(value.dtype))


def _arguments(node: Node, of_number: Callable[[float], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an op with each float ``x`` replaced by ``of_number(x)``."""
    found: tuple[Any, dict[str, Any]] = tree_map_only(
        float, of_number, (node.args, dict(node.kwargs))
    )
    return found


def _described(
    program: Program, tokens: Mapping[float, Place], literals: set[str]
) -> list[tuple[Any, ...]]:
    """Return the ops of a program with their arguments, for a comparison of two captures. Stand-ins
    (unique numbers, ``tokens``) are replaced by their places in the trace; arguments of
    ``literals`` are left out."""
    return [
        (
            *(node.name, node.kind, node.op, node.outputs),
            None
            if node.name in literals
            else _arguments(node, lambda value: tokens.get(value, repr(value))),
        )
        for node in program.graph
    ]


def is_same_but_numbers(graph: Graph, other: Graph) -> bool:
    """Return whether two graphs differ at most in the floats among ops' arguments and in the values
    of literals, so that layouts planned for one are valid for the other."""

    def described(node: Node) -> tuple[Any, ...]:
        arguments = None if node.op == LITERAL else _arguments(node, type)
        return node.name, node.kind, node.op, node.outputs, arguments

    return (
        len(graph.nodes) == len(other.nodes)
        and graph.batch_dims == other.batch_dims
        and graph.accumulation == other.accumulation
        and graph.updates == other.updates
        and graph.loss == other.loss
        and all(described(a) == described(b) for a, b in zip(graph.nodes, other.nodes, strict=True))
    )


def with_values(live: LiveProgram, values: Mapping[float, float], trace: CallTrace) -> Program:
    """Return the program with present values: literals have the values in ``trace``, and floats in
    constants are replaced by ``values``, which maps old to new numbers."""
    arrays = {name: trace.tensors[at] for at, names in live.tensors.items() for name in names}
    graph, is_changed, nodes = live.program.graph, False, []
    for node in graph.nodes:
        if node.name in arrays:
            dtype = node.kwargs["dtype"]
            made = replace(node, args=(torch.tensor(arrays[node.name]).to(dtype).tolist(),))
        elif node.kind == "constant":
            args, kwargs = _arguments(node, lambda value: values.get(value, value))
            made = replace(node, args=args, kwargs=kwargs)
        else:
            made = node
        is_changed |= made is not node and made != node
        nodes.append(made)
    if not is_changed:
        return live.program
    return replace(live.program, graph=replace(graph, nodes=tuple(nodes)))
