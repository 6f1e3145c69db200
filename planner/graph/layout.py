"""Layouts of tensors on a mesh, and the collectives that change them.

A layout is one placement per mesh axis. The four placements are the pairs of
(value, gradient) that stay consistent under autograd:

====== ============================== =========================
 name   the value on the axis' ranks   its gradient
====== ============================== =========================
S(d)   split along dimension ``d``    split along ``d``
R      the same                       a partial sum
I      the same                       the same
P      a partial sum                  the same
====== ============================== =========================

A dimension split on several axes is split by the first axis first (the first
axis is the outermost), so a rank's part is always one contiguous box.

Source: the value types of varying/invariant/partial from "spmd_types"-style
systems; Megatron-LM's f and g (Shoeybi et al. 2019, section 3) are I→R and P→I.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal["S", "R", "I", "P"]


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Placement of a tensor along one mesh axis: S splits dimension ``dim``, P is a partial sum, R
    and I are whole on every rank, with a gradient that is a partial sum (R) or whole (I).

    >>> str(Placement("S", 1)), str(Placement("R"))
    ('S(1)', 'R')
    """

    kind: Kind
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"


def shard(dim: int) -> Placement:
    """Return the placement that splits dimension ``dim`` (counted from 0)."""
    return Placement("S", dim)


JOINT_AXES = ("dp", "ep", "cp")
"""Mesh axes whose ranks hold parameters whole, except weights of experts on "ep": states are
sharded, and gradients summed, over all of them at once."""

ROW_AXES = ("dp", "ep")
"""Mesh axes that split the rows of the batch."""

REPLICATE = Placement("R")
INVARIANT = Placement("I")
PARTIAL = Placement("P")

Layout = tuple[Placement, ...]

_PLACEMENT = re.compile(r"S\((\d+)\)|([RIP])")


def parse_placement(text: str) -> Placement:
    """Parse a placement as printed by ``str``. Raises ValueError.

    >>> parse_placement("S(2)")
    Placement(kind='S', dim=2)
    """
    match = _PLACEMENT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a placement: expected S(dim), R, I or P")
    if match.group(1) is not None:
        return shard(int(match.group(1)))
    return {"R": REPLICATE, "I": INVARIANT, "P": PARTIAL}[match.group(2)]


def parse_layout(text: str) -> Layout:
    """Parse a layout: one placement per mesh axis, space-separated.

    >>> parse_layout("S(0) R") == (shard(0), REPLICATE)
    True
    """
    return tuple(parse_placement(part) for part in text.split())


def format_layout(layout: Layout) -> str:
    """Format a layout; ``parse_layout`` reads it back.

    >>> format_layout((shard(0), PARTIAL))
    'S(0) P'
    """
    return " ".join(str(placement) for placement in layout)


def held_layout(layout: Layout) -> Layout:
    """Return the layout with R replaced by I, which is equal for values without a gradient."""
    return tuple(INVARIANT if each.kind == "R" else each for each in layout)


