"""Numbers that a model computes from the rows of its batch, at the batch that runs.

In: two graphs of a model, captured with few rows and with all rows. Out: the first graph with the
numbers of the second, and the dimensions that grow with the rows; None if the graphs differ in
anything else, because the model takes another path. ``x.sum() / x.shape[0]`` is a division by 2 in
the first and by 64 in the second, though no tensor shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec
from ...planner.ops.case import packet
from ...planner.ops.catalog import spec_of
from ..graph_passes.hoist import hoist_constants
from ..graph_passes.masks import has_equal_rows
from ..ops.torch_ops import resolve
from ..programs.interpret import LITERAL
from .lower import Lowered

RowDims = Mapping[str, tuple[frozenset[int], ...]]
"""Dimensions that grow with the rows of the batch, for each node and each of its outputs."""

_RANGES = frozenset({"arange", "linspace", "logspace", "eye"})
_NUMBERS = ("number", "float", "Tensor")
"""Types in op schemas of arguments that hold numbers to compute with; integer types hold sizes and
positions."""


_NONE: frozenset[int] = frozenset()


class _OtherPathError(Exception):
    """Error for two captures of a model, with few and with all rows, whose graphs differ in more
    than sizes and numbers that follow from the number of rows."""


def with_numbers(few: Lowered, all_rows: Lowered) -> tuple[Lowered, RowDims] | None:
    """Return the graph ``few`` (captured with few rows) with the numbers of ``all_rows`` (captured
    with the whole batch), and the dimensions that grow with the rows; None if the two graphs differ
    in other respects."""
    graph, other = few.graph, all_rows.graph
    is_same = (
        graph.loss == other.loss
        and graph.updates == other.updates
        and graph.tied == other.tied
        and len(graph.nodes) == len(other.nodes)
        and few.literals.keys() == all_rows.literals.keys()
    )
    if not is_same:
        return None
    rows = graph.batch_size, other.batch_size
    try:
        nodes = [_merged(graph, *pair, rows) for pair in zip(graph.nodes, other.nodes, strict=True)]
        literals = {
            name: _literal(value, all_rows.literals[name]) for name, value in few.literals.items()
        }
    except _OtherPathError:
        return None
    dims = {
        node.name: tuple(
            _row_dims(spec, larger) for spec, larger in zip(node.outputs, twin.outputs, strict=True)
        )
        for node, twin in zip(graph.nodes, other.nodes, strict=True)
        if node.outputs != twin.outputs
    }
    changed = replace(graph, nodes=tuple(nodes))
    return replace(few, graph=changed, literals=literals), dims


def _merged(graph: Graph, node: Node, twin: Node, rows: tuple[int, int]) -> Node:
    """Return ``node`` with the numeric arguments of ``twin``, the same node captured with all rows.
    ``rows``: numbers of rows of the two captures."""
    head = node.name, node.kind, node.op, node.module, len(node.outputs)
    if head != (twin.name, twin.kind, twin.op, twin.module, len(twin.outputs)):
        raise _OtherPathError
    for spec, larger in zip(node.outputs, twin.outputs, strict=True):
        _check_spec(spec, larger, rows)
    if node.op == LITERAL:
        return twin if node.outputs == twin.outputs else _same(node, twin)
    if node.args == twin.args and node.kwargs == twin.kwargs:
        return node
    taken = _Numbers(graph, node, twin)
    return replace(node, args=taken.args(), kwargs=taken.kwargs())


def _check_spec(spec: TensorSpec, larger: TensorSpec, rows: tuple[int, int]) -> None:
    """Raise ``_OtherPathError`` unless each dimension has the same size in both tensors or grows in
    proportion to ``rows``, the numbers of rows of the two captures."""
    if replace(larger, shape=spec.shape) != spec or len(spec.shape) != len(larger.shape):
        raise _OtherPathError
    for size, other in zip(spec.shape, larger.shape, strict=True):
        if size != other and size * rows[1] != other * rows[0]:
            raise _OtherPathError


def _row_dims(spec: TensorSpec, larger: TensorSpec) -> frozenset[int]:
    pairs = enumerate(zip(spec.shape, larger.shape, strict=True))
    return frozenset(dim for dim, (size, other) in pairs if size != other)


def _same(node: Node, twin: Node) -> Node:
    if node.args != twin.args:
        raise _OtherPathError
    return node


def _literal(value: Tensor, other: Tensor) -> Tensor:
    if value.shape != other.shape or value.dtype != other.dtype:
        raise _OtherPathError
    return other


class _Numbers:
    """Builder of a node's arguments with the numbers of its ``twin``, the same node captured with
    all rows. Sizes and positions are kept from the node."""

    def __init__(self, graph: Graph, node: Node, twin: Node) -> None:
        self._node, self._twin = node, twin
        name = packet(node.op)
        is_grown = node.outputs != twin.outputs
        self._keeps_all = name in _RANGES and is_grown
        keeps_shape = _keeps_shape(graph, node)
        self._keeps_sizes = spec_of(node).is_sized or (name == "narrow" and keeps_shape)
        self._is_whole_slice = name == "slice" and keeps_shape
        is_builtin = node.op.startswith("aten.")
        self._arguments = resolve(node.op)._schema.arguments if is_builtin else ()

    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments, with numbers captured with all rows."""
        pairs = zip(self._node.args, self._twin.args, strict=False)
        if len(self._node.args) != len(self._twin.args):
            raise _OtherPathError
        types = [str(each.type) for each in self._arguments]
        return tuple(
            self._argument(types[place] if place < len(types) else "", value, other)
            for place, (value, other) in enumerate(pairs)
        )

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments, with numbers captured with all rows."""
        if self._node.kwargs.keys() != self._twin.kwargs.keys():
            raise _OtherPathError
        types = {each.name: str(each.type) for each in self._arguments}
        return {
            name: self._argument(types.get(name, ""), value, self._twin.kwargs[name])
            for name, value in self._node.kwargs.items()
        }

    def _argument(self, kind: str, value: Any, other: Any) -> Any:
        """Return an argument of schema type ``kind`` (such as "number"): ``other``, captured with
        all rows, if it is a number to compute with, else ``value``, captured with few rows."""
        if type(value) is not type(other):
            raise _OtherPathError
        if isinstance(value, tuple | list):
            if len(value) != len(other):
                raise _OtherPathError
            pairs = zip(value, other, strict=True)
            return type(value)(self._argument(kind, *pair) for pair in pairs)
        if value == other or (value != value and other != other):
            return value
        if type(value) not in (int, float):
            raise _OtherPathError
        if self._is_whole_slice:
            return sys.maxsize
        if any(each in kind for each in _NUMBERS):
            return value if self._keeps_all else other
        if self._keeps_sizes or self._keeps_all:
            return value
        raise _OtherPathError


def _keeps_shape(graph: Graph, node: Node) -> bool:
    """Return whether an op's result has the shape of its first argument."""
    source = node.args[0] if node.args else None
    return isinstance(source, Ref) and graph.spec(source).shape == node.spec.shape


