"""Positions of the sequence in each value, for training on slices of sequences (TeraPipe).

In: a graph. Out: for each value computed by position, the dimension that counts positions; the
inputs of ops that must be cut; the results that are sums over positions. An op may run on a slice
if one of its strategies splits its values along positions without communication: then it computes
each position independently. Only causal attention may read earlier positions (Li et al. 2021,
TeraPipe, arXiv:2102.07988, section 3.2), also written out as separate ops; a loss may add up
positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from ..errors import PlanError
from ..graph.graph import Graph, Node, Ref
from ..graph.layout import AxisStrategy, shard
from ..graph.positions import Dims, position_dims
from ..ops import axis_strategies
from ..ops.attention import is_attention
from ..ops.attention_limits import is_packed, window_of
from ..ops.case import argument, packet
from ..ops.catalog import has_classes, is_pointwise, spec_of

_NONE, MEAN = 0, 1


@dataclass(frozen=True, slots=True)
class SeqDim:
    """Dimension of a value that contains sequence positions: ``count`` of them, from position
    ``first``.

    A dimension that a reshape has merged has ``outer`` runs of all these positions, with ``inner``
    entries for each position.

    >>> SeqDim(1, first=0, count=8).rows(4, 8), SeqDim(1, first=1, count=7).rows(4, 8)
    ((4, 8), (3, 7))
    """

    dim: int
    outer: int = 1
    inner: int = 1
    first: int = 0
    count: int = 0

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return (first, stop): the value's indices of the positions ``start`` to ``stop``."""
        low, high = (min(max(at - self.first, 0), self.count) for at in (start, stop))
        return low, high

    def shape(self, whole: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
        """Return the shape of a value of shape ``whole`` cut to positions ``start`` to ``stop``."""
        low, high = self.rows(start, stop)
        size = self.outer * (high - low) * self.inner
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])


@dataclass(slots=True)
class SeqDims:
    """Sequence positions in the values of a graph; sequences have ``length`` positions.

    ``in_slices``: false if a sequence is only cut off at its end. ``places``: values that are
    computed slice by slice. ``cut``: inputs, by node and argument position, that are computed whole
    and cut to the slice. ``sums``: ops whose results add up over slices; ``means``: of these, the
    ops that divide by their rows. ``attention``: fused causal attention ops. ``written``:
    attentions of several ops, by each of their nodes.
    """

    length: int = 0
    in_slices: bool = True
    places: dict[Ref, SeqDim] = field(default_factory=dict)
    cut: dict[tuple[str, int], SeqDim] = field(default_factory=dict)
    sums: set[str] = field(default_factory=set)
    means: dict[str, SeqDim] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    written: dict[str, WrittenAttention] = field(default_factory=dict)


def find_places(graph: Graph, *, in_slices: bool = True) -> SeqDims:
    """Find the sequence positions in all values of a graph. Raises PlanError AP548 if computing the
    sequence in slices would change the result. Without ``in_slices`` it is only cut off at the end,
    which attention allows with windows and packed documents, too."""
    found = SeqDims(in_slices=in_slices)
    if graph.updates:
        raise _mixes(graph[next(iter(graph.updates.values())).name], "it changes a buffer")
    for each in find_written(graph):
        found.written.update(dict.fromkeys((*each.columns, each.product), each))
    dims = position_dims(graph, lambda node: axis_strategies(node, graph, 1))
    for node in graph:
        if node.kind == "op":
            _follow(found, graph, node, dims)
    if graph.loss.name not in found.sums:
        raise _mixes(graph[graph.loss.name], "the loss is no sum over positions")
    return found


def _follow(found: SeqDims, graph: Graph, node: Node, dims: Dims) -> None:
    """Record, in ``found``, the positions in a node's outputs, or that its result is a sum over
    positions."""
    refs = node.inputs
    places = {i: found.places[ref] for i, ref in enumerate(refs) if ref in found.places}
    if any(ref.name in found.sums for ref in refs):
        _follow_sum(found, graph, node, places)
        return
    if not places:
        start = _entry(found, graph, node, dims)
        if start is None:
            return
        places = {start[0]: start[1]}
        found.cut[node.name, start[0]] = start[1]
    packet, spec = node.op.rpartition(".")[0], spec_of(node)
    written = found.written.get(node.name)
    if written is not None and node.name in (written.scores, written.masked, written.product):
        _follow_written(found, graph, node, places)
    elif spec.is_counted:
        _follow_counted(found, graph, node, places)
    elif is_attention(node):
        _follow_attention(found, graph, node, places)
    elif spec.form == "reshape" and len(refs) == 1:
        found.places[Ref(node.name)] = _viewed(graph, node, places[0])
    elif packet == "aten.cat" and _is_alone(graph, node, places):
        found.places[Ref(node.name)] = next(iter(places.values()))
    elif packet == "aten.slice" and argument(node, 1, "dim", 0) == places[0].dim:
        found.places[Ref(node.name)] = _sliced(graph, node, places[0])
    elif has_classes(node) and argument(node, 3, "reduction", MEAN) != _NONE:
        _follow_loss(found, graph, node, places)
    else:
        _follow_strategy(found, graph, node, places)


