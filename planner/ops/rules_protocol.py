"""The interface of ``planner.ops``, for code that accepts any implementation of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..graph.graph import Graph, Node, Ref, TensorSpec
from ..graph.layout import AxisStrategy


class Rules(Protocol):
    """Interface of ``planner.ops``: strategies, work and saved values of an op."""

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