def has_all_rows(graph: Graph, row_dims: RowDims, all_rows: Lowered) -> bool:
    """Return whether the batch dimensions of ``graph`` are exactly the dimensions that grow with
    the rows (``row_dims``). A constant may also grow in another dimension if all nodes read only
    its first row there, and all its rows are equal in the capture ``all_rows``. Nodes that graph
    passes added are not checked."""
    originals = all_rows.graph.by_name
    read: dict[str, frozenset[int]] = {}
    for node in graph:
        dims = graph.batch_dims[node.name]
        own = tuple(_NONE if dim is None else frozenset((dim,)) for dim in dims)
        found = row_dims.get(node.name, (_NONE,) * len(dims))
        if node.name not in originals or found == own:
            continue
        read[node.name] = _rows_read(graph, node)
        if not read[node.name] or found != (read[node.name],):
            return False
    hoisted = hoist_constants(all_rows.graph) if read else all_rows.graph
    return all(
        has_equal_rows(hoisted, name, dim, all_rows.literals)
        for name, dims in read.items()
        for dim in dims
    )


def _rows_read(graph: Graph, node: Node) -> frozenset[int]:
    """Return the dimensions of a constant in which every node that reads it takes only the first
    row."""
    if node.kind != "constant":
        return _NONE
    found = []
    for user in map(graph.__getitem__, graph.users[node.name]):
        is_first = user.op == "aten.slice.Tensor" and user.args[2:] == (0, 1)
        found.append(frozenset((user.args[1],)) if is_first else _NONE)
    return frozenset.intersection(*found) if found else _NONE