def _is_alone(graph: Graph, node: Node, places: Mapping[int, SeqDim]) -> bool:
    """Return whether a concatenation has a single input that is not empty (an unused cache is)."""
    empty = sum(graph.spec(ref).numel == 0 for ref in node.inputs)
    return len(places) == 1 and empty == len(node.inputs) - 1


def _entry(found: SeqDims, graph: Graph, node: Node, dims: Dims) -> tuple[int, SeqDim] | None:
    """Return (index, positions) of the input that brings positions to a trained op, or None."""
    if not any(spec.requires_grad for spec in node.outputs):
        return None
    for index, ref in enumerate(node.inputs):
        batch = graph.batch_dims.get(ref.name)
        sizes = graph.spec(ref).shape
        own = dims.get(ref, frozenset()) - {batch[ref.index] if batch else None}
        own = frozenset(dim for dim in own if sizes[dim] > 1) or own  # one row is a whole batch
        if not own:
            continue
        if len(own) > 1:
            raise _mixes(node, "which of its dimensions counts positions is not known")
        (dim,) = own
        size = sizes[dim]
        if found.length not in (0, size):
            raise _mixes(node, f"it has {size} positions, others {found.length}")
        found.length = size
        return index, SeqDim(dim, count=size)
    return None


def _follow_sum(found: SeqDims, graph: Graph, node: Node, places: Mapping[int, SeqDim]) -> None:
    """Record that an op on sums over positions makes such a sum. Raises PlanError AP548 if it is
    not linear in them."""
    for strategy in () if places else axis_strategies(node, graph, 1):
        held = zip(node.inputs, strategy.inputs, strict=True)
        fits = all((placement.kind == "P") == (ref.name in found.sums) for ref, placement in held)
        if fits and all(made.kind == "P" for made in strategy.outputs):
            found.sums.add(node.name)
            return
    raise _mixes(node, "it is not linear in a sum over positions")


def _follow_attention(
    found: SeqDims, graph: Graph, node: Node, places: Mapping[int, SeqDim]
) -> None:
    if argument(node, 3, "attn_mask", None) is not None or not argument(
        node, 5, "is_causal", False
    ):
        raise _mixes(node, "its attention is not causal: positions see later ones")
    if found.in_slices and (window_of(node) or is_packed(node)):
        raise _mixes(node, "its attention has a window or packed documents")
    if is_packed(node) and not _looks_back(graph, node.inputs[3], found.length):
        raise _mixes(node, "its documents may depend on later positions")
    if argument(node, 4, "dropout_p", 0.0):
        raise _mixes(node, "its random numbers are not counted")
    dim = len(node.spec.shape) - 2
    whole = SeqDim(dim, count=found.length)
    if any(places.get(index) != whole for index in range(3)):
        raise _mixes(node, "its queries, keys and values are not along the same positions")
    found.attention.append(node.name)
    found.places[Ref(node.name)] = whole


def _looks_back(graph: Graph, ref: Ref, length: int) -> bool:
    """Return whether integers along ``length`` positions, the last dimension, are known to depend
    on no later position of the inputs: they are inputs, or computed entry by entry or as running
    sums or differences."""
    node, shape = graph[ref.name], graph.spec(ref).shape
    name, form, last = packet(node.op), spec_of(node).form, len(shape) - 1
    if name == "slice":
        is_known = not argument(node, 2, "start", None)
    elif name == "cumsum" or name == "diff":
        dim = argument(node, 1 + (name == "diff"), "dim", -1)
        is_known = dim in (-1, last) and shape[last] == length
        is_known = is_known and argument(node, 4, "append") is None
        is_known = is_known and graph.spec(node.inputs[0]).shape == shape
    else:
        is_known = node.kind != "op" or is_pointwise(name) or form == "reshape" or form == "expand"
    return is_known and all(_looks_back(graph, each, length) for each in node.inputs)


