"""Fused kernels over matrix products: written-out attention, and scans in chunks (Mamba-2).

In: the captured graph and its blocks. Out: a ``Fused`` for each op of such a kernel.

An *expanding* product has an output with more elements than either operand (before operands are
repeated). A *contracting* product has an operand that is computed from expanded values and has more
elements than its output. Expanded values are the outputs of expanding products, and of elementwise
ops, normalizations, copies, views and reductions of them; and the outputs of ops that make more
bytes than they read (repeated heads, masks, decays, casts to a wider format), if only such kernels
read them. A kernel is a contracting product, or a product with an operand of the latter kind,
together with all ops that compute its expanded operands. If another op reads an expanded value of a
product, no kernel is formed. If both operands of a product are equally repeated (C·B of the heads
of a group in Mamba-2), each distinct value is computed once.

The kernel reads each of its inputs once, and writes the output of the last product. Its backward
reads the inputs, the output and the output's gradient, recomputes the first product, and writes the
gradients of the inputs: five products for the forward's two (Dao 2023, FlashAttention-2, section 3;
Dao & Gu 2024, Mamba-2, section 6). Constants are computed in the kernel. A kernel with a softmax is
attention, and skips the positions that constant masks hide from every row.

A kernel multiplies in the format of the values that it reads: if a model casts 16-bit values to 32
bits for exponentials and sums, tensor cores multiply in 16 bits and add in 32, as the kernels of
both sources do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..graph.graph import Block, Blocks, Fused, Graph, Node, Ref
from ..ops.case import packet
from ..ops.catalog import family_of
from ..ops.saved import product_factors
from .fusion import is_fusible, with_fused
from .mask_share import Masks

_HALF = frozenset(("bfloat16", "float16"))

_SOFTMAX = frozenset(("softmax", "_softmax"))


def with_product_kernels(graph: Graph, blocks: Blocks) -> Graph:
    """Return the graph with its memory traffic (``Fused``) on each op of a kernel that fuses matrix
    products, such as attention."""
    fixed, masks = _find_fixed(graph), Masks(graph)
    found: dict[str, Fused] = {}
    for block in blocks.blocks:
        found |= _Block(graph, block.nodes, fixed, masks).fused
    return with_fused(graph, found)


def by_masks(graph: Graph, blocks: Blocks) -> Blocks:
    """Return the blocks, with kinds split so that blocks of one kind have equal fractions of
    positions visible in attention."""

    def shares(block: Block) -> object:
        fused = (graph[name].fused for name in block.nodes)
        return tuple(each.share for each in fused if each is not None and each.is_attention)

    return blocks.split_kinds(shares)


def _find_fixed(graph: Graph) -> frozenset[str]:
    """Return the names of nodes computed from parameters, buffers and constants alone."""
    fixed: set[str] = set()
    for node in graph:
        is_leaf = node.kind in ("parameter", "buffer", "constant")
        is_made = node.kind == "op" and all(ref.name in fixed for ref in node.inputs)
        if is_leaf or is_made:
            fixed.add(node.name)
    return frozenset(fixed)


@dataclass(frozen=True)
class _Kernel:
    """A kernel that fuses matrix products. ``last``: its last product; ``expanding``: products that
    its backward recomputes, larger than their operands; ``names``: all its ops."""

    last: str
    expanding: tuple[str, ...]
    names: frozenset[str]


@dataclass(frozen=True)
class _Block:
    """Ops of one block, ``names`` in order. ``fixed``: nodes that depend on no input."""

    graph: Graph
    names: tuple[str, ...]
    fixed: frozenset[str]
    masks: Masks
    nodes: Mapping[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", {name: self.graph[name] for name in self.names})

    @property
    def fused(self) -> dict[str, Fused]:
        found: dict[str, Fused] = {}
        for kernel in self._kernels:
            for name, own in self._fused(kernel).items():
                found[name] = _join(found[name], own) if name in found else own
        return found

    def _fuses(self, name: str) -> bool:
        """Return whether a kernel that fuses matrix products may contain an op."""
        return is_fusible(self.nodes[name], "products")

    @cached_property
    def _products(self) -> dict[str, tuple[Ref, Ref]]:
        """Map each matrix product of two values that depend on inputs to its two operands."""
        found: dict[str, tuple[Ref, Ref]] = {}
        for name, node in self.nodes.items():
            if family_of(node) != "matmul" or not node.op.startswith("aten."):
                continue
            factors = product_factors(node, len(node.inputs))
            operands = [node.inputs[at] for at in factors]
            is_of_two = len(operands) == len(node.inputs) == 2 and node.rule is None
            if is_of_two and not any(ref.name in self.fixed for ref in operands):
                found[name] = operands[0], operands[1]
        return found

    def _numel(self, ref: Ref) -> int:
        return self.graph.spec(ref).numel

    def _source_numel(self, ref: Ref) -> int:
        """Return the fewest elements among a value and the values it is a view or copy of."""
        fewest = self._numel(ref)
        while ref.name in self.nodes and self._fuses(ref.name):
            node = self.nodes[ref.name]
            if len(node.inputs) != 1 or family_of(node) not in ("view", "copy"):
                break
            ref = node.inputs[0]
            fewest = min(fewest, self._numel(ref))
        return fewest

    def _times(self, name: str) -> float:
        """Return how often a product's output repeats each distinct value, if both operands repeat
        their values equally; else 1."""
        first, second = (self._numel(ref) / self._source_numel(ref) for ref in self._products[name])
        return first if first == second else 1.0

    def _is_expanding(self, name: str) -> bool:
        made = self.nodes[name].spec.numel
        return all(made > self._source_numel(ref) for ref in self._products[name])

    @cached_property
    def _ends(self) -> frozenset[str]:
        """Return the nodes whose values are read after the forward: loss and new buffer values."""
        return frozenset(ref.name for ref in (self.graph.loss, *self.graph.updates.values()))

    def _region(self, product: str) -> tuple[str, frozenset[str]] | None:
        """Return the contracting product (output smaller than an operand) that alone uses the
        result of an expanding product (output larger than both operands), and the ops between the
        two; None if another op reads a value between them."""
        between: set[str] = set()
        last: set[str] = set()
        waiting = [product]
        while waiting:
            name = waiting.pop()
            if name in self._ends:
                return None
            for user in self.graph.users[name]:
                if user in self._products and self._contracts(user, name):
                    last.add(user)
                elif user not in self.nodes or not self._fuses(user):
                    return None
                elif user not in between:
                    between.add(user)
                    waiting.append(user)
        return (last.pop(), frozenset(between)) if len(last) == 1 else None

    def _contracts(self, product: str, name: str) -> bool:
        """Return whether a product's output is smaller than its only operand made by ``name``."""
        made = self.nodes[product].spec.numel
        read = [ref for ref in self._products[product] if ref.name == name]
        return len(read) == 1 and self._numel(read[0]) > made

    @cached_property
    def _cores(self) -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
        """Map each contracting product (output smaller than an operand) to the expanding products
        that feed it, and the ops between."""
        found: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {}
        for name in self._products:
            region = self._region(name) if self._is_expanding(name) else None
            if region is not None:
                last, between = region
                first, others = found.get(last, ((), frozenset()))
                found[last] = (*first, name), others | between
        return found

    @cached_property
    def _kernels(self) -> tuple[_Kernel, ...]:
        cores = self._cores
        first = {name for expanding, _ in cores.values() for name in expanding}
        alone = [name for name in self._products if name not in first and name not in cores]
        while True:
            inside = {*cores, *first, *alone}.union(*(between for _, between in cores.values()))
            feeders = self._find_feeders(inside)
            kept = [name for name in alone if any(r.name in feeders for r in self._products[name])]
            if kept == alone:
                break
            alone = kept
        ends = {**cores, **{name: ((), frozenset[str]()) for name in alone}}
        return tuple(
            _Kernel(name, expanding, self._with_feeders({name, *expanding, *between}, feeders))
            for name, (expanding, between) in ends.items()
        )

    def _find_feeders(self, inside: set[str]) -> frozenset[str]:
        """Return the ops whose results are recomputed inside the kernels that read them.

        Only kernels (ops ``inside``) or such ops read the result. The op writes more bytes than it
        reads, or reads the result of such an op.
        """
        read_inside = set(inside)
        for name in reversed(self.names):
            users = self.graph.users[name]
            is_inside = self._fuses(name) and name not in self._ends and bool(users)
            if is_inside and read_inside.issuperset(users):
                read_inside.add(name)
        found: set[str] = set()
        for name in self.names:
            if name in read_inside and name not in inside:
                inputs = self.nodes[name].inputs
                if self._expands(name) or any(ref.name in found for ref in inputs):
                    found.add(name)
        return frozenset(found)

    def _expands(self, name: str) -> bool:
        """Return whether an op writes more bytes than it reads, not counting constants."""
        read = {
            ref: self.graph.spec(ref).num_bytes
            for ref in self.nodes[name].inputs
            if self.graph[ref.name].kind != "constant"
        }
        made = sum(spec.num_bytes for spec in self.nodes[name].outputs)
        return bool(read) and made > sum(read.values())

    def _with_feeders(self, inside: set[str], feeders: frozenset[str]) -> frozenset[str]:
        waiting = list(inside)
        while waiting:
            for ref in self.nodes[waiting.pop()].inputs:
                if ref.name in feeders and ref.name not in inside:
                    inside.add(ref.name)
                    waiting.append(ref.name)
        return frozenset(inside)

    def _fused(self, kernel: _Kernel) -> dict[str, Fused]:
        """Return the memory traffic of each op of a kernel. The last product counts the kernel."""
        names = [name for name in self.names if name in kernel.names]
        is_attention = any(packet(self.nodes[name].op) in _SOFTMAX for name in names)
        between = [name for name in names if self._fuses(name)]
        share = self.masks.seen_share(between) if is_attention else 1.0
        is_trained = self.nodes[kernel.last].spec.requires_grad
        read: set[Ref] = set()
        found: dict[str, Fused] = {}
        for name in names:
            node, is_last = self.nodes[name], name == kernel.last
            reads = []
            for at, ref in enumerate(node.inputs):
                is_inside = ref.name in kernel.names or self.graph[ref.name].kind == "constant"
                if not is_inside and ref not in read:
                    reads.append(at)
                    read.add(ref)
            wanted = [at for at in reads if self.graph.spec(node.inputs[at]).requires_grad]
            keeps_output = is_last and is_trained and bool(kernel.expanding)
            found[name] = Fused(
                reads=tuple(reads),
                writes=(0,) if is_last else (),
                reads_gradients=(0,) if is_last and is_trained else (),
                gradients=tuple(wanted) if is_trained else (),
                keeps_inputs=tuple(reads) if is_trained else (),
                keeps_outputs=(0,) if keeps_output else (),
                kernels_forward=int(is_last),
                kernels_backward=int(is_last and is_trained),
                in_product_kernel=True,
                share=share / (self._times(name) if name in kernel.expanding else 1.0),
                again=name in kernel.expanding,
                is_attention=is_attention,
                product_dtype=self._operand_dtype(name) if name in self._products else "",
            )
        return found

    def _operand_dtype(self, product: str) -> str:
        """Return the format in which a kernel multiplies: 16 bits if both operands are computed
        from 16-bit values, else the product's own format."""
        own = self.nodes[product].spec.dtype
        found = [self._half_source(ref.name, set()) for ref in self._products[product]]
        return found[0] if all(found) else own

    def _half_source(self, name: str, seen: set[str]) -> str:
        """Return the 16-bit format of a value from which ``name`` is computed, or "" without any.
        ``seen``: nodes already searched."""
        if name in seen or self.graph[name].kind in ("parameter", "constant"):
            return ""
        seen.add(name)
        dtype = self.graph[name].spec.dtype
        if dtype in _HALF:
            return dtype
        if name not in self.nodes:
            return ""
        sources = (self._half_source(ref.name, seen) for ref in self.nodes[name].inputs)
        return next(filter(None, sources), "")


def _join(first: Fused, second: Fused) -> Fused:
    """Return the traffic of an op that two kernels compute: the reads and gradients of both."""
    return replace(
        first,
        reads=first.reads + second.reads,
        gradients=first.gradients + second.gradients,
        keeps_inputs=first.keeps_inputs + second.keeps_inputs,
    )
