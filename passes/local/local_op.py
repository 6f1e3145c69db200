"""An op before its call on parts, and the resulting call: the input and output of ``local_ops``.

In: a node with its layout, a rank and the arguments as local tensors. Out: shapes, dimensions
and mesh axes of the parts, and calls with some arguments changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...planner.graph.graph import Node, TensorSpec
from ...planner.graph.layout import Layout, NodeLayout, local_shape
from ..ops.collectives import Rank


@dataclass(frozen=True, slots=True)
class Call:
    """Call of the function ``target`` with its arguments; its result is to be multiplied by
    ``scale``. With ``start``, an earlier call, its first argument is the result of ``start``."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scale: float = 1.0
    start: Call | None = None


@dataclass(frozen=True, slots=True)
class LocalOp:
    """Op node of the graph, with all data needed to call the op on one rank's shards. ``arguments``
    maps the schema's argument names (with defaults) to literals and local tensors; ``positions``
    maps each tensor argument to its position among the node's inputs; ``specs`` are the inputs'
    global shapes and dtypes; ``batch_dim`` is the first output's batch dimension; ``count`` is the
    divisor of a classification loss, if known beforehand; ``has_others_beside`` says whether other
    ops run while the op exchanges tokens."""

    node: Node
    layout: NodeLayout
    rank: Rank
    specs: tuple[TensorSpec, ...]
    overload: Any
    arguments: Mapping[str, Any]
    positions: Mapping[str, int]
    batch_dim: int | None
    count: Any = None
    has_others_beside: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of output ``index`` on this rank."""
        shape = self.node.outputs[index].shape
        return local_shape(shape, self.layout.outputs[index], self.rank.mesh.shape)

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self.specs[self.positions[name]].shape

    def input_layout(self, name: str) -> Layout:
        return self.layout.inputs[self.positions[name]]

    def local_specs(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the specs of the rank's parts of inputs and outputs."""
        sizes = self.rank.mesh.shape
        pairs = ((self.specs, self.layout.inputs), (self.node.outputs, self.layout.outputs))
        inputs, outputs = (
            tuple(
                replace(spec, shape=local_shape(spec.shape, held, sizes))
                for spec, held in zip(specs, layouts, strict=True)
            )
            for specs, layouts in pairs
        )
        return inputs, outputs

    def dim(self, name: str = "dim", of: str = "self") -> int:
        """Return the value of the dimension argument ``name`` as a non-negative number; ``of``
        names the tensor argument whose dimensions it counts."""
        found: int = self.arguments[name]
        return found % max(len(self.global_shape(of)), 1)

    def axes(self, name: str, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that shard dimension ``dim`` of the tensor argument ``name``."""
        layout = self.input_layout(name)
        return tuple(a for a, held in enumerate(layout) if held.is_shard and held.dim == dim)

    def by_rank(self, function: Callable[..., Any], *args: Any, **options: Any) -> Call:
        """Return the call of ``function`` with this rank as its first argument."""
        return Call(self.rank.bound(function), args, options)

    def call(self, overload: Any = None, *, scale: float = 1.0, **changes: Any) -> Call:
        """Return the op's call with some arguments changed. ``overload`` is another op to call
        instead, whose arguments may have other names; the result is multiplied by ``scale``."""
        target = self.overload if overload is None else overload
        values = {**self.arguments, **changes}
        listed = target._schema.arguments
        positional = [argument for argument in listed if not argument.kwarg_only]
        while positional and _is_default(positional[-1], values[positional[-1].name]):
            positional.pop()
        args = tuple(values[argument.name] for argument in positional)
        kwargs = {
            argument.name: values[argument.name]
            for argument in listed
            if argument.kwarg_only and not _is_default(argument, values[argument.name])
        }
        return Call(target, args, kwargs, scale)


def _is_default(argument: Any, value: Any) -> bool:
    return argument.has_default_value() and value is argument.default_value