def _follow_written(found: SeqDims, graph: Graph, node: Node, places: Mapping[int, SeqDim]) -> None:
    """Record the positions in the output of an op of attention that is written in separate ops; its
    last two dimensions are query and key positions. Raises PlanError AP548 if inputs have
    others."""
    written = found.written[node.name]
    rows = len(node.spec.shape) - 2
    whole = SeqDim(rows, count=found.length)
    if node.name == written.masked:
        mask = graph.spec(node.inputs[1]).shape
        wanted, given = {0: whole}, {i: p for i, p in places.items() if i == 0}
        if 1 in places or mask != (found.length, found.length):
            raise _mixes(node, "its mask is not of all pairs of positions")
        found.cut[node.name, 1] = SeqDim(0, count=found.length)
    else:
        columns = rows + (node.name == written.scores)
        wanted, given = {0: whole, 1: SeqDim(columns, count=found.length)}, dict(places)
    if given != wanted:
        raise _mixes(node, "its queries, keys and values are not along the same positions")
    found.places[Ref(node.name)] = whole


def _follow_counted(found: SeqDims, graph: Graph, node: Node, places: Mapping[int, SeqDim]) -> None:
    """Record the positions in a random op's output. Raises PlanError AP548 if one dimension has
    both positions and rows."""
    _follow_strategy(found, graph, node, places)
    place = found.places[Ref(node.name)]
    if place.outer != 1 or place.dim in graph.batch_dims.get(node.name, ()):
        raise _mixes(node, "its random numbers are of rows and positions in one dimension")


def _viewed(graph: Graph, node: Node, place: SeqDim) -> SeqDim:
    """Return the positions in a view's output, given its input's; elements keep their order in
    memory.

    Raises PlanError AP548 if a new dimension cuts through positions.
    """
    shape, made = graph.spec(node.inputs[0]).shape, node.spec.shape
    before = prod(shape[: place.dim]) * place.outer
    after = place.inner * prod(shape[place.dim + 1 :])
    for dim in range(len(made)):
        outer, outer_rest = divmod(before, max(prod(made[:dim]), 1))
        inner, inner_rest = divmod(after, max(prod(made[dim + 1 :]), 1))
        is_whole = outer and inner and not outer_rest and not inner_rest
        if is_whole and made[dim] == outer * place.count * inner:
            return replace(place, dim=dim, outer=outer, inner=inner)
    raise _mixes(node, "its dimensions cut through positions")


def _sliced(graph: Graph, node: Node, place: SeqDim) -> SeqDim:
    """Return the positions that a slicing op keeps. Raises PlanError AP548 if not consecutive."""
    if (place.outer, place.inner) != (1, 1) or argument(node, 4, "step", 1) != 1:
        raise _mixes(node, "it takes positions that are not consecutive")
    size = graph.spec(node.inputs[0]).shape[place.dim]
    start = argument(node, 2, "start", None) or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    return replace(place, first=place.first + start, count=node.spec.shape[place.dim])


def _follow_loss(found: SeqDims, graph: Graph, node: Node, places: Mapping[int, SeqDim]) -> None:
    """Record that a loss over classes is a sum over positions. Raises PlanError AP548 if its mean
    is not over rows that are counted (``Graph.accumulation``)."""
    classes = min(1, len(graph.spec(node.inputs[0]).shape) - 1)
    place = places.get(0)
    if place is None or place.dim == classes:
        raise _mixes(node, "its scores are not along positions")
    is_mean = argument(node, 3, "reduction", MEAN) == MEAN
    targets = graph.spec(node.inputs[1])
    if (is_mean and node.name not in graph.accumulation.counted) or targets.dtype[0] in "fb":
        raise _mixes(node, "its rows are not counted")
    wanted = replace(place, dim=place.dim - (place.dim > classes))
    _bring(found, graph, node, 1, wanted)
    found.sums.add(node.name)


def _follow_strategy(
    found: SeqDims, graph: Graph, node: Node, places: Mapping[int, SeqDim]
) -> None:
    for strategy in axis_strategies(node, graph, 1):
        if _fits(strategy, places):
            break
    else:
        raise _mixes(node, "what it computes for a position depends on others")
    place = next(iter(places.values()))
    for index, placement in enumerate(strategy.inputs):
        if placement.is_shard:
            _bring(found, graph, node, index, replace(place, dim=placement.dim))
    if strategy.outputs[0].kind == "P":
        _add_sum(found, node, place)
        return
    for index, made in enumerate(strategy.outputs):
        own = replace(place, dim=made.dim)
        if node.outputs[index].shape[made.dim] != place.outer * place.count * place.inner:
            raise _mixes(node, "it makes another number of positions")
        found.places[Ref(node.name, index)] = own


