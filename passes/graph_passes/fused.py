"""Fused projections: a matrix product whose result is cut becomes one product per part.

A layer often multiplies once by a weight that holds several: queries, keys and values, or the gate
and the values of an MLP. Its result is cut along the output features, maybe after views that fold
them: ``q, k, v = linear(x, w).split(h, -1)``, or ``linear(x, w).view(b, s, 3, heads,
d).unbind(2)``. The features must then be split over ranks part by part, which no contiguous split
of the whole does; so each part would be gathered on every rank. So the weight is cut instead::

    w_q, w_k, w_v = split(w);  q, k, v = linear(x, w_q), linear(x, w_k), linear(x, w_v)

and heads can stay whole on their rank (Megatron-LM, https://arxiv.org/abs/1909.08053, §3). The
parameter keeps its name and shape: it is held split as any other, and its parts are views, or
exchanged between ranks if they are split otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec, map_refs
from ...planner.ops.case import Case, argument
from ...planner.ops.catalog import spec_of
from ...planner.ops.views import moved_order
from .hoist import drop_dead

PRODUCTS: Mapping[str, tuple[int, int, int | None]] = {
    "aten.linear.default": (1, 0, 2),
    "aten.addmm.default": (2, 1, 0),
    "aten.mm.default": (1, 1, None),
    "aten.matmul.default": (1, 1, None),
}
"""For each matrix product: positions of its weight argument, of the weight's dimension of output
features, and of the bias argument (None: it has none)."""


@dataclass(frozen=True, slots=True)
class SplitFused:
    """Graph pass that splits a fused projection into one matrix product per part (query, key,
    …)."""

    name: str = "split-fused"

    def __call__(self, graph: Graph) -> Graph:
        return drop_dead(split_fused(graph))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Result of an op that cuts a part out of a fused matrix product: the entries ``start`` to
    ``stop`` along dimension ``dim``. ``taken``: that dimension is removed, as by ``select`` of one
    entry."""

    result: Ref
    start: int
    stop: int
    dim: int
    taken: bool


@dataclass(frozen=True, slots=True)
class _Fused:
    """Fused projection, such as one matrix product for query, key and value. ``views`` are the
    views of its result, each with the dimension that is cut; ``cuts`` take one part each;
    ``features`` is the number of output features per entry of the cut dimension."""

    product: Node
    views: tuple[tuple[Node, int], ...]
    cuts: tuple[_Cut, ...]
    features: int

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({(cut.start, cut.stop) for cut in self.cuts}))


