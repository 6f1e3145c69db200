"""Strategies: the ways an op can run, one mesh axis at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Collective, Layout, Placement


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective that an op itself needs when split, e.g. vocabulary-parallel loss.

    ``num_bytes`` is the size of the tensor reduced or gathered, local to a rank's other
    axes; ``backward`` tells the direction.
    """

    kind: Collective
    num_bytes: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """One way to run an op on one mesh axis.

    ``inputs`` has a placement for each of the node's ``inputs`` (in call order, a tensor
    used twice listed twice), ``outputs`` one for each output. ``label`` is the letter of
    the dimension annotation that is split (``"b"``), or ``"R"``/``"I"``/``"P"`` when the
    op runs on whole or partial tensors. ``groups``, unless 0, is how many groups the
    dimension has that must stay whole.
    """

    label: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    collectives: tuple[InnerCollective, ...] = ()
    groups: int = 0


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """What was chosen for a node: the layout each input is brought to, and each output's.

    A parameter, input or constant has no inputs; its output layout is how it is held.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    labels: tuple[str, ...] = ()


BALANCED = "balanced"
"""The label of causal attention whose ranks swap queries: see ``rules.balanced_attention``."""


def balanced_axes(layout: NodeLayout) -> tuple[int, ...]:
    """The axes on which the ranks of a causal attention swap halves of their queries."""
    if BALANCED not in layout.labels:
        return ()
    return tuple(axis for axis, label in enumerate(layout.labels) if label == BALANCED)


def splits(layout: NodeLayout) -> tuple[tuple[int, ...], ...]:
    """What of a node's layout says how large its parts are: by tensor and axis the dimension
    that is split, -1 where none is, then the axes that balance attention. Compute and bytes kept
    follow from it alone."""
    dims = [
        tuple([placement.dim for placement in each]) for each in (*layout.inputs, *layout.outputs)
    ]
    return (*dims, balanced_axes(layout))


def combine(axes: tuple[AxisStrategy, ...]) -> NodeLayout:
    """The node layout of one strategy per mesh axis."""
    return NodeLayout(
        inputs=tuple(zip(*(axis.inputs for axis in axes), strict=True)),
        outputs=tuple(zip(*(axis.outputs for axis in axes), strict=True)),
        labels=tuple(axis.label for axis in axes),
    )


def keeps_groups(axes: Sequence[AxisStrategy], sizes: Sequence[int]) -> bool:
    """Whether axes of these sizes, together, cut grouped dimensions between groups only."""
    parts: dict[str, int] = {}
    for axis, size in zip(axes, sizes, strict=True):
        if axis.groups:
            parts[axis.label] = parts.get(axis.label, 1) * size
    return all(not axis.groups or axis.groups % parts[axis.label] == 0 for axis in axes)
