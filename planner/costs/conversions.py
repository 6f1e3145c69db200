"""Conversions between two lists of layouts, computed together as arrays.

In: a tensor's spec, two lists of layouts, prices. Out: seconds of forward and backward from each
layout of the first to each of the second, equal to ``Prices.conversion`` of every pair.

The collectives of a conversion depend on the two layouts alone, so they are derived once per pair
of layouts, for all tensors and all meshes with the same number of axes. A price is queried once per
tensor, kind of collective, axis and set of other axes that split the tensor meanwhile.

The last functions restrict an op's strategies to splits of the batch, positions or parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..graph.graph import Graph, Node, TensorSpec
from ..graph.layout import (
    AxisStrategy,
    Layout,
    Mesh,
    Placement,
    Region,
    conversion_steps,
    divides,
    format_layout,
    held_layout,
    intersect,
    local_region,
    shard,
)
from ..graph.positions import Dims, features_only, splits
from .price_cache import find, number_of
from .prices import CONVERSION_SECONDS, Prices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Sent = tuple[str, int, tuple[int, ...]]
"""A conversion's collective: kind, its mesh axis, and the other axes that split the tensor."""

_Steps = tuple[tuple[int, int], ...]
"""Numbers of each step's collectives in forward and backward; 0 for none."""


@dataclass
class Changes:
    """Collectives of all layout conversions queried so far, on meshes with the same number of axes.

    ``pairs[source, target]``: number of a pair of layouts, -1 if unknown. ``there``, ``back``:
    numbers of a pair's collectives in forward and backward, ``[step, pair]``. ``steps``: number of
    steps of each pair.
    """

    sent: dict[Sent, int] = field(default_factory=dict)
    numbers: dict[Layout, int] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    pairs: Ints = field(default_factory=lambda: np.full((0, 0), -1))
    there: Ints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    back: Ints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    steps: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _found: list[_Steps] = field(default_factory=list)

    def number(self, layouts: Sequence[Layout]) -> Ints:
        """Return the number of each of ``layouts``; a new layout gets the next number."""
        for layout in layouts:
            if layout not in self.numbers:
                self.numbers[layout] = len(self.layouts)
                self.layouts.append(layout)
        return np.array([self.numbers[layout] for layout in layouts], dtype=np.int64)

    def between(self, sources: Ints, targets: Ints) -> Ints:
        """Return ``[source, target]``: the number of each pair of the numbered layouts."""
        missing = len(self.layouts) - len(self.pairs)
        if missing:
            self.pairs = np.pad(self.pairs, (0, missing), constant_values=-1)
        found = self.pairs[sources[:, None], targets[None, :]]
        if (found < 0).any():
            for row, column in zip(*np.nonzero(found < 0), strict=True):
                self._add(int(sources[row]), int(targets[column]))
            self._stack()
            found = self.pairs[sources[:, None], targets[None, :]]
        return found

    def _add(self, source: int, target: int) -> None:
        if self.pairs[source, target] < 0:
            self.pairs[source, target] = len(self._found)
            self._found.append(self._steps(self.layouts[source], self.layouts[target]))

    def _steps(self, source: Layout, target: Layout) -> _Steps:
        current, found = list(source), []
        for step in conversion_steps(source, target):
            others = tuple(
                axis
                for axis, placement in enumerate(current)
                if axis != step.axis and placement.is_shard
            )
            there, back = (
                0 if kind is None else number_of(self.sent, (kind, step.axis, others))
                for kind in step.collectives
            )
            found.append((there, back))
            current[step.axis] = step.target
        return tuple(found)

    def _stack(self) -> None:
        self.steps = np.array([len(each) for each in self._found])
        self.there, self.back = (
            np.zeros((max(self.steps.max(), 1), len(self._found)), dtype=np.int64) for _ in range(2)
        )
        for pair, steps in enumerate(self._found):
            for number, (there, back) in enumerate(steps):
                self.there[number, pair], self.back[number, pair] = there, back