def split_fused(graph: Graph) -> Graph:
    """Return the graph in which each product by a fused weight becomes one product per part of the
    weight (such as query, key and value)."""
    groups = [found for node in graph if (found := _find(graph, node)) is not None]
    inserted: dict[str, list[Node]] = {}
    renamed: dict[Ref, Ref] = {}
    for group in groups:
        nodes, results = _apart(graph, group)
        inserted[group.product.name] = nodes
        renamed |= results
    if not renamed:
        return graph

    def now(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    made: list[Node] = []
    for node in graph.nodes:
        for each in (*inserted.get(node.name, ()), node):
            if any(ref in renamed for ref in each.inputs):
                args, kwargs = map_refs(each.args, now), map_refs(dict(each.kwargs), now)
                each = replace(each, args=args, kwargs=kwargs)
            made.append(each)
    return replace(graph, nodes=tuple(made), loss=now(graph.loss))


def _find(graph: Graph, product: Node) -> _Fused | None:
    """Return the fused projection that begins with the matrix product ``product``; None if its
    result is used in any other way than by cutting parts out of it."""
    if product.kind != "op" or product.op not in PRODUCTS or product.kwargs:
        return None
    at, _, _ = PRODUCTS[product.op]
    weight = product.args[at]
    if graph[weight.name].kind != "parameter" or len(graph.spec(weight).shape) != 2:
        return None
    views: list[tuple[Node, int]] = []
    node, dim = product, len(product.spec.shape) - 1
    while (cuts := _cuts(graph, node, dim)) is None:
        users = graph.users[node.name]
        follower = graph[users[0]] if len(users) == 1 else None
        moved = None if follower is None else _moved(follower, node.spec, dim)
        if follower is None or moved is None:
            return None
        views.append((follower, moved))
        node, dim = follower, moved
    features = product.spec.shape[-1] // node.spec.shape[dim]
    found = _Fused(product, tuple(views), cuts, features)
    apart = all(one[1] <= other[0] for one, other in pairwise(found.ranges))
    return found if apart and len(found.ranges) > 1 else None


def _cuts(graph: Graph, node: Node, dim: int) -> tuple[_Cut, ...] | None:
    """Return the parts that the users of a node's result cut out of it along ``dim``; None if a
    user is not an op that cuts."""
    found: list[_Cut] = []
    for name in graph.users[node.name]:
        user = graph[name]
        own = _cuts_of(user, node.spec, dim)
        if not own:
            return None
        found += own
    return tuple(found) or None


def _cuts_of(user: Node, spec: TensorSpec, dim: int) -> list[_Cut]:
    """Return the parts of its input, of shape ``spec``, that ``user`` cuts out along ``dim``; empty
    if it is not an op that cuts."""
    kind, size, rank = spec_of(user), spec.shape[dim], len(spec.shape)
    if kind.form not in ("cut", "parts", "take"):
        return []
    if argument(user, 2 if kind.form == "parts" else 1, "dim", 0) % rank != dim:
        return []
    if kind.form == "take":
        first = 0 if kind.name == "unbind" else argument(user, 2, "index", 0) % size
        return [
            _Cut(Ref(user.name, at), first + at, first + at + 1, dim, True)
            for at in range(len(user.outputs))
        ]
    if kind.form == "parts":
        start, cuts = 0, []
        for at, output in enumerate(user.outputs):
            stop = start + output.shape[dim]
            cuts.append(_Cut(Ref(user.name, at), start, stop, dim, False))
            start = stop
        return cuts
    if kind.name == "slice" and argument(user, 4, "step", 1) != 1:
        return []
    start = argument(user, 2, "start", 0) or 0
    start = min(start + size if start < 0 else start, size)
    length = user.spec.shape[dim]
    return [_Cut(Ref(user.name), start, start + length, dim, False)]


def _moved(view: Node, spec: TensorSpec, dim: int) -> int | None:
    """Return the dimension of the view's result that corresponds to dimension ``dim`` of its input;
    None if the view mixes entries of different parts."""
    rank, form = len(spec.shape), spec_of(view).form
    if form == "same" and view.spec == spec:
        return dim
    if form == "move":
        order = moved_order(Case(view, (spec,), view.outputs))
        return None if order is None else order.index(dim)
    if view.op == "aten.unsqueeze.default":
        added: int = argument(view, 1, "dim", 0) % (rank + 1)
        return dim + (added <= dim)
    if view.op == "aten.squeeze.dim":
        removed: int = argument(view, 1, "dim", 0) % rank
        if removed == dim or spec.shape[removed] != 1:
            return None
        return dim - (removed < dim)
    if form == "reshape" and dim == rank - 1:
        return _folded(spec.shape, view.spec.shape)
    return None


def _folded(source: Sequence[int], target: Sequence[int]) -> int | None:
    """Return the outermost dimension of shape ``target`` into which a reshape turns the last
    dimension of shape ``source``; None if it is joined with others.

    >>> _folded((2, 8, 12), (2, 8, 3, 4)), _folded((16, 12), (2, 8, 12)), _folded((8, 6), (48,))
    (2, 2, None)
    """
    for dim, size in enumerate(target):
        if size > 1 and prod(target[:dim]) == prod(source[:-1]):
            return dim
    return None


def _apart(graph: Graph, group: _Fused) -> tuple[list[Node], dict[Ref, Ref]]:
    """Return nodes that compute each part of a fused projection by its own product, and a map from
    each cut's result to its new value."""
    product = group.product
    at, out, bias_at = PRODUCTS[product.op]
    total = product.spec.shape[-1] // group.features
    sections = [0, *(end for each in group.ranges for end in each), total]
    bounds = sorted(set(sections))
    sizes = [(b - a) * group.features for a, b in pairwise(bounds)]
    nodes = [_split(graph, product, product.args[at], sizes, out)]
    has_bias = bias_at is not None and bias_at < len(product.args)
    bias = product.args[bias_at] if has_bias and bias_at is not None else None
    if isinstance(bias, Ref):
        if len(graph.spec(bias).shape) != 1 or graph[bias.name].kind != "parameter":
            return [], {}
        nodes.append(_split(graph, product, bias, sizes, 0))
    results: dict[Ref, Ref] = {}
    for start, stop in group.ranges:
        index = bounds.index(start)
        args = list(product.args)
        args[at] = Ref(nodes[0].name, index)
        if isinstance(bias, Ref) and bias_at is not None:
            args[bias_at] = Ref(nodes[1].name, index)
        part = _part(product, len(product.spec.shape) - 1, sizes[index], start, args=tuple(args))
        nodes.append(part)
        for view, dim in group.views:
            size = view.spec.shape[dim] * (stop - start) // total
            part = _view(view, dim, size, start, source=Ref(part.name))
            nodes.append(part)
        for cut in group.cuts:
            if (cut.start, cut.stop) == (start, stop):
                results[cut.result] = Ref(part.name)
                if cut.taken:
                    taken = _taken(graph[cut.result.name], cut, part)
                    nodes.append(taken)
                    results[cut.result] = Ref(taken.name)
    return nodes, results


def _split(graph: Graph, product: Node, ref: Ref, sizes: list[int], dim: int) -> Node:
    """Return a node that splits the parameter ``ref`` along ``dim`` into parts of ``sizes``."""
    spec = graph.spec(ref)
    outputs = tuple(replace(spec, shape=_resized(spec.shape, dim, size)) for size in sizes)
    return replace(
        product,
        name=f"{product.name}_split_{ref.name.rpartition('.')[2]}",
        op="aten.split_with_sizes.default",
        args=(ref, sizes, dim),
        kwargs={},
        outputs=outputs,
    )


def _part(node: Node, dim: int, size: int, start: int, *, args: tuple[Any, ...]) -> Node:
    """Return ``node`` changed to compute only ``size`` entries of its result along ``dim``, from
    arguments ``args``. ``start`` becomes part of its name."""
    shape = _resized(node.spec.shape, dim, size)
    outputs = (replace(node.spec, shape=shape),)
    return replace(node, name=f"{node.name}_from_{start}", args=args, outputs=outputs)


def _view(view: Node, dim: int, size: int, start: int, *, source: Ref) -> Node:
    """Return the view changed to apply to one part (``source``), of ``size`` along ``dim``, instead
    of the whole product."""
    made = _part(view, dim, size, start, args=(source, *view.args[1:]))
    if spec_of(view).form == "reshape" and "squeeze" not in view.op:
        shape = list(made.spec.shape)
        return replace(made, op="aten.reshape.default", args=(source, shape), kwargs={})
    return made


def _taken(cut_node: Node, cut: _Cut, part: Node) -> Node:
    shape = part.spec.shape[: cut.dim] + part.spec.shape[cut.dim + 1 :]
    return replace(
        part,
        name=f"{cut_node.name}_of_{cut.start}",
        op="aten.select.int",
        args=(Ref(part.name), cut.dim, 0),
        kwargs={},
        outputs=(replace(part.spec, shape=shape),),
        module=cut_node.module,
        source=cut_node.source,
    )


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
