"""Compilation of runs of plain tensor ops in a block's graph.

In: the graph of a block as one rank executes it, and a compiler: a function from a run to a
callable. Out: the same graph, in which each run is one call of its compiled function. A run is a
sequence of ``aten`` ops and of linear layers in 8 bits, whose casts are compiled with it; it
ends before the first other op that reads one of its values, or that waits for an exchange.

These ops are never part of a run: collectives, other ops of this package, counted random numbers,
ops whose weight gradients are computed later, ops that are marked for recomputation, and, in a
block of which only a part is recomputed, matrix products whose results may be kept.

The text of a run does not depend on the names in its graph, so equal blocks have equal texts and
can share compiled functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn

from ...planner.graph.graph import Node
from ...planner.kernels.recompute import is_costly
from ..ops.eight_bits import eight_bit_linear

aten = torch.ops.aten

OF_WEIGHTS = "of weights alone"
"""Key in the ``meta`` of fx nodes that marks nodes computed from weights alone; their gradients are
computed last."""

WAITS = "waits for an exchange"
"""Key in the ``meta`` of fx nodes that marks the end of an exchange: ops before it run beside the
exchange."""

FEWEST_OPS = 2
"""Least number of kernels in a compiled run: with a single kernel there is nothing to fuse."""

_SEEDED = frozenset((aten.dropout.default, aten.native_dropout.default))


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive ops of a block's graph that are compiled together. ``module`` computes them: it
    takes the tensors that they read from outside and returns a tuple of the results that outside
    ops read. Runs of equal ``text`` compute the same."""

    module: fx.GraphModule
    text: str


def compile_runs(
    module: fx.GraphModule, compiled: Callable[[Run], Callable[..., object]], *, in_parts: bool
) -> None:
    """Replace each run of consecutive tensor ops in a block's graph by one call of
    ``compiled(run)``, in place. ``in_parts``: the backward recomputes the block except for its
    matrix products, whose results are kept; they then stay outside of the runs."""
    for nodes in list(_runs(module.graph, in_parts=in_parts)):
        _replace(module.graph, nodes, compiled)
    module.graph.lint()
    module.recompile()


def _runs(graph: fx.Graph, *, in_parts: bool) -> Iterator[list[fx.Node]]:
    run: list[fx.Node] = []
    own: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_plain(node, in_parts=in_parts) or _is_part_of(node, run):
            run.append(node)
            own.add(node)
        elif node.op == "output" or _ends_run(node, own):
            if sum(_is_kernel(each) for each in run) >= FEWEST_OPS:
                yield run
            run, own = [], set()


def _ends_run(node: fx.Node, run: set[fx.Node]) -> bool:
    return bool(node.meta.get(WAITS)) or not run.isdisjoint(node.all_input_nodes)


def _is_plain(node: fx.Node, *, in_parts: bool) -> bool:
    target = node.target
    if target is eight_bit_linear:
        return not in_parts
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape)
    if target.namespace != "aten" or target in _SEEDED or target._schema.is_mutable:
        return False
    if node.meta.get(OF_WEIGHTS) or any(tag in target.tags for tag in tags):
        return False
    return not (in_parts and is_costly(Node("", "op", f"aten.{target._overloadpacket.__name__}")))


def _is_part(node: fx.Node) -> bool:
    """Return whether a node is ``getitem``, which selects one of several results of an op."""
    return getattr(node.target, "__name__", "") == "getitem"


def _is_part_of(node: fx.Node, run: list[fx.Node]) -> bool:
    return _is_part(node) and node.args[0] in run


def _is_kernel(node: fx.Node) -> bool:
    if node.target is eight_bit_linear:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view


def _replace(
    graph: fx.Graph, nodes: list[fx.Node], compiled: Callable[[Run], Callable[..., object]]
) -> None:
    own = set(nodes)
    inputs = list(
        dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in own)
    )
    outputs = [node for node in nodes if any(user not in own for user in node.users)]
    call = compiled(_run_of(nodes, inputs, outputs))
    with graph.inserting_after(nodes[-1]):
        made = graph.create_node("call_function", call, tuple(inputs), name="compiled")
    with graph.inserting_after(made):
        for index, node in reversed(list(enumerate(outputs))):
            part = graph.call_function(operator.getitem, (made, index))
            node.replace_all_uses_with(part)
    for node in reversed(nodes):
        graph.erase_node(node)


def _run_of(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Run:
    body = fx.Graph()
    known = {node: body.placeholder(f"x{at}") for at, node in enumerate(inputs)}
    for at, node in enumerate(nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = body.create_node(node.op, node.target, args, kwargs, name=f"y{at}")
    body.output(tuple(known[node] for node in outputs))
    return Run(fx.GraphModule(nn.Module(), body, class_name="Run"), str(body))
