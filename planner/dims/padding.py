"""Padding of sequences that are shorter than planned, where it does not change the result.

In: a graph. Out: the padding of each input that leaves the loss and all gradients as they are for
the shorter sequences. This holds if

- no position depends on a later one, as sequence slices require, too (``sequence_places``), and
  nothing divides by the number of positions; then it does not matter either which of the earlier
  positions the padding sees, within its window or as a document of its own;
- the loss adds up over positions and ignores positions with certain targets; padding gets such a
  target. A mean then is over the targets that count (``Graph.accumulation``).

Numbers that the model's Python code computes from the length stay at the planned length. The
gradient of trailing positions without a target is exactly zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PlanError
from ..graph.graph import Graph, Node, Ref
from ..graph.positions import position_dims
from ..ops import axis_strategies
from ..ops.case import argument
from ..ops.catalog import has_classes, ignored_class, spec_of
from .sequence_places import MEAN, SeqDims, find_places


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of an input: it may be extended along the dimensions ``dims`` with ``value``."""

    dims: tuple[int, ...]
    value: int


def find_padding(graph: Graph) -> tuple[int, Mapping[str, Padding]]:
    """Return the sequence length that the graph has, and, by input name, how shorter inputs may be
    padded to it without changing the result.

    Raises PlanError AP560 if padding would change the result.
    """
    try:
        places = find_places(graph, in_slices=False)
    except PlanError as error:
        raise _refused(
            error.what.replace("run on slices of sequences", "be padded"), error.why, error.where
        ) from error
    if places.means:
        node = graph[next(iter(places.means))]
        raise unpaddable(node, "it divides by the number of positions")
    targets = dict(_targets(graph, places))
    dims = position_dims(graph, lambda node: axis_strategies(node, graph, 1))
    found = {}
    for node in graph.inputs:
        batch = graph.batch_dims.get(node.name)
        own = dims[Ref(node.name)] - {batch[0] if batch else None}
        along = tuple(sorted(d for d in own if node.spec.shape[d] == places.length))
        if along:
            found[node.name] = Padding(along, targets.get(node.name, 0))
    return places.length, found


def _targets(graph: Graph, places: SeqDims) -> list[tuple[str, int]]:
    """Return (input that holds a loss's targets, target value that the loss ignores) pairs."""
    found = []
    for name in sorted(places.sums):
        node = graph[name]
        packet = node.op.rpartition(".")[0]
        if has_classes(node):
            if argument(node, 3, "reduction", MEAN) != MEAN and name != graph.loss.name:
                raise unpaddable(node, "what its sum is divided by may count positions")
            ignored = ignored_class(node)
            found.append((_source(graph, places, node, ignored), ignored))
        elif packet == "aten.sum":
            raise unpaddable(node, "it adds up all positions, of which it can ignore none")
    return found


def _source(graph: Graph, places: SeqDims, loss: Node, ignored: int) -> str:
    """Return the input that holds the targets of ``loss``. Raises PlanError AP560 if padding it
    would change the loss."""
    scores = places.places[loss.inputs[0]]
    at, first = loss.inputs[1], 0
    reader = loss.name
    while graph[at.name].kind == "op":
        node = graph[at.name]
        packet, form = node.op.rpartition(".")[0], spec_of(node).form
        is_kept = form in ("same", "reshape", "pad") or packet == "aten.slice"
        if not is_kept or graph.users[at.name] != (reader,):
            raise unpaddable(node, "what its targets are made of is not known")
        if packet == "aten.slice":
            first += _first(graph, node)
        if form == "pad":
            _check_end(node, ignored, is_plain=packet == "aten.constant_pad_nd")
        at, reader = node.inputs[0], node.name
    source = graph[at.name]
    if source.kind != "input" or graph.users[at.name] != (reader,):
        raise unpaddable(
            source, "it is read as targets and as something else, so it has no padding"
        )
    if first < scores.first:
        raise unpaddable(loss, "its targets are of earlier positions than its scores")
    return at.name


def _first(graph: Graph, node: Node) -> int:
    """Return the first position that a slicing op keeps of targets; 0 if it keeps all."""
    dim, start = argument(node, 1, "dim", 0), argument(node, 2, "start", None) or 0
    shape = graph.spec(node.inputs[0]).shape
    if shape[dim] == node.spec.shape[dim]:
        return 0
    batch = graph.batch_dims.get(node.inputs[0].name)
    is_plain = argument(node, 4, "step", 1) == 1 and len(shape) == 2 and dim % 2 == 1
    if not is_plain or (batch and batch[0] == dim % 2):
        raise unpaddable(node, "which positions of its targets it takes is not known")
    return start + shape[dim] if start < 0 else start


def _check_end(node: Node, ignored: int, *, is_plain: bool) -> None:
    """Raise PlanError AP560 unless an op pads targets only at the end, with ``ignored``."""
    pads = tuple(argument(node, 1, "pad", ()))
    mode = "constant" if is_plain else argument(node, 2, "mode", "constant")
    value = argument(node, 2 if is_plain else 3, "value", 0)
    if pads[0] or any(pads[2:]) or mode != "constant" or value != ignored:
        raise unpaddable(node, "it pads targets with what counts")


def unpaddable(node: Node, why: str) -> PlanError:
    """Return error AP560 for an op that does not allow sequences shorter than planned."""
    name = f"{node.op or 'input'} of {node.module}" if node.module else node.op or node.name
    return _refused(f"{name} cannot be padded", why, node.source or node.module)


def _refused(what: str, why: str, where: str) -> PlanError:
    return PlanError(
        "AP560",
        f"sequences shorter than planned cannot be run: {what}",
        why=why,
        where=where,
        fix="feed sequences of the planned length, or plan for the shorter ones",
    )
