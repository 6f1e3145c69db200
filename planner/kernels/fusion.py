"""Prediction of the ops that a compiler fuses into one kernel, and of their memory traffic.

In: the captured graph and its blocks. Out: the same graph, in which each op of a fused group has a
``Fused``: the inputs, outputs and gradients of it that pass through memory. Prices and memory of
compiled blocks are computed from it.

A group is a connected set of elementwise ops, normalizations, reductions, copies and views of one
block. No other op (a matrix product, attention, a gather, a custom op) lies between two of its
members: they have the same ``depth``, the largest number of other ops on a path that leads to a
node. TorchInductor's scheduler makes one kernel of such a group (Ansel et al. 2024, "PyTorch 2",
ASPLOS, section 4). The kernel reads each input of the group once and writes only values that are
read outside the group; other values stay in registers. The backward of a group is one kernel as
well, plus a second kernel if parameters get gradients, which are sums over rows.

The values that a group keeps for its backward follow the min-cut partitioner (same source, section
3.3): a value that a gradient reads is kept, or recomputed from the inputs of the group, whichever
adds fewer bytes. Reductions are never recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ..graph.graph import Blocks, Fused, Graph, Node, Ref
from ..ops.case import packet
from ..ops.catalog import family_of, spec_of
from ..ops.saved import saved
from ..ops.work import FAMILIES_FUSED


def with_fusion(graph: Graph, blocks: Blocks) -> Graph:
    """Return the graph with its memory traffic (``Fused``) on each op that a compiler fuses with
    others into one kernel."""
    found: dict[str, Fused] = {}
    for block in blocks.blocks:
        for group in _groups(graph, block.nodes):
            found |= group.fused
    return with_fused(graph, found)


def with_fused(graph: Graph, found: Mapping[str, Fused]) -> Graph:
    """Return the graph with the entries of ``found`` set as ``fused`` of the nodes they name."""
    nodes = tuple(
        replace(node, fused=found[node.name]) if node.name in found else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def is_fusible(node: Node, kernels: Literal["groups", "products"] = "groups") -> bool:
    """Return whether a compiler generates the kernel of an op itself, so that it can be fused with
    other such ops or with matrix products.

    >>> [is_fusible(Node("n", "op", f"aten.{op}")) for op in ("mul.Tensor", "linear.default")]
    [True, False]
    """
    return (
        node.kind == "op"
        and node.op.startswith("aten.")
        and node.rule is None
        and node.fused is None
        and spec_of(node).fusion in ("any", kernels)
        and spec_of(node).family in FAMILIES_FUSED
    )


def _groups(graph: Graph, names: tuple[str, ...]) -> Iterator[_Group]:
    """Yield the groups of a block's ops that a compiler fuses, except groups of views only."""
    depth: dict[str, int] = {}
    member: dict[str, list[str]] = {}
    for name in names:
        node = graph[name]
        own = max((depth.get(ref.name, 0) for ref in node.inputs), default=0)
        if not is_fusible(node):
            depth[name] = own + 1
            continue
        depth[name] = own
        group = [name]
        for ref in node.inputs:
            other = member.get(ref.name)
            if other is not None and depth[ref.name] == own and other is not group:
                other += group
                group = other
        for each in group:
            member[each] = group
    order = {name: at for at, name in enumerate(names)}
    for group in {id(each): each for each in member.values()}.values():
        found = _Group(graph, tuple(sorted(group, key=order.__getitem__)), names)
        if found.kernels:
            yield found


