"""Strategies of a node on one mesh axis, by the rules."""

from __future__ import annotations

from typing import Any

from ..graph.graph import Graph, Node, Ref, flat_form
from ..graph.layout import INVARIANT, REPLICATE, AxisStrategy, Placement, shard
from .balanced_attention import balanced_strategies
from .case import Case
from .derive import derive
from .exchange import exchanged_parts
from .table import RULES, packet, signature

_NAMES = frozenset(name for name, _ in RULES)


def has_rule(op: str) -> bool:
    """Return whether an op has a rule, without which it is never split.

    >>> has_rule("aten.linear.default"), has_rule("aten.svd.default")
    (True, False)
    """
    return packet(op) in _NAMES


def axis_strategies(node: Node, graph: Graph, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return every strategy of ``node`` on one mesh axis of ``axis_size`` ranks, ``"I"`` last.

    A parameter is split or ``R``; an input, buffer or constant is split or ``I``. Only dimensions
    that the axis divides are split; the caller checks splits of one dimension by several axes.
    """
    if node.kind != "op":
        return _held(node, axis_size)
    return op_strategies(node, graph, axis_size)


def op_strategies(node: Node, graph: Graph, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return the strategies of a node's op, also for a constant that an op computes."""
    nodes, refs = graph.by_name, node.inputs
    producers = [nodes[ref.name] for ref in refs]
    specs = (each.outputs[ref.index] for each, ref in zip(producers, refs, strict=True))
    case = Case(node, tuple(specs), node.outputs)
    derived = derive(
        signature(case),
        case.inputs,
        case.outputs,
        axis_size=axis_size,
        leaves=[producer.kind != "op" for producer in producers],
    )
    return (
        *exchanged_parts(case, axis_size),
        *derived[:-1],
        *balanced_strategies(case, derived, axis_size),
        derived[-1],
    )


def strategies_form(node: Node, graph: Graph) -> tuple[Any, ...]:
    """Return a key that is equal for nodes with equal ``axis_strategies``, as in equal layers."""
    return op_form(node, graph) if node.kind == "op" else (node.kind, node.outputs)


def op_form(node: Node, graph: Graph) -> tuple[Any, ...]:
    """Return a key that is equal for nodes with equal ``op_strategies``."""
    parts: list[Any] = [node.op, node.rule, node.outputs]
    for ref in node.inputs:
        producer = graph.by_name[ref.name]
        parts += (producer.outputs[ref.index], producer.kind == "op")
    positions: dict[Ref, int] = {}
    arguments = node.args, {k: v for k, v in node.kwargs.items() if k != "number"}
    flat_form(arguments, lambda ref: positions.setdefault(ref, len(positions)), parts)
    return tuple(parts)


def _held(node: Node, axis_size: int) -> tuple[AxisStrategy, ...]:
    whole = REPLICATE if node.kind == "parameter" else INVARIANT
    splits: list[tuple[str, Placement]] = [
        (f"d{dim}", shard(dim))
        for dim, size in enumerate(node.spec.shape)
        if size and size % axis_size == 0 and not node.spec.stored
    ]
    return tuple(
        AxisStrategy(label, (), (placement,) * len(node.outputs))
        for label, placement in [*splits, (whole.kind, whole)]
    )
