"""Records of ops (``spec``), and functions of them: an op's possible splits, its work, the tensors
that autograd keeps for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..graph.graph import Graph, Node, Ref, TensorSpec
from ..graph.layout import AxisStrategy
from .catalog import has_rule
from .saved import kept_extra_bytes, saved, saved_extra_bytes
from .storage import storage_of
from .strategies import axis_strategies, strategies_form
from .work import Work, work

__all__ = [
    "Rules",
    "Work",
    "axis_strategies",
    "has_rule",
    "kept_extra_bytes",
    "saved",
    "saved_extra_bytes",
    "storage_of",
    "strategies_form",
    "work",
]


class Rules(Protocol):
    """Interface of this package, for code that accepts any implementation of it."""

    def axis_strategies(
        self, node: Node, graph: Graph, axis_size: int
    ) -> tuple[AxisStrategy, ...]: ...
    def strategies_form(self, node: Node, graph: Graph) -> tuple[Any, ...]: ...
    def work(
        self, node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Any: ...
    def saved(self, node: Node, graph: Graph | None = None) -> tuple[Ref, ...]: ...
    def saved_extra_bytes(
        self, node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> int: ...
    def kept_extra_bytes(
        self, node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> int: ...
    def storage_of(self, graph: Graph) -> Mapping[tuple[str, int], tuple[str, int]]: ...
