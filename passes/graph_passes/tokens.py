"""Tokens of experts as rows and positions: what computes on them keeps (B, P, …), not (B·P, …).

Layers of experts flatten rows and positions to one dimension of tokens, and unflatten it after the
experts. In between no part of the positions is contiguous, so an axis that splits positions would
gather all tokens. The pass moves the flattening down through every op that treats tokens one by
one, until the unflattening undoes it. An op qualifies if its record can split its tokens, and, on
rows and positions apart, each of the two dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...planner.graph.expert_dims import is_expert_layer
from ...planner.graph.graph import Graph, Node, NodeKind, Ref, TensorSpec, flat_form, map_refs
from ...planner.graph.layout import shard
from ...planner.ops import axis_strategies
from ...planner.ops.catalog import spec_of
from ..ops.torch_ops import resolve
from .hoist import drop_dead
from .unfold import RESHAPES

DIMS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
"""Names that schemas give to arguments that count dimensions."""
SIZES = ("size", "shape")
"""Names that schemas give to arguments with the sizes of a result."""

Lead = tuple[int, int]
"""Numbers of rows and positions."""


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """Graph pass for layers of experts: ops on tokens compute on rows and positions apart, so that
    either can be sharded."""

    name: str = "tokens"

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(split_tokens(graph)) if any(map(is_expert_layer, graph.nodes)) else graph


def split_tokens(graph: Graph) -> Graph:
    """Return the graph in which layers of experts, and the ops that lead to them and away from
    them, keep rows and positions apart."""
    found = _Apart(graph)
    for node in graph.nodes:
        found.look(node)
    return found.rewritten()


@dataclass
class _Apart:
    """State of the pass. ``leads``: by value of joined tokens, its rows and positions; ``sources``:
    by flattened value, the value that was flattened; ``changed``: by node on tokens, the node on
    rows and positions, with the values of the graph as it was as its arguments; ``others``: by such
    a node, its inputs of tokens that no changed node makes, such as masks."""

    graph: Graph
    leads: dict[Ref, Lead] = field(default_factory=dict)
    sources: dict[Ref, Ref] = field(default_factory=dict)
    changed: dict[str, Node] = field(default_factory=dict)
    others: dict[str, tuple[Ref, ...]] = field(default_factory=dict)
    known: dict[object, tuple[bool, ...] | None] = field(default_factory=dict)
    """By op and arguments, which inputs are values of tokens; None if the node must stay."""

    def look(self, node: Node) -> None:
        """Find out whether a node joins rows and positions, or may compute on them apart."""
        if node.kind != "op" or node.rule is not None:
            return
        if node.op in RESHAPES and node.inputs[0] not in self.leads:
            rows, *others = self.graph.spec(node.inputs[0]).shape
            if others and others[0] > 1 and (rows * others[0], *others[1:]) == node.spec.shape:
                self.leads[Ref(node.name)] = rows, others[0]
                self.sources[Ref(node.name)] = node.inputs[0]
            return
        leads = {self.leads[ref] for ref in node.inputs if ref in self.leads}
        made = self._apart(node, *leads) if len(leads) == 1 else None
        if made is not None:
            self.changed[node.name] = made
            self.leads |= dict.fromkeys(_values(node), *leads)

    def _apart(self, node: Node, lead: Lead) -> Node | None:
        """Return the node that computes the same on rows and positions; None if there is none."""
        if spec_of(node).is_counted or any(s.shape[:1] != (prod(lead),) for s in node.outputs):
            return None
        whole = {ref: self.graph.spec(ref) for ref in node.inputs}
        arguments = _arguments(node, lead, whole)
        if arguments is None:
            return None
        outputs = tuple(_with(lead, spec) for spec in node.outputs)
        made = replace(node, args=arguments[0], kwargs=arguments[1], outputs=outputs)
        parts: list[Any] = [node.op, lead]
        flat_form((node.args, dict(node.kwargs)), lambda r: (whole[r], r in self.leads), parts)
        key = tuple(map(str, parts))
        if key not in self.known:
            self.known[key] = self._split_inputs(node, made, whole, lead)
        of_tokens = self.known[key]
        if of_tokens is None:
            return None
        split = [ref for ref, is_split in zip(node.inputs, of_tokens, strict=True) if is_split]
        self.others[node.name] = tuple(ref for ref in split if ref not in self.leads)
        return made

    def _split_inputs(
        self, node: Node, made: Node, whole: Mapping[Ref, TensorSpec], lead: Lead
    ) -> tuple[bool, ...] | None:
        """Return which inputs of ``node`` are values of tokens if the node may become ``made``,
        else None."""
        for found in _splits(node, whole, 0):
            split = {ref for ref, is_split in zip(node.inputs, found, strict=True) if is_split}
            if not split.issuperset(ref for ref in node.inputs if ref in self.leads):
                continue
            apart = {r: _with(lead, spec) if r in split else spec for r, spec in whole.items()}
            fits = all(found in _splits(made, apart, dim) for dim in (0, 1))
            if fits and _shapes(made, apart) == [spec.shape for spec in made.outputs]:
                return found
        return None

    def rewritten(self) -> Graph:
        """Return the graph in which layers of experts, and the ops on tokens around them, compute
        on rows and positions apart."""
        needed = self._needed()
        nodes: list[Node] = []
        joined: dict[Ref, Ref] = {}
        apart = dict(self.sources)
        for node in self.graph.nodes:
            if node.name in needed:
                made = self.changed[node.name]
                for ref in self.others[node.name]:
                    if ref not in apart:
                        nodes.append(self._apart_view(ref, made))
                        apart[ref] = Ref(nodes[-1].name)
                nodes.append(_reading(made, apart))
                for ref, spec in zip(_values(node), node.outputs, strict=True):
                    nodes.append(_joined(ref, spec))
                    joined[ref] = Ref(nodes[-1].name)
            else:
                nodes.append(node if node.op in RESHAPES else _reading(node, joined))
        updates = {name: joined.get(ref, ref) for name, ref in self.graph.updates.items()}
        loss = joined.get(self.graph.loss, self.graph.loss)
        return replace(self.graph, nodes=tuple(nodes), updates=updates, loss=loss)

    def _apart_view(self, ref: Ref, reader: Node) -> Node:
        """Return the node that views value ``ref`` of tokens as ``reader`` reads it, on rows and
        positions."""
        before = self.graph.spec(ref)
        spec = replace(before, shape=(*reader.spec.shape[:2], *before.shape[1:]))
        kind: NodeKind = "constant" if self.graph[ref.name].kind == "constant" else "op"
        name = f"{ref.name}_rows{ref.index or ''}"
        return Node(name, kind, RESHAPES[1], (ref, list(spec.shape)), outputs=(spec,))

    def _needed(self) -> Collection[str]:
        """Return the names of the layers of experts that change, and of the changed nodes that lead
        to them or away from them."""
        found = {name for name, node in self.changed.items() if is_expert_layer(node)}
        for name, node in self.changed.items():
            if found.intersection(ref.name for ref in node.inputs):
                found.add(name)
        for name, node in reversed(self.changed.items()):
            if name in found:
                found.update(ref.name for ref in node.inputs if ref.name in self.changed)
        return found


def _splits(node: Node, specs: Mapping[Ref, TensorSpec], dim: int) -> list[tuple[bool, ...]]:
    """Return, for each way to split an op along dimension ``dim`` of all its outputs and of some of
    its inputs, which inputs are split."""
    names = {ref: Ref(f"input {at}") for at, ref in enumerate(specs)}
    leaves = [Node(names[ref].name, "input", outputs=(spec,)) for ref, spec in specs.items()]
    args, kwargs = map_refs((node.args, dict(node.kwargs)), names.__getitem__)
    alone = replace(node, args=args, kwargs=kwargs)
    offered = axis_strategies(alone, Graph((*leaves, alone), Ref(node.name), 1), 1)
    return [
        tuple(each.is_shard for each in strategy.inputs)
        for strategy in offered
        if all(each == shard(dim) or not each.is_shard for each in strategy.inputs)
        and all(each == shard(dim) for each in strategy.outputs)
    ]


def _values(node: Node) -> list[Ref]:
    return [Ref(node.name, index) for index in range(len(node.outputs))]


def _with(lead: Lead, spec: TensorSpec) -> TensorSpec:
    """Return the spec of a value of tokens on rows and positions."""
    return replace(spec, shape=(*lead, *spec.shape[1:]))


def _joined(ref: Ref, spec: TensorSpec) -> Node:
    """Return the node that joins rows and positions of value ``ref`` to tokens of ``spec``."""
    name = f"{ref.name}_tokens{ref.index or ''}"
    return Node(name, "op", RESHAPES[1], (ref, list(spec.shape)), outputs=(spec,))


def _reading(node: Node, others: Mapping[Ref, Ref]) -> Node:
    """Return the node with the values in ``others`` in place of their keys."""
    if not any(ref in others for ref in node.inputs):
        return node
    args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda ref: others.get(ref, ref))
    return replace(node, args=args, kwargs=kwargs)


def _shapes(node: Node, specs: Mapping[Ref, TensorSpec]) -> list[tuple[int, ...]]:
    """Return the shapes of a node's outputs, found by running it on meta tensors."""

    def tensor(ref: Ref) -> Tensor:
        spec = specs[ref]
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    args, kwargs = map_refs((node.args, dict(node.kwargs)), tensor)
    try:
        made = resolve(node.op)(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError):
        return []
    return [tuple(each.shape) for each in ((made,) if isinstance(made, Tensor) else made)]


def _arguments(
    node: Node, lead: Lead, specs: Mapping[Ref, TensorSpec]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a node's arguments for rows and positions in place of tokens: dimensions count one
    more, sizes begin with ``lead``. None if an argument names the dimension of tokens."""
    names = [argument.name for argument in resolve(node.op)._schema.arguments]
    given = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    num_dims = len(specs[node.inputs[0]].shape)
    named = [dim for name, value in given if name in DIMS for dim in _list(value)]
    if any(dim == 0 or dim + num_dims <= 0 for dim in named):
        return None

    def changed(name: str, value: Any) -> Any:
        if name in SIZES and isinstance(value, list | tuple):
            return [*lead, *node.spec.shape[1:]]
        if name not in DIMS or not _list(value):
            return value
        counted = [dim if dim < 0 else dim + 1 for dim in _list(value)]
        return counted if isinstance(value, list | tuple) else counted[0]

    args = tuple(changed(*each) for each in given[: len(node.args)])
    return args, {name: changed(name, value) for name, value in node.kwargs.items()}


def _list(value: Any) -> list[int]:
    """Return dimensions given as a number, a sequence or None, as a list."""
    return [value] if isinstance(value, int) else list(value or ())