@dataclass(frozen=True)
class _Group:
    """Ops that a compiler fuses into one kernel: ``names`` in order. ``block`` names all nodes of
    their block."""

    graph: Graph
    names: tuple[str, ...]
    block: tuple[str, ...]
    nodes: Mapping[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", {name: self.graph[name] for name in self.names})

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if not self._is_view(name))

    def _is_view(self, name: str) -> bool:
        return family_of(self.graph[name]) == "view"

    def root(self, ref: Ref) -> Ref:
        """Return the base tensor of a value, followed back through views inside the group."""
        return self._bases(ref)[-1]

    def _bases(self, ref: Ref) -> list[Ref]:
        """Return a value and, in order, the tensors in the group that it is a view of."""
        found = [ref]
        while found[-1].name in self.nodes and self._is_view(found[-1].name):
            found.append(self.nodes[found[-1].name].inputs[0])
        return found

    @cached_property
    def _reads(self) -> dict[tuple[str, int], Ref]:
        """Map each input, (op, position), by which the group reads memory to the base tensor read.

        Each value is read once; a view of a value that is read as a whole is not read again.
        """
        parts: dict[Ref, dict[Ref, tuple[str, int]]] = {}
        for name in self.kernels:
            for position, ref in enumerate(self.nodes[name].inputs):
                root = self.root(ref)
                if root.name not in self.nodes:
                    parts.setdefault(root, {}).setdefault(ref, (name, position))
        return {
            at: root
            for root, places in parts.items()
            for ref, at in places.items()
            if places.keys().isdisjoint(self._bases(ref)[1:])
        }

    @cached_property
    def _outside(self) -> frozenset[Ref]:
        """Return the group's values that ops outside it read, directly or through views."""
        found = {self.root(self.graph.loss)}
        found.update(map(self.root, self.graph.updates.values()))
        for name, node in self.nodes.items():
            for user in self.graph.users[name]:
                if user not in self.nodes:
                    found.update(
                        self.root(ref) for ref in self.graph[user].inputs if ref.name == node.name
                    )
        return frozenset(ref for ref in found if ref.name in self.nodes)

    @cached_property
    def _kept(self) -> frozenset[Ref]:
        """Return the values kept for the group's backward; they may be inputs to recompute from."""
        wanted: dict[Ref, None] = {}
        for name in self.kernels:
            node = self.nodes[name]
            wanted |= dict.fromkeys(map(self.root, saved(node, self.graph)))
            if packet(node.op) == "cross_entropy_loss" and node.spec.requires_grad:
                wanted[self.root(node.inputs[0])] = None  # in place of its log-probabilities
        kept = {ref for ref in wanted if ref.name not in self.nodes}
        for ref in sorted(wanted.keys() - kept, key=lambda ref: self.names.index(ref.name)):
            sources = self._sources(ref)
            added = sum(self._bytes(each) for each in sources - kept)
            kept |= sources if added <= self._bytes(ref) else {ref}
        return frozenset(kept)

    def _bytes(self, ref: Ref) -> int:
        """Return the bytes that keeping a value for the backward adds: 0 if it is kept anyway."""
        node = self.graph[ref.name]
        if node.kind in ("parameter", "constant", "buffer"):
            return 0
        spec = self.graph.spec(ref)
        if ref.name in self.nodes and ref in self._outside and self._is_kept_outside(ref):
            return 0
        return spec.num_bytes

    def _is_kept_outside(self, ref: Ref) -> bool:
        return any(
            any(self.root(each) == ref for each in saved(self.graph[user], self.graph))
            for name in self.names
            for user in self.graph.users[name]
            if user not in self.nodes
        )

    def _sources(self, ref: Ref) -> set[Ref]:
        """Return the values to keep so that the group's backward can recompute ``ref``."""
        found: set[Ref] = set()
        waiting = [ref]
        while waiting:
            each = self.root(waiting.pop())
            is_sum = each != ref and each.name in self.nodes and _is_sum(self.nodes[each.name])
            if each.name not in self.nodes or is_sum:
                found.add(each)
            elif _is_sum(self.nodes[each.name]):
                return {ref}
            else:
                waiting += self.nodes[each.name].inputs
        return found

    def _forks(self, root: Ref) -> bool:
        """Return whether ops after the group also read ``root``.

        If so, the group's backward adds to the gradient that the backward of these ops has written.
        """
        return any(
            user not in self.nodes and self._order.get(user, -1) > self._order[self.names[0]]
            for user in self.graph.users[root.name]
        )

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.block)}

    def _passes_on(self, name: str) -> bool:
        """Return whether an op is an addition that passes its gradient to its inputs unchanged."""
        node = self.nodes[name]
        shapes = {self.graph.spec(ref).shape for ref in node.inputs}
        inside = [user for user in self.graph.users[name] if user in self.nodes]
        inside += [ref.name for ref in node.inputs if self.root(ref).name in self.nodes]
        return packet(node.op) == "add" and len(node.inputs) > 1 and len(shapes) == 1 and not inside

    @cached_property
    def fused(self) -> dict[str, Fused]:
        """Map each op to its memory traffic. The last op that is not a view counts the kernels."""
        trained = any(
            self.graph[root.name].kind == "parameter" and self.graph.spec(root).requires_grad
            for root in self._reads.values()
        )
        found: dict[str, Fused] = {}
        for name, node in self.nodes.items():
            wants = any(spec.requires_grad for spec in node.outputs)
            own = [Ref(name, index) for index in range(len(node.outputs))]
            reads = tuple(at for at in range(len(node.inputs)) if (name, at) in self._reads)
            is_free = self._passes_on(name)
            is_last = name == self.kernels[-1]
            found[name] = Fused(
                reads=reads,
                writes=tuple(r.index for r in own if r in self._outside or r in self._kept),
                reads_gradients=tuple(
                    r.index
                    for r in own
                    if r in self._outside and self.graph.spec(r).requires_grad and not is_free
                ),
                gradients=() if is_free or not wants else tuple(self._gradients(name, reads)),
                keeps_inputs=tuple(at for at in reads if self._reads[name, at] in self._kept),
                keeps_outputs=tuple(r.index for r in own if r in self._kept),
                kernels_forward=int(is_last),
                kernels_backward=(1 + trained) * is_last * wants * (not is_free),
            )
        return found

    def _gradients(self, name: str, reads: Iterable[int]) -> Iterator[int]:
        """Yield the positions of inputs whose gradient the fused backward writes. A position occurs
        twice if its gradient is added to a gradient written before.

        All inputs of an addition have the same gradient, which is written only once.
        """
        node, is_written = self.nodes[name], False
        for at in reads:
            root = self._reads[name, at]
            if not self.graph.spec(node.inputs[at]).requires_grad:
                continue
            if packet(node.op) != "add" or not is_written:
                yield at
            is_written = True
            if self.graph[root.name].kind == "op" and self._forks(root):
                yield at


def _is_sum(node: Node) -> bool:
    return family_of(node) == "reduction"
