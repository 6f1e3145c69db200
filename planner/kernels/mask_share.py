"""The fraction of attention positions that masks leave visible.

In: a graph, and the ops between the products of an attention. Out: the fraction of (query, key)
pairs that the softmax sees. Masks are constants that are added to scores, that select scores to
fill, or that select between scores and a value. They are computed with numpy from the ops that made
them. A mask with an unknown op or input is taken to hide nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..graph.graph import Graph, Node, Ref
from ..ops.case import Case, argument, packet
from ..ops.catalog import spec_of
from ..ops.views import moved_order

Array = NDArray[Any]

MOST_ELEMENTS = 2**28
"""Maximum elements of a computed mask; a boolean takes one byte."""
_UNSEEN = -1e4
"""Score below which a position gets no softmax weight; masks use -1e4, the least number or -inf."""

_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "le": operator.le,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
    "__or__": np.logical_or,
    "bitwise_or": np.logical_or,
    "logical_or": np.logical_or,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
}


def _is_broadcast(first: Array, second: Array) -> bool:
    pairs = zip(reversed(first.shape), reversed(second.shape), strict=False)
    return all(one == other or 1 in (one, other) for one, other in pairs)


def _seen_by(node: Node, values: Masks) -> Array | None:
    """Return the positions whose scores an op such as ``masked_fill`` leaves unchanged, as a
    boolean array; None if they are unknown."""
    name, args = packet(node.op), node.args
    if name == "add":
        known = [found for found in map(values.of, args[:2]) if found is not None]
        return known[0] > _UNSEEN if len(known) == 1 and known[0].ndim else None
    if name == "masked_fill":
        mask, value = values.of(args[1]), values.of(args[2])
        return np.logical_not(mask) if mask is not None and _hides(value) else None
    if name == "where":
        mask, first, second = map(values.of, args)
        if mask is None or _hides(first) == _hides(second):
            return None
        return mask if _hides(second) else np.logical_not(mask)
    return None


def _hides(value: Array | None) -> bool:
    return value is not None and bool(np.all(value < _UNSEEN))


class Masks:
    """Values of a graph's constant masks, each computed once.

    A dimension along which a constant repeats may have size 1 in its computed value.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[str, Array | None] = {}

    def seen_share(self, names: Iterable[str]) -> float:
        """Return the fraction of (query, key) pairs that the masks among the ops leave visible."""
        seen: Array = np.ones((), bool)
        for name in names:
            mask = _seen_by(self.graph[name], self)
            if mask is not None:
                if not _is_broadcast(seen, mask):
                    return 1.0
                seen = np.logical_and(seen, mask)
        return float(np.mean(seen))

    def of(self, item: Any) -> Array | None:
        """Return the value of an op's argument as an array; None if it cannot be computed."""
        if isinstance(item, bool | int | float):
            return np.asarray(item)
        if not isinstance(item, Ref) or item.index:
            return None
        if item.name not in self._known:
            self._known[item.name] = self._computed(self.graph[item.name])
        return self._known[item.name]

    def _computed(self, node: Node) -> Array | None:
        name = packet(node.op) if node.op else ""
        if node.kind not in ("constant", "op") or node.spec.numel > MOST_ELEMENTS:
            return None
        if name in _MADE:
            return _MADE[name](node)
        if name in _ALL_OF:
            found = [value for value in map(self.of, node.args[:2]) if value is not None]
            return _all_of(found) if found else None
        if any(self.of(ref) is None for ref in node.inputs):
            return None
        inputs = [self.of(item) for item in node.args]
        if name in _BINARY and not node.kwargs:
            return np.asarray(_BINARY[name](inputs[0], inputs[1]))
        if name == "where" and len(inputs) == 3:
            first, second = (np.asarray(value, np.float32) for value in inputs[1:])
            return np.where(np.asarray(inputs[0], bool), first, second)
        if not node.inputs:
            return None
        case = Case(node, tuple(map(self.graph.spec, node.inputs)), node.outputs)
        return _of_one(case, np.asarray(inputs[0]))


def _all_of(values: Sequence[Array]) -> Array:
    """Return the logical AND of one or two masks."""
    first, *others = (np.asarray(value, bool) for value in values)
    return np.logical_and(first, others[0]) if others else first


def _arange(node: Node) -> Array:
    return np.arange(*node.args[:3])


def _filled(value: Any, node: Node) -> Array:
    return np.asarray(value).reshape((1,) * len(node.spec.shape))


_MADE: Mapping[str, Callable[[Node], Array]] = {
    "arange": _arange,
    "ones": lambda node: _filled(1, node),
    "zeros": lambda node: _filled(0, node),
    "full": lambda node: _filled(argument(node, 1, "fill_value"), node),
}
_ALL_OF = frozenset(("__and__", "bitwise_and", "logical_and"))


def _of_one(case: Case, value: Array) -> Array | None:
    """Return the value of an op of a single mask, given as ``value``; None if it is unknown."""
    node, spec = case.node, spec_of(case.node)
    if spec.form == "same":
        return value.astype(bool) if node.spec.dtype == "bool" else value
    if spec.name == "unsqueeze":
        return np.expand_dims(value, argument(node, 1, "dim"))
    if spec.form == "reshape":
        return np.broadcast_to(value, case.shape).reshape(node.spec.shape)
    if spec.form == "expand":
        return value.reshape((1,) * (len(node.spec.shape) - value.ndim) + value.shape)
    if spec.form == "move":
        return np.transpose(value, moved_order(case))
    if spec.name == "slice":
        return _sliced(case, value)
    if spec.name in ("tril", "triu"):
        cut = np.tril if spec.name == "tril" else np.triu
        return cut(np.broadcast_to(value, case.shape), argument(node, 1, "diagonal", 0))
    if spec.name in ("bitwise_not", "logical_not"):
        return np.logical_not(value) if node.spec.dtype == "bool" else np.invert(value)
    return None


def _sliced(case: Case, value: Array) -> Array:
    dim = case.dims(1, "dim", 0)[0]
    if value.shape[dim] == 1:
        return value
    start, end, step = (
        case.argument(at, name) for at, name in ((2, "start"), (3, "end"), (4, "step"))
    )
    cut: Array = value[(slice(None),) * dim + (slice(start, end, step),)]
    return cut
