"""Data model of the planned graph: tensors, nodes, and the blocks that stages are made of.

Nodes are the forward of the model at one batch size, in topological order. Nodes have names that
the user knows: a parameter's node is called by its fully qualified name, an input's by its key in
the batch, an op's by its name in the captured program.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import prod
from typing import Any, Literal, TypeVar

from ...cost_model.ops.memory import nf4_bytes

T = TypeVar("T")

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Global shape of a tensor, dtype by name (``"float32"``), and whether it has a gradient.

    ``stored`` is the format in which a frozen weight is held ("nf4"), if not in ``dtype``; ops that
    read it dequantize it. It is whole on every rank that holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    stored: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def is_complex(self) -> bool:
        return self.dtype.startswith("complex")

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of a weight in the format in which it is held."""
        return nf4_bytes(self.numel) if self.stored else self.num_bytes


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to output number ``index`` of node ``name``, as an argument of another node."""

    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class OpRule:
    """Sharding rule of an op that the user registered; it is stored with the nodes of that op.

    ``annotation`` names the dimensions of inputs and outputs, in the grammar of
    ``planner.ops.annotation``. ``flops`` computes the forward's FLOPs, ``saved_bytes`` the bytes
    that the backward reads besides inputs (masks, statistics), both from the shapes of a rank's
    input tensors.
    """

    annotation: str
    flops: Callable[..., float] | None = None
    saved_bytes: Callable[..., float] | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """Memory traffic of an op that is part of a fused kernel.

    Fields hold positions of the op's inputs or indices of its outputs. ``reads``, ``writes``: from
    and to memory in the forward; ``reads_gradients``: outputs whose gradient the backward reads;
    ``gradients``: inputs whose gradient it writes (twice if it adds to another part);
    ``keeps_inputs``, ``keeps_outputs``: kept for the backward. ``kernels_forward``,
    ``kernels_backward``: number of kernels counted at this op.

    ``in_product_kernel``: the kernel has matrix products. ``share``: fraction of the op's FLOPs
    that is computed, after masks and repeated operands. ``again``: the backward recomputes this
    product. ``is_attention``: the kernel has a softmax. ``product_dtype``: format of a product's
    operands.
    """

    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    reads_gradients: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    keeps_inputs: tuple[int, ...] = ()
    keeps_outputs: tuple[int, ...] = ()
    kernels_forward: int = 0
    kernels_backward: int = 0
    in_product_kernel: bool = False
    share: float = 1.0
    again: bool = False
    is_attention: bool = False
    product_dtype: str = ""


NodeKind = Literal["input", "parameter", "buffer", "constant", "op"]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph: the op, or the leaf, that makes one or several tensors.

    ``kind``:
      - ``input``: a tensor of the batch; ``parameter``: trained; ``buffer``: a state that
        an op reads or writes in training;
      - ``constant``: depends on no input and no parameter (rotary tables, masks). It is
        evaluated once per process, may take any layout at no cost, and has no gradient.
        ``op``/``args`` compute it; its ancestors are constants or buffers;
      - ``op``: everything else.

    ``op`` is a ``torch.ops`` path such as ``"aten.linear.default"`` (empty for leaves).
    ``args``/``kwargs`` hold literals, ``Ref``s and lists of them, as the op is called. ``outputs``
    has one spec per output. ``module`` is the module path that made the node, ``source`` the user's
    ``file:line``. ``rule`` belongs to an op that the user registered; ``fused`` is the traffic that
    the op causes inside a fused kernel, None where it is a kernel of its own. ``product_dtype``:
    the format that a product casts its factors to; empty if it casts none.
    """

    name: str
    kind: NodeKind
    op: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    module: str = ""
    source: str = ""
    rule: OpRule | None = None
    fused: Fused | None = None
    product_dtype: str = ""
    _inputs: tuple[Ref, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def spec(self) -> TensorSpec:
        """Return the spec of the first output."""
        return self.outputs[0]

    @property
    def inputs(self) -> tuple[Ref, ...]:
        """Return all ``Ref`` arguments in call order; a value that is passed twice counts twice."""
        if self._inputs is None:
            refs: list[Ref] = []
            _collect(self.args, refs)
            for value in self.kwargs.values():
                _collect(value, refs)
            object.__setattr__(self, "_inputs", tuple(refs))
        return self._inputs or ()

    def with_outputs(self, outputs: tuple[TensorSpec, ...]) -> Node:
        """Return a copy of the node with other output specs."""
        made = Node(
            self.name,
            self.kind,
            self.op,
            self.args,
            self.kwargs,
            outputs,
            self.module,
            self.source,
            self.rule,
            self.fused,
            self.product_dtype,
        )
        object.__setattr__(made, "_inputs", self._inputs)
        return made


def _collect(value: Any, refs: list[Ref]) -> None:
    if isinstance(value, Ref):
        refs.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, refs)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, refs)


