"""Rows repeated once per expert: ``view(repeat(x, (E, 1)) · s, (E, T, …))`` keeps E and T apart.

Some layers write the rows of all experts one after another, (E·T, …), and fold them apart again. In
between no part of the T rows is contiguous, so a batch could not be split. The pass moves the fold
up, through elementwise ops, to the copies, which become an ``expand`` to (E, T, …); and a fold of a
join is the tensor itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec, map_refs
from ..ops.torch_ops import is_pointwise
from .hoist import drop_dead

RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_CASTS = ("aten.to.dtype",)


@dataclass(frozen=True, slots=True)
class Unfold:
    """Graph pass for experts' input: E copies of T rows are kept in shape (E, T, …) from where they
    are made, instead of (E·T, …), so that T can be sharded."""

    name: str = "unfold"

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(unfold(graph))


def unfold(graph: Graph) -> Graph:
    """Return the graph in which E copies of T rows are held in shape (E, T, …) instead of (E·T,
    …)."""
    state, is_changed = _Unfolding(graph, []), False
    for node in graph.nodes:
        changed = state.folded(node) if node.kind == "op" and node.op in RESHAPES else None
        is_changed |= changed is not None
        state.nodes.append(changed or node)
    return replace(graph, nodes=tuple(state.nodes)) if is_changed else graph


@dataclass
class _Unfolding:
    """State of the pass: ``graph``, as it was before, and the ``nodes`` made so far, in order."""

    graph: Graph
    nodes: list[Node]

    def folded(self, node: Node) -> Node | None:
        """Return the reshape ``node`` from (E·T, …) to (E, T, …) changed to read a tensor that
        already has shape (E, T, …), or that new nodes compute in it. None if neither is
        possible."""
        source, shape = node.args[0], node.spec.shape
        joined = self.graph.spec(source).shape
        if len(shape) < 2 or joined != (shape[0] * shape[1], *shape[2:]) or 1 in shape[:2]:
            return None
        maker = self.graph[source.name]
        if maker.op in RESHAPES and self.graph.spec(maker.args[0]).shape == shape:
            return replace(node, args=(maker.args[0], *node.args[1:]))
        if not self._repeats(source, shape[0]):
            return None
        return replace(node, args=(self._unfold(source, shape[0]), *node.args[1:]))

    def _repeats(self, ref: Ref, count: int) -> bool:
        """Return whether a value consists of ``count`` equal copies of rows, or is computed from
        them by elementwise ops."""
        node = self.graph[ref.name]
        if node.op == "aten.repeat.default":
            copies, source = tuple(node.args[1]), self.graph.spec(node.args[0])
            return copies == (count,) + (1,) * (len(source.shape) - 1)
        if not self._is_elementwise(node):
            return False
        made = [self.graph[each.name] for each in node.inputs]
        others = [each for each in made if not self._repeats(Ref(each.name), count)]
        return len(others) < len(made) and all(each.op in RESHAPES for each in others)

    def _is_elementwise(self, node: Node) -> bool:
        if node.kind != "op" or not (node.op in _CASTS or is_pointwise(node.op)):
            return False
        rows = node.spec.shape[:1]
        shapes = [self.graph.spec(ref).shape for ref in node.inputs]
        return all(len(s) == len(node.spec.shape) and s[:1] == rows for s in shapes)

    def _unfold(self, ref: Ref, count: int) -> Ref:
        """Return the value ``ref``, of shape (count · T, …), computed in shape (count, T, …)."""
        node, spec = self.graph[ref.name], self.graph.spec(ref)
        shape = (count, spec.shape[0] // count, *spec.shape[1:])
        if node.op in RESHAPES:
            return self._made(node, node.op, (node.args[0], list(shape)), shape)
        if node.op == "aten.repeat.default":
            one = (1, *shape[1:])
            lifted = self._made(node, "aten.unsqueeze.default", (node.args[0], 0), one)
            return self._made(node, "aten.expand.default", (lifted, list(shape)), shape)
        args = map_refs(node.args, lambda each: self._unfold(each, count))
        return self._made(node, node.op, args, shape)

    def _made(self, like: Node, op: str, args: Any, shape: tuple[int, ...]) -> Ref:
        """Add a copy of node ``like`` with a new name, op, arguments and shape; return its
        value."""
        name = f"{like.name}_unfolded{len(self.nodes)}"
        spec = TensorSpec(shape, like.spec.dtype, like.spec.requires_grad)
        kwargs = like.kwargs if op == like.op else {}
        self.nodes.append(
            replace(like, name=name, op=op, args=args, kwargs=kwargs, outputs=(spec,))
        )
        return Ref(name)