def boundary_layout(layout: Layout) -> Layout:
    """Return the layout in which stages exchange a value: S stays, all else becomes I."""
    return tuple(each if each.is_shard else INVARIANT for each in layout)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A logical mesh of devices: the names and sizes of its axes, outermost first.

    Devices are numbered row-major: the last axis varies fastest.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"mesh axes {self.axes} do not match shape {self.shape}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"mesh shape {self.shape} has an empty axis")

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def row_parts(self) -> int:
        """Return the number of parts into which "dp" and "ep" split a micro-batch, the least there
        are.

        >>> Mesh(("dp", "ep", "tp"), (2, 2, 4)).row_parts
        4
        """
        return self.num_ranks([at for at, name in enumerate(self.axes) if name in ROW_AXES])

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """Return the axes of ``JOINT_AXES`` that have several ranks."""
        sizes = enumerate(zip(self.axes, self.shape, strict=True))
        return tuple(axis for axis, (name, size) in sizes if name in JOINT_AXES and size > 1)

    def joined(self, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of axes over which a sum over ``axes`` is taken, one after the other:
        the joint axes together, each other axis alone.

        >>> Mesh(("dp", "cp", "tp"), (2, 2, 4)).joined((0, 1, 2))
        ((0, 1), (2,))
        """
        joint = tuple(axis for axis in axes if axis in self.joint_axes)
        return (*([joint] if joint else []), *((axis,) for axis in axes if axis not in joint))

    def num_ranks(self, axes: Collection[int]) -> int:
        """Return the number of ranks along ``axes`` together; 1 for no axes."""
        return prod(self.shape[axis] for axis in axes)

    def coordinates(self, index: int) -> tuple[int, ...]:
        """Return the coordinates of the ``index``-th device of the mesh.

        >>> Mesh(("dp", "tp"), (2, 4)).coordinates(5)
        (1, 1)
        """
        coordinates = []
        for size in reversed(self.shape):
            index, coordinate = divmod(index, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def index(self, coordinates: Sequence[int]) -> int:
        """Return the index of the device at ``coordinates``."""
        index = 0
        for size, coordinate in zip(self.shape, coordinates, strict=True):
            index = index * size + coordinate
        return index

    def groups(self, *axes: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of devices (indices) that differ only in their coordinates on ``axes``.

        >>> Mesh(("dp", "tp"), (2, 2)).groups(0)
        ((0, 2), (1, 3))
        >>> Mesh(("dp", "cp", "tp"), (2, 2, 2)).groups(0, 1)
        ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in range(self.size):
            own = enumerate(self.coordinates(index))
            others = tuple(place for axis, place in own if axis not in axes)
            groups.setdefault(others, []).append(index)
        return tuple(tuple(group) for group in groups.values())


def local_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a rank's part of a tensor. Raises ValueError if a split is uneven.

    >>> local_shape((8, 6), (shard(0), shard(1)), (2, 3))
    (4, 2)
    """
    local = list(shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.is_shard:
            if local[placement.dim] % size:
                raise ValueError(
                    f"{format_layout(layout)} on {tuple(mesh_shape)} does not divide {tuple(shape)}"
                )
            local[placement.dim] //= size
    return tuple(local)


def divides(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Return whether every split of ``layout`` divides its dimension of ``shape`` evenly."""
    local = list(shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.is_shard:
            if placement.dim >= len(local) or local[placement.dim] % size:
                return False
            local[placement.dim] //= size
    return True


Region = tuple[tuple[int, int], ...]
"""Box of a tensor: (start, stop) along each dimension, the stop excluded."""


def whole_region(shape: Sequence[int]) -> Region:
    """Return the box ((0, size), …) of a whole tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the shape of a box ((start, stop), …) of a tensor."""
    return tuple(stop - start for start, stop in region)


def region_slices(region: Region, frame: Region | None = None) -> tuple[slice, ...]:
    """Return the slices that cut the box ``region`` out of a tensor that holds the box ``frame``.

    >>> region_slices(((2, 4),), ((2, 6),))
    (slice(0, 2, None),)
    """
    origins = [0] * len(region) if frame is None else [start for start, _ in frame]
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), origin in zip(region, origins, strict=True)
    )


def intersect(first: Region, second: Region) -> Region | None:
    """Return the intersection of two boxes of a tensor; None if it is empty.

    >>> intersect(((0, 4), (0, 2)), ((2, 6), (0, 2)))
    ((2, 4), (0, 2))
    """
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def local_region(
    shape: Sequence[int], layout: Layout, mesh: Mesh, coordinates: Sequence[int]
) -> Region:
    """Return the box ``((start, stop), …)`` of the global tensor that a rank holds.

    >>> local_region((8,), (shard(0), shard(0)), Mesh(("a", "b"), (2, 2)), (1, 0))
    ((4, 6),)
    """
    box = [(0, size) for size in shape]
    for placement, size, coordinate in zip(layout, mesh.shape, coordinates, strict=True):
        if placement.is_shard:
            start, stop = box[placement.dim]
            part = (stop - start) // size
            box[placement.dim] = (start + coordinate * part, start + (coordinate + 1) * part)
    return tuple(box)


Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap", "ring", "halo", "dispatch"
]
"""Kinds of collectives. "swap", "ring" and "halo" are those of ``ops.attention``."""

CONVERSIONS: dict[tuple[Kind, Kind], tuple[Collective | None, Collective | None]] = {
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", None),
    ("S", "P"): (None, None),
    ("R", "S"): (None, None),
    ("R", "I"): (None, None),
    ("R", "P"): (None, None),
    ("I", "S"): (None, "all_gather"),
    ("I", "R"): (None, "all_reduce"),
    ("I", "P"): (None, None),
    ("P", "I"): ("all_reduce", None),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
}
"""Collectives of each change of placement: (in the forward, in the backward).

``None`` is local work only: a slice, zero padding, or a scale by 1/n (R→I scales
the gradient, I→P and R→P the value).
"""


@dataclass(frozen=True, slots=True)
class Step:
    """Change of a tensor's placement on one mesh axis, from ``source`` to ``target``."""

    axis: int
    source: Placement
    target: Placement

    @property
    def collectives(self) -> tuple[Collective | None, Collective | None]:
        return CONVERSIONS[self.source.kind, self.target.kind]


def conversion_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the changes of placement, one mesh axis each, that turn ``source`` into ``target``.

    If two axes split one dimension, the split on the outer axis can only change while no inner axis
    splits the dimension, so such inner axes pass through ``I``.

    >>> [(s.axis, str(s.source), str(s.target)) for s in
    ...  conversion_steps((shard(0), PARTIAL), (shard(0), INVARIANT))]
    [(1, 'P', 'I')]
    >>> [(s.axis, str(s.source), str(s.target)) for s in
    ...  conversion_steps((shard(0), shard(0)), (INVARIANT, shard(0)))]
    [(1, 'S(0)', 'I'), (0, 'S(0)', 'I'), (1, 'I', 'S(0)')]
    """
    lifted = _lifted_axes(source, target)
    current = list(source)
    steps: list[Step] = []

    def move(axis: int, placement: Placement) -> None:
        if current[axis] != placement:
            steps.append(Step(axis, current[axis], placement))
            current[axis] = placement

    for axis in sorted(lifted, reverse=True):
        if current[axis].is_shard:
            move(axis, INVARIANT)
    for axis in range(len(source)):
        if axis not in lifted:
            move(axis, target[axis])
    for axis in sorted(lifted):
        move(axis, target[axis])
    return tuple(steps)


def _lifted_axes(source: Layout, target: Layout) -> set[int]:
    """Return the axes that split a dimension which a changing outer axis splits too."""
    lifted: set[int] = set()
    disturbed: set[int] = set()
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        dims = {placement.dim for placement in (before, after) if placement.is_shard}
        if dims & disturbed:
            lifted.add(axis)
        if before != after or axis in lifted:
            disturbed |= dims
    return lifted


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective that a split op runs itself, as a vocabulary-parallel loss does.

    ``num_bytes``: size on a rank of the tensor that is reduced or gathered; ``backward``: it runs
    in the backward. For sending tokens to experts (dispatch), ``copies`` is the number of copies
    sent of each row, and ``limit`` is (groups of receivers, groups that a row is sent to).
    ``of_keys``: it has keys and values, which other axes may split less than queries.
    """

    kind: Collective
    num_bytes: int
    backward: bool = False
    copies: int = 1
    limit: tuple[int, int] = (1, 1)
    of_keys: bool = False


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """A way to execute an op on one mesh axis: a placement of each input and output on that axis.

    ``inputs`` has a placement for each of the node's inputs in call order, ``outputs`` for each
    output. ``label`` is the letter of the split dimension in the op's annotation (``"b"``), or
    ``"R"``, ``"I"``, ``"P"`` if the op runs on whole or partial tensors. ``groups``: number of
    groups of entries in the split dimension, which a split must leave whole; 0 without groups.
    """

    label: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    collectives: tuple[InnerCollective, ...] = ()
    groups: int = 0


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The chosen layouts of a node: of each input as the op reads it, and of each output.

    A parameter, input or constant has no inputs; its output layout is how it is stored. ``labels``:
    of the strategies, by mesh axis.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    labels: tuple[str, ...] = ()


BALANCED = "balanced"
"""Label of causal attention with balanced queries: see ``ops.attention``."""

RING, HALO = RINGS = "ring", "halo"
"""Labels of attention whose keys and values pass from rank to rank: see ``ops.attention``."""

OF_GROUPS = "heads of queries"
"""Label of attention on an axis that splits the heads of queries, but not those of keys and values:
every rank holds all of these, and reads the one that its heads of queries share."""

SENT = "sent"
"""Label of a layer of experts on an axis whose ranks have their own tokens and experts."""

HALVED = "sent in halves"
"""Label of a layer of experts as in ``SENT`` whose rows travel in two exchanges: the experts
compute one half while the other is under way."""

SLICED = "sliced"
"""Label of a layer of experts on an axis whose ranks have a slice of each expert."""


def sent_axes(layout: NodeLayout) -> tuple[int, ...]:
    """Return the mesh axes on which ranks send tokens to each other's experts."""
    return tuple(axis for axis, label in enumerate(layout.labels) if label in (SENT, HALVED))


def is_halved(layout: NodeLayout) -> bool:
    """Return whether the rows of a layer of experts travel in two exchanges."""
    return HALVED in layout.labels


def balanced_axes(layout: NodeLayout) -> tuple[int, ...]:
    """Return the mesh axes along which ranks swap halves of the queries of causal attention."""
    if BALANCED not in layout.labels:
        return ()
    return tuple(axis for axis, label in enumerate(layout.labels) if label == BALANCED)


def split_axes(layout: NodeLayout) -> set[int]:
    """Return the mesh axes over which an input or output of a node is sharded."""
    return {
        axis
        for each in (*layout.inputs, *layout.outputs)
        for axis, placement in enumerate(each)
        if placement.is_shard
    }


def splits(layout: NodeLayout) -> tuple[tuple[int, ...], ...]:
    """Return a key of a node's layouts: for each tensor the dimension split on each axis (-1 for
    none), then the axes that balance attention, and whether tokens are sent in halves. It
    determines compute and kept bytes."""
    dims = [
        tuple([placement.dim for placement in each]) for each in (*layout.inputs, *layout.outputs)
    ]
    return (*dims, balanced_axes(layout), (int(is_halved(layout)),))


def combine(axes: tuple[AxisStrategy, ...]) -> NodeLayout:
    """Combine the strategies of an op on each mesh axis into the layouts of its tensors."""
    return NodeLayout(
        inputs=tuple(zip(*(axis.inputs for axis in axes), strict=True)),
        outputs=tuple(zip(*(axis.outputs for axis in axes), strict=True)),
        labels=tuple(axis.label for axis in axes),
    )


def keeps_groups(axes: Sequence[AxisStrategy], sizes: Sequence[int]) -> bool:
    """Return whether strategies on axes of ``sizes`` split grouped dims only between groups, and
    leave each rank the heads of keys that it reads. After an axis of ``OF_GROUPS`` a further axis
    may not split heads of keys, as their parts would not follow those of the queries' heads. Beside
    an axis of ``RINGS`` no other may split positions."""
    labels, made = [axis.label for axis in axes], [axis.outputs for axis in axes]
    if any(label in RINGS and made.count(own) > 1 for label, own in zip(labels, made, strict=True)):
        return False
    if OF_GROUPS in labels:
        at = labels.index(OF_GROUPS)
        if any(later.inputs[1] == axes[at].inputs[0] for later in axes[at + 1 :]):
            return False
    parts: dict[str, int] = {}
    for axis, size in zip(axes, sizes, strict=True):
        if axis.groups:
            parts[axis.label] = parts.get(axis.label, 1) * size
    return all(not axis.groups or axis.groups % parts[axis.label] == 0 for axis in axes)