def map_refs(value: Any, function: Callable[[Ref], Any]) -> Any:
    """Apply ``function`` to every ``Ref`` in nested tuples, lists and dicts of ``value``."""
    if isinstance(value, Ref):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)([map_refs(item, function) for item in value])
    if isinstance(value, dict):
        return {key: map_refs(item, function) for key, item in value.items()}
    return value


def flat_form(value: Any, named: Callable[[Ref], Any], parts: list[Any]) -> None:
    """Append the contents of ``value`` to ``parts`` in order, with ``named(ref)`` for each ``Ref``.

    Two values are equal if their lists are equal. Types are listed, so ``1`` and ``True`` differ.

    >>> parts = []
    >>> flat_form((Ref("x"), [1]), lambda ref: 0, parts)
    >>> [part.__name__ if isinstance(part, type) else part for part in parts]
    ['tuple', 2, 'Ref', 0, 'list', 1, 'int', 1]
    """
    parts.append(type(value))
    if isinstance(value, Ref):
        parts.append(named(value))
    elif isinstance(value, tuple | list):
        parts.append(len(value))
        for item in value:
            flat_form(item, named, parts)
    elif isinstance(value, dict):
        parts.append(tuple(value))
        for item in value.values():
            flat_form(item, named, parts)
    else:
        parts.append(value)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Rules by which the losses of micro-batches make up the loss of the whole batch.

    The batch's loss, and its gradient, is the mean over the micro-batches if in each of them
      - the results of the nodes ``sums`` (over rows) are multiplied by the number of micro-batches;
      - the class losses ``counted`` divide by the mean of all micro-batches' counts of
        targets, where each would divide by its own;
      - a value in ``totals`` (sums over rows that no parameter enters: counts of a mask) is
        replaced, for the nodes that use it, by its sum over all micro-batches.
    ``mixing`` are nodes in which rows see each other (``batch_norm``, a product of two means): with
    several micro-batches rows see rows of their micro-batch only, as in gradient accumulation, and
    nothing is ``counted``, in ``totals`` or ``means``; ``sums`` are those that the loss adds up.
    ``means`` are buffers (counts of tokens) whose new value is the mean of the values that the
    micro-batches make of the old one.
    """

    sums: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    totals: tuple[Ref, ...] = ()
    mixing: tuple[str, ...] = ()
    means: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """The captured model: its nodes in topological order and the loss that they compute.

    ``loss`` is a scalar. ``batch_size`` is the number of rows that the shapes are for.
    ``batch_dims[name][i]`` is the dimension of output ``i`` that counts the batch, or None; a graph
    without ``batch_dims`` cannot be split into micro-batches. ``tied`` maps each further name of a
    tied parameter to the name of its node. ``updates`` maps each buffer that a forward changes to
    its new value; the nodes read the old value.
    """

    nodes: tuple[Node, ...]
    loss: Ref
    batch_size: int
    batch_dims: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, Ref] = field(default_factory=dict)
    accumulation: Accumulation = field(default_factory=Accumulation)
    _at_batch: dict[int, Graph] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Map each node to the names of the nodes that read it, in order, each once."""
        users: dict[str, dict[str, None]] = {node.name: {} for node in self.nodes}
        for node in self.nodes:
            for ref in node.inputs:
                users[ref.name][node.name] = None
        return {name: tuple(found) for name, found in users.items()}

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def spec(self, ref: Ref) -> TensorSpec:
        return self.by_name[ref.name].outputs[ref.index]

    @property
    def parameters(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == "parameter")

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == "input")

    def with_batch_size(self, batch_size: int) -> Graph:
        """Return the same graph with every batch dimension scaled to ``batch_size``. Cached.

        Size arguments of ops (``view``, ``expand``) keep the captured numbers; code that runs the
        graph takes sizes from the output's shape instead.
        """
        if batch_size == self.batch_size:
            return self
        if not self.batch_dims:
            raise ValueError("this graph's batch dimension is not known: it cannot be rescaled")
        if batch_size not in self._at_batch:
            made = replace(self, nodes=self._scaled(batch_size), batch_size=batch_size)
            object.__setattr__(made, "users", self.users)
            self._at_batch.setdefault(self.batch_size, self)
            self._at_batch[batch_size] = made
            object.__setattr__(made, "_at_batch", self._at_batch)
        return self._at_batch[batch_size]

    def _scaled(self, batch_size: int) -> tuple[Node, ...]:
        """Return the nodes with outputs scaled to ``batch_size``; equal outputs are scaled once."""
        known: dict[object, tuple[TensorSpec, ...]] = {}
        by_id: dict[object, tuple[TensorSpec, ...]] = {}
        found = []
        for node in self.nodes:
            dims = self.batch_dims[node.name]
            if dims.count(None) == len(dims):
                found.append(node)
                continue
            same = (id(node.outputs), dims)
            outputs = by_id.get(same) or known.get((node.outputs, dims))
            if outputs is None:
                outputs = known[node.outputs, dims] = tuple(
                    _scaled(spec, dim, batch_size, self.batch_size)
                    for spec, dim in zip(node.outputs, dims, strict=True)
                )
            by_id[same] = outputs
            found.append(node.with_outputs(outputs))
        return tuple(found)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the model's computation, independent of dtypes and of the batch size."""
        lines = [
            [
                node.name,
                node.kind,
                node.op,
                [[ref.name, ref.index] for ref in node.inputs],
                [self._shape_without_batch(node, index) for index in range(len(node.outputs))],
            ]
            for node in self.nodes
        ]
        written = [[name, ref.name, ref.index] for name, ref in sorted(self.updates.items())]
        ends = [self.loss.name, self.loss.index, sorted(self.tied.items())]
        text = json.dumps([lines, *ends, *([written] if written else [])])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _shape_without_batch(self, node: Node, index: int) -> list[int]:
        shape = list(node.outputs[index].shape)
        dim = self.batch_dims[node.name][index] if self.batch_dims else None
        if dim is not None:
            shape[dim] = -(shape[dim] // self.batch_size)
        return shape


def _scaled(spec: TensorSpec, dim: int | None, target: int, source: int) -> TensorSpec:
    if dim is None:
        return spec
    shape = list(spec.shape)
    shape[dim] = shape[dim] * target // source
    return replace(spec, shape=tuple(shape))


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive nodes that are never divided: the unit of stages, ZeRO gathering and
    recomputation.

    ``nodes`` names its op nodes in order; ``parameters`` its parameters and buffers. Equal blocks
    have the same ``kind``, and their nodes correspond by position. A parameter that several blocks
    use is listed by the first of them only and is called shared.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """The graph divided into blocks in topological order: no block reads from a later block."""

    blocks: tuple[Block, ...]

    @cached_property
    def kinds(self) -> dict[str, Block]:
        """Map each kind to its first block (template), whose node names stand for the kind."""
        kinds: dict[str, Block] = {}
        for block in self.blocks:
            kinds.setdefault(block.kind, block)
        return kinds

    @cached_property
    def template(self) -> dict[str, str]:
        """Map each op node and parameter to its counterpart in the first block of its kind."""
        mapping: dict[str, str] = {}
        for block in self.blocks:
            first = self.kinds[block.kind]
            mapping.update(zip(block.nodes, first.nodes, strict=True))
            mapping.update(zip(block.parameters, first.parameters, strict=True))
        return mapping

    def entry(self, table: Mapping[str, T], name: str) -> T | None:
        """Return a node's entry in ``table``, by its own name or else by its template's name."""
        found = table.get(name)
        return table.get(self.template.get(name, name)) if found is None else found

    def split_kinds(self, signature: Callable[[Block], object]) -> Blocks:
        """Split kinds so that blocks with different results of ``signature`` have different kinds.

        Blocks with the signature of their kind's first block keep the kind. Each other signature
        gets a new kind: the old name followed by "@" and a number.
        """
        taken = set(self.kinds)
        names: dict[str, dict[object, str]] = {}
        found = []
        for block in self.blocks:
            known, own = names.setdefault(block.kind, {}), signature(block)
            if own not in known:
                plain = block.kind.partition("@")[0]
                free = (name for at in count(1) if (name := f"{plain}@{at}") not in taken)
                known[own] = next(free) if known else block.kind
                taken.add(known[own])
            found.append(replace(block, kind=known[own]))
        return Blocks(tuple(found))

    @cached_property
    def of_node(self) -> dict[str, int]:
        """Map each op node and parameter to the position of its block."""
        return {
            name: position
            for position, block in enumerate(self.blocks)
            for name in block.nodes + block.parameters
        }