def changes_of(prices: Prices) -> Changes:
    """Return the cache of conversions shared by all meshes with as many axes as this."""
    return find(prices.cache.changes, len(prices.mesh.shape), Changes)


def conversion_seconds(
    prices: Prices, spec: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
) -> tuple[Floats, Floats]:
    """Return the seconds of converting a tensor, forward and backward, each ``[source, target]``.

    The lists must not change afterwards, as the numbers of their layouts are cached by identity.
    """
    changes = changes_of(prices)
    has_gradient = spec.requires_grad

    def numbers(layouts: Sequence[Layout]) -> Ints:
        def make() -> Ints:
            own = layouts if has_gradient else [held_layout(each) for each in layouts]
            return changes.number(own)

        return prices.cache.layout_numbers.find((has_gradient,), (layouts,), make)

    pairs = changes.between(numbers(sources), numbers(targets))
    there, back = changes.there[:, pairs], changes.back[:, pairs]
    if not spec.requires_grad:
        back = np.zeros_like(back)
    seconds = _seconds(prices, spec, changes, np.union1d(there, back))
    forward, backward = np.zeros(pairs.shape), np.zeros(pairs.shape)
    local = CONVERSION_SECONDS * prices.has_spec
    for number, (own, own_back) in enumerate(zip(there, back, strict=True)):
        forward += (changes.steps[pairs] > number) * local
        forward += seconds[own]
        backward += seconds[own_back]
    return forward, backward


def _seconds(prices: Prices, spec: TensorSpec, changes: Changes, used: Ints) -> Floats:
    """Return the seconds of each collective of ``changes``, by number; 0 unless in ``used``."""
    found = np.zeros(len(changes.sent) + 1)
    every: list[Any] = [None, *changes.sent]
    sizes = prices.mesh.shape
    for number in used.tolist():
        if number:
            kind, axis, others = every[number]
            num_bytes = spec.num_bytes // prod(sizes[other] for other in others)
            if kind == "all_to_all":
                num_bytes //= sizes[axis]
            found[number] = prices.collective(kind, num_bytes, axis)
    return found


