"""Losses and other ops of autocast's float32 list compute in float32 in a half-precision model.

In: a graph that was captured in ``dtype``, the format of its parameters. Out: the same with casts.

- an op of autocast's float32 list gets its floating inputs in float32 and gives float32;
- a sum gives float32 of whatever it reads, as its kernel does that without a copy;
- a product, an op that the user registered and a batch norm get results of such ops
  in their captured format;
- a kernel that reads half precision, computes in float32 and rounds only its result stays
  unchanged, unless an input is float32 already: without a cast, its results differ from float32
  only by rounding, as its backward reads only the inputs or a result in [0, 1];
- every other op takes the widest of its inputs.

The positions of casts do not depend on ``dtype``: a cast without effect is a node, too, so the
graph of a plan can be captured in float32 or float64 for verification. In float64 the casts are to
float64.

``OpSpec.autocast`` has the lists, which
https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior documents.
``cross_entropy_loss``, ``square`` and ``linalg_norm`` are there as their parts;
``binary_cross_entropy`` is in the list of the CPU only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec, map_refs
from ...planner.ops.catalog import spec_of
from ..ops.torch_ops import has_argument, is_pointwise, resolve

_CAST = "aten.to.dtype"
_HALVES = ("bfloat16", "float16")
_FLOATS = ("float32", "float64", *_HALVES)


@dataclass(frozen=True, slots=True)
class Autocast:
    """Graph pass that adds the casts of torch's autocast; ``dtype`` is the captured graph's
    dtype."""

    dtype: str
    name: str = "autocast"

    def __call__(self, graph: Graph) -> Graph:
        return autocast(graph, self.dtype)


def autocast(graph: Graph, dtype: str) -> Graph:
    """Return the graph with all ops in float32 for which torch's autocast uses float32; in float64
    if ``dtype`` is float64."""
    state = _Casts(graph, "float64" if dtype == "float64" else "float32")
    for node in graph.nodes:
        state.add(node)
    updates = {name: state.restored(ref, f"{name}_update") for name, ref in graph.updates.items()}
    return replace(graph, nodes=tuple(state.nodes.values()), updates=updates)


@dataclass
class _Casts:
    """State of the autocast pass: the nodes made so far, and ``raised``, the values that are now
    computed in the wider dtype ``high``."""

    graph: Graph
    high: str
    nodes: dict[str, Node] = field(default_factory=dict)
    raised: set[Ref] = field(default_factory=set)

    def add(self, node: Node) -> None:
        if node.kind not in ("op", "constant") or not node.inputs:
            self.nodes[node.name] = node
            return
        _, kind, _ = node.op.split(".")
        how = spec_of(node).autocast
        has_raised = any(ref in self.raised for ref in node.inputs)
        if kind == "sum" and not has_raised and _reads_floats(self.graph, node):
            self._sum(node)
        elif _says_dtype(node):
            self.nodes[node.name] = node
        elif node.rule is None and (how == "float32" or (has_raised and how == "inside")):
            self._raise(self._with_inputs(node, self._up))
        elif not has_raised:
            self.nodes[node.name] = node
        elif _keeps_format(node, kind):
            self.nodes[node.name] = self._with_inputs(node, self.restored)
        elif is_pointwise(node.op) and kind != "lerp":  # lerp takes no two formats
            self._promote(node)
        else:
            self._raise(self._with_inputs(node, self._up))

    def restored(self, ref: Ref, name: str) -> Ref:
        """Return ``ref`` in the dtype that it was captured in; if it is now in the wider dtype, add
        a cast node called ``name``."""
        return self._cast(ref, name, self.graph.spec(ref).dtype) if ref in self.raised else ref

    def _up(self, ref: Ref, name: str) -> Ref:
        is_float = self.graph.spec(ref).dtype in _FLOATS
        return self._cast(ref, name, self.high) if is_float and ref not in self.raised else ref

    def _cast(self, ref: Ref, name: str, dtype: str) -> Ref:
        source = self.nodes[ref.name]
        before = source.outputs[ref.index]
        user = self.graph.by_name.get(name.rpartition("_cast")[0])
        self.nodes[name] = Node(
            name,
            "constant" if source.kind == "constant" else "op",
            _CAST,
            (ref, getattr(torch, dtype)),
            {},
            (replace(before, dtype=dtype),),
            module=(user or source).module,
            source=(user or source).source,
        )
        return Ref(name)

    def _with_inputs(self, node: Node, change: Any) -> Node:
        """Return ``node`` with each input replaced by ``change(value, name)``, which may add a cast
        node called ``name``."""
        changed = {
            ref: change(ref, f"{node.name}_cast{position}")
            for position, ref in enumerate(dict.fromkeys(node.inputs))
        }

        def now(ref: Ref) -> Ref:
            return changed[ref]  # type: ignore[no-any-return]

        return replace(node, args=map_refs(node.args, now), kwargs=map_refs(dict(node.kwargs), now))

    def _raise(self, node: Node) -> None:
        """Add ``node`` with its floating outputs in the wider dtype."""
        self.nodes[node.name] = node.with_outputs(
            tuple(_in(spec, self.high) for spec in node.outputs)
        )
        self.raised |= {
            Ref(node.name, index) for index, spec in enumerate(node.outputs) if _is_float(spec)
        }

    def _sum(self, node: Node) -> None:
        if _is_float(node.spec):
            dtype = getattr(torch, self.high)
            self._raise(replace(node, kwargs={**node.kwargs, "dtype": dtype}))

    def _promote(self, node: Node) -> None:
        """Add a pointwise op with torch's type promotion: its result is in the wider dtype if a
        tensor that it reads is (0-dimensional tensors do not count beside others)."""
        specs = [(ref, self.graph.spec(ref)) for ref in node.inputs]
        floats = [(ref, spec) for ref, spec in specs if _is_float(spec)]
        decide = [ref for ref, spec in floats if spec.shape] or [ref for ref, _ in floats]
        if any(ref in self.raised for ref in decide):
            self._raise(node)
        else:
            self.nodes[node.name] = node


def _is_float(spec: TensorSpec) -> bool:
    return spec.dtype in _FLOATS


def _in(spec: TensorSpec, dtype: str) -> TensorSpec:
    return replace(spec, dtype=dtype) if _is_float(spec) else spec


def _reads_floats(graph: Graph, node: Node) -> bool:
    return _is_float(graph.spec(node.inputs[0])) and not _says_dtype(node)


def _says_dtype(node: Node) -> bool:
    """Return whether the call sets the dtype of its result: a cast, or a reduction's ``dtype=``."""
    if node.rule is not None or not has_argument(node.op, "dtype"):
        return False
    names = [argument.name for argument in resolve(node.op)._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("dtype") is not None


def _keeps_format(node: Node, kind: str) -> bool:
    """Return whether an op of this ``kind`` (name) is computed in its captured dtype even under
    autocast."""
    spec = spec_of(node)
    is_own = not node.op.startswith("aten.") and not spec.is_counted
    is_lower = spec.autocast == "lower" or "batch_norm" in kind
    return node.rule is not None or is_own or is_lower