def _fits(strategy: AxisStrategy, places: Mapping[int, SeqDim]) -> bool:
    """Return whether a strategy splits inputs along just these positions, without communication."""
    outputs = strategy.outputs
    return (
        not strategy.collectives
        and all(strategy.inputs[index] == shard(place.dim) for index, place in places.items())
        and all(placement.kind != "P" for placement in strategy.inputs)
        and (all(o.is_shard for o in outputs) or all(o.kind == "P" for o in outputs))
    )


def _add_sum(found: SeqDims, node: Node, place: SeqDim) -> None:
    packet = node.op.rpartition(".")[0]
    if packet == "aten.mean":
        found.means[node.name] = place
    elif packet != "aten.sum":
        raise _mixes(node, "its rows are not counted")
    found.sums.add(node.name)


def _bring(found: SeqDims, graph: Graph, node: Node, index: int, wanted: SeqDim) -> None:
    """Check that input ``index`` has the positions ``wanted``; if it is computed whole, mark it to
    be cut. Raises PlanError AP548."""
    ref = node.inputs[index]
    if found.places.get(ref, wanted) != wanted:
        raise _mixes(node, "it meets values of different positions")
    if graph.spec(ref).shape[wanted.dim] != wanted.outer * wanted.count * wanted.inner:
        raise _mixes(node, "it meets another number of positions")
    if ref not in found.places:
        found.cut[node.name, index] = wanted


def _mixes(node: Node, why: str) -> PlanError:
    return PlanError(
        "AP548",
        f"{node.op or node.name} of {node.module or node.name} cannot run on slices of sequences",
        why=why,
        where=node.source or node.module,
        fix="a schedule without sequence slices, such as 1f1b",
    )


DROPOUT = "autoparallel.counter_dropout.default"


@dataclass(frozen=True, slots=True)
class WrittenAttention:
    """Names of the nodes of an attention that is written in separate ops: transposed keys, scores,
    masked scores, softmax, dropout, product with values. ``columns``: nodes with a dimension of key
    positions."""

    keys: str
    scores: str
    masked: str
    softmax: str
    dropped: str
    product: str

    @property
    def columns(self) -> tuple[str, ...]:
        return self.keys, self.scores, self.masked, self.softmax, self.dropped


def find_written(graph: Graph) -> tuple[WrittenAttention, ...]:
    """Return the causal attentions of a graph that are written out in separate ops."""
    return tuple(_written(graph))


def _written(graph: Graph) -> Iterator[WrittenAttention]:
    for node in graph:
        if node.op != "aten.masked_fill.Scalar" or argument(node, 2, "value", 0) != -math.inf:
            continue
        scores = graph[node.inputs[0].name]
        if scores.op != "aten.matmul.default" or not _is_causal(graph, node.inputs[1]):
            continue
        keys = graph[scores.inputs[1].name]
        softmax = _only_user(graph, node, "aten.softmax.int")
        dropped = softmax and _only_user(graph, softmax, DROPOUT)
        product = dropped and _only_user(graph, dropped, "aten.matmul.default")
        if softmax is None or dropped is None or product is None:
            continue
        is_last = argument(softmax, 1, "dim", 0) in (-1, len(softmax.spec.shape) - 1)
        is_read_alone = all(len(graph.users[each.name]) == 1 for each in (keys, scores))
        is_first = product.inputs[0].name == dropped.name
        if is_last and is_read_alone and is_first and _swaps_last(graph, keys):
            yield WrittenAttention(
                keys.name, scores.name, node.name, softmax.name, dropped.name, product.name
            )


def _only_user(graph: Graph, node: Node, op: str) -> Node | None:
    """Return the only node that reads ``node``, if its op is ``op``; else None."""
    users = graph.users[node.name]
    return graph[users[0]] if len(users) == 1 and graph[users[0]].op == op else None


def _swaps_last(graph: Graph, node: Node) -> bool:
    """Return whether a node swaps the last two dimensions of its input."""
    if node.op != "aten.transpose.int":
        return False
    count = len(node.spec.shape)
    dims = {argument(node, at, f"dim{at - 1}", 0) % count for at in (1, 2)}
    return dims == {count - 2, count - 1}


def _is_causal(graph: Graph, mask: Ref) -> bool:
    """Return whether a mask marks the entries above a square's diagonal (later positions)."""
    flipped = graph[mask.name]
    if flipped.op != "aten.logical_not.default":
        return False
    lower = graph[flipped.inputs[0].name]
    if lower.op != "aten.tril.default" or argument(lower, 1, "diagonal", 0) != 0:
        return False
    rows, *columns = lower.spec.shape
    return graph[lower.inputs[0].name].op == "aten.ones.default" and columns == [rows]