def positions_split(
    node: Node, strategies: tuple[AxisStrategy, ...], dims: Dims
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split outputs along positions; else those that split any value so;
    else those that split no value along rows or positions."""
    fitting = tuple(strategy for strategy in strategies if splits(node, strategy, dims))
    making = tuple(
        strategy for strategy in fitting if any(each.is_shard for each in strategy.outputs)
    )
    return making or fitting or features_only(node, strategies, dims)


def batch_split(
    node: Node,
    dims: Mapping[str, tuple[int | None, ...]],
    strategies: tuple[AxisStrategy, ...],
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split every tensor that has a batch dimension along it; all if
    none does. ``dims``: batch dimensions of each node's outputs."""
    if node.name not in dims:
        return strategies
    inputs = [dims[ref.name][ref.index] for ref in node.inputs]
    outputs = list(dims[node.name])
    fitting = tuple(
        strategy
        for strategy in strategies
        if all(map(_fits_batch, inputs, strategy.inputs))
        and all(map(_fits_batch, outputs, strategy.outputs))
    )
    return fitting or strategies


def batch_whole(
    node: Node, graph: Graph, strategies: tuple[AxisStrategy, ...]
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that split no tensor along its batch dimension; all if none is left."""
    if not graph.batch_dims:
        return strategies
    dims = [graph.batch_dims[ref.name][ref.index] for ref in node.inputs]
    dims += graph.batch_dims[node.name]
    fitting = tuple(
        strategy
        for strategy in strategies
        if not any(
            dim is not None and placement == shard(dim)
            for dim, placement in zip(dims, (*strategy.inputs, *strategy.outputs), strict=True)
        )
    )
    return fitting or strategies


def parameters_split(
    node: Node, graph: Graph, strategies: tuple[AxisStrategy, ...]
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that use all parameters of two or more dims split; all if none does."""
    wide = [
        position
        for position, ref in enumerate(node.inputs)
        if _is_weight(graph[ref.name], graph) and len(graph.spec(ref).shape) >= 2
    ]
    fitting = tuple(
        strategy
        for strategy in strategies
        if all(strategy.inputs[position].is_shard for position in wide)
    )
    return fitting or strategies


def _is_weight(node: Node, graph: Graph) -> bool:
    """Return whether a node is a parameter or a part cut from a fused parameter."""
    is_cut = node.kind == "op" and node.op.startswith("aten.split_with_sizes.")
    return node.kind == "parameter" or (is_cut and _is_weight(graph[node.inputs[0].name], graph))


def _fits_batch(dim: int | None, placement: Placement) -> bool:
    return not placement.is_shard if dim is None else placement == shard(dim)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Message from one device to another with the part ``box`` of a tensor, a (start, stop) pair
    per dimension.

    ``source`` and ``target`` are device indices in their meshes' row-major order.
    """

    source: int
    target: int
    box: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return prod(self.shape)


def transfers(
    shape: Sequence[int],
    source_layout: Layout,
    source_mesh: Mesh,
    target_layout: Layout,
    target_mesh: Mesh,
) -> tuple[Transfer, ...]:
    """Return the messages that move a tensor from one mesh to another, sorted by target and box.

    A box that several source devices hold is sent by the device that has sent the least so far;
    ties go to the device at the most similar position in its mesh. A pair of devices exchanges at
    most one box. Raises ValueError for a partial layout or an uneven split.

    >>> from autoparallel.planner.graph.layout import INVARIANT, shard
    >>> two = Mesh(("dp",), (2,)), Mesh(("tp",), (2,))
    >>> for t in transfers((4, 6), (shard(0),), two[0], (shard(1),), two[1]):
    ...     print(t.source, "->", t.target, t.box)
    0 -> 0 ((0, 2), (0, 3))
    1 -> 0 ((2, 4), (0, 3))
    0 -> 1 ((0, 2), (3, 6))
    1 -> 1 ((2, 4), (3, 6))
    """
    sources = _regions(shape, source_layout, source_mesh)
    targets = _regions(shape, target_layout, target_mesh)
    holders: dict[Region, list[int]] = {}
    for index, region in enumerate(sources):
        holders.setdefault(region, []).append(index)
    sent = [0] * source_mesh.size
    chosen: list[Transfer] = []
    regions = list(holders)
    bounds = np.array(regions, dtype=np.int64).reshape(len(regions), len(shape), 2)
    boxes: dict[Region, list[tuple[Region, Region]]] = {}
    for target, wanted in enumerate(targets):
        if wanted not in boxes:
            box = np.array(wanted, dtype=np.int64).reshape(len(shape), 2)
            starts = np.maximum(bounds[:, :, 0], box[:, 0])
            shared = (starts < np.minimum(bounds[:, :, 1], box[:, 1])).all(axis=1)
            near = [regions[number] for number in np.flatnonzero(shared).tolist()]
            shares = ((each, intersect(each, wanted)) for each in near)
            boxes[wanted] = [(each, part) for each, part in shares if part is not None]
        for region, part in boxes[wanted]:
            source = min(
                holders[region],
                key=lambda replica: (
                    sent[replica],
                    abs(replica * target_mesh.size - target * source_mesh.size),
                    replica,
                ),
            )
            transfer = Transfer(source, target, part)
            sent[source] += transfer.numel
            chosen.append(transfer)
    return tuple(sorted(chosen, key=lambda transfer: (transfer.target, transfer.box)))


def _regions(shape: Sequence[int], layout: Layout, mesh: Mesh) -> list[Region]:
    if any(placement.kind == "P" for placement in layout):
        raise ValueError(f"a partial value cannot be sent: {format_layout(layout)}")
    if not divides(shape, layout, mesh.shape):
        raise ValueError(f"{format_layout(layout)} on {mesh.shape} does not divide {tuple(shape)}")
    return [local_region(shape, layout, mesh, mesh.coordinates(i)) for i in range(mesh.size)]
