"""Costs of a node, a parameter or a block: seconds by direction and resource, bytes of states."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import groupby
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...cost_model.cluster.cluster import Source

Floats = NDArray[np.float64]
T = TypeVar("T")


class Resource(IntEnum):
    """Index into the last axis of arrays of seconds, for the fields of ``Seconds`` in order."""

    FORWARD_COMPUTE = 0
    FORWARD_COMMUNICATION = 1
    BACKWARD_COMPUTE = 2
    BACKWARD_COMMUNICATION = 3
    FORWARD_STATES = 4
    BACKWARD_STATES = 5
    FORWARD_SLOWED = 6
    BACKWARD_SLOWED = 7
    PARAMETER_GATHER = 8
    GRADIENT_SYNC = 9
    GATHER_SLOWED = 10
    SYNC_SLOWED = 11
    OPTIMIZER = 12
    FORWARD_ISSUE = 13
    BACKWARD_ISSUE = 14
    FORWARD_COPIES = 15
    BACKWARD_COPIES = 16


MICROBATCH = slice(Resource.FORWARD_COMPUTE, Resource.PARAMETER_GATHER)
"""Resources whose seconds count once per micro-batch."""

FORWARD = slice(Resource.FORWARD_COMPUTE, Resource.BACKWARD_COMPUTE)
"""Resources of the forward that recomputation repeats: all but gathering parameters."""

STEP = slice(Resource.PARAMETER_GATHER, Resource.FORWARD_ISSUE)
"""Resources whose seconds count once per step."""


class State(IntEnum):
    """Index into the last axis of arrays of bytes, for the fields of ``StateBytes`` in order."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    GATHERED = 3


HELD = slice(State.PARAMETERS, State.GATHERED)
"""State bytes that a device holds all the time."""


class Seconds(NamedTuple):
    """Seconds per micro-batch by direction and resource; ``parameter_gather`` to ``optimizer`` are
    per step.

    ``forward_states``/``backward_states``: gathering parameters and scattering gradients in every
    micro-batch (ZeRO 2 and 3), which recomputation does not repeat. ``parameter_gather``: gathering
    parameters once per step (ZeRO 1 and 2); ``gradient_sync``: summing gradients once. All four
    overlap compute; ``*_slowed`` is the time that compute loses if it covers the whole collectives.
    ``forward_issue``/``backward_issue``: time of the host to launch the kernels, beside compute;
    for a stage, until each block is both launched and computed. They bound a block, not an op, and
    solvers do not add them. ``forward_copies``/``backward_copies``: the part of ``*_states`` in
    which states are copied to or from host memory.
    """

    forward_compute: float = 0.0
    forward_communication: float = 0.0
    backward_compute: float = 0.0
    backward_communication: float = 0.0
    forward_states: float = 0.0
    backward_states: float = 0.0
    forward_slowed: float = 0.0
    backward_slowed: float = 0.0
    parameter_gather: float = 0.0
    gradient_sync: float = 0.0
    gather_slowed: float = 0.0
    sync_slowed: float = 0.0
    optimizer: float = 0.0
    forward_issue: float = 0.0
    backward_issue: float = 0.0
    forward_copies: float = 0.0
    backward_copies: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))


class Priced(NamedTuple):
    """Price of an op: seconds forward and backward, their source, the host's seconds to launch."""

    forward: float
    backward: float
    source: Source
    forward_issue: float = 0.0
    backward_issue: float = 0.0

    def at_least_twice(self, half: Priced) -> Priced:
        """Return the price of running two halves of the op, which is at least that of the whole."""
        return Priced(
            max(self.forward, 2 * half.forward),
            max(self.backward, 2 * half.backward),
            self.source,
            2 * half.forward_issue,
            2 * half.backward_issue,
        )


class ExpertSpread(NamedTuple):
    """Balance of a layer of experts between ranks. ``busiest``: tokens that the busiest rank
    computes / the mean; ``busiest_sent``: tokens that it receives / the mean.

    Each rank computes up to ``copies`` experts of other ranks, in an operand of ``copied_bytes``
    that takes ``copying_seconds`` to fill; ``moved_bytes``: size of an all-to-all of the copies'
    weights.
    """

    busiest: float
    busiest_sent: float
    copies: int = 0
    copied_bytes: int = 0
    moved_bytes: float = 0.0
    copying_seconds: float = 0.0


class StateBytes(NamedTuple):
    """Bytes on a rank of a parameter, its gradient and its optimizer states, and ``gathered``:
    bytes of its whole copy while in use."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0


COLLECTIVES_OF_STATES = (
    (Resource.FORWARD_STATES, Resource.FORWARD_SLOWED),
    (Resource.BACKWARD_STATES, Resource.BACKWARD_SLOWED),
    (Resource.PARAMETER_GATHER, Resource.GATHER_SLOWED),
    (Resource.GRADIENT_SYNC, Resource.SYNC_SLOWED),
)
"""Collectives that overlap compute, each with the time that this compute loses."""


def objective_weights(num_microbatches: int) -> Floats:
    """Return the weight of a second of each resource in the solvers' objective, seconds per
    micro-batch.

    Collectives of states overlap compute; they count by the seconds by which they slow it, a lower
    bound of the seconds that they add.

    >>> weights = objective_weights(4)
    >>> weights[[Resource.FORWARD_COMPUTE, Resource.GRADIENT_SYNC, Resource.SYNC_SLOWED]].tolist()
    [1.0, 0.0, 0.25]
    """
    weights = np.zeros(len(Resource))
    weights[MICROBATCH] = 1.0
    weights[Resource.OPTIMIZER] = 1 / num_microbatches
    for collective, slowed in COLLECTIVES_OF_STATES:
        weights[collective] = 0.0
        weights[slowed] = _times_per_microbatch(collective, num_microbatches)
    return weights


def _times_per_microbatch(resource: Resource, num_microbatches: int) -> float:
    """Return how often a resource counts per micro-batch: once, or 1/N if it counts per step."""
    is_of_step = resource in range(*STEP.indices(len(Resource)))
    return 1 / num_microbatches if is_of_step else 1.0


def wait_weights(num_microbatches: int) -> tuple[Floats, Floats]:
    """Return weights to add to ``objective_weights`` for a stage's first block, and for its last.

    Collectives that overlap compute count in ``objective_weights`` only by the seconds by which
    they slow it. But no compute hides the gathers of the first block before the forward and of the
    last before the backward, nor the first block's gradient sums after the backward; with the added
    weights they count with their whole time.
    """
    first, last = np.zeros((2, len(Resource)))
    for collective, slowed in COLLECTIVES_OF_STATES[1:]:
        first[collective] = _times_per_microbatch(collective, num_microbatches)
        first[slowed] = -first[collective]
    last[Resource.FORWARD_STATES], last[Resource.FORWARD_SLOWED] = 1.0, -1.0
    return first, last


class Groups(NamedTuple):
    """Seconds of a stage's blocks in order, with consecutive equal blocks stored once.

    Entry i stands for ``counts[i]`` consecutive blocks, each of ``seconds[..., i, RESOURCE]``. If
    it stands for several, the entries before and after it have the same seconds. ``activations``:
    seconds in which copies of a block's offloaded activations take the host's link, in either pass.
    """

    seconds: Floats
    counts: NDArray[np.int64]
    activations: Floats | float = 0.0


def group_blocks(blocks: Sequence[T]) -> tuple[list[T], NDArray[np.int64]]:
    """Return the entries and counts of ``Groups`` for a sequence of blocks.

    Three or more equal blocks in a row become three entries: the first block, the blocks between,
    and the last block.

    >>> entries, counts = group_blocks("abbbbcc")
    >>> "".join(entries), counts.tolist()
    ('abbbcc', [1, 1, 2, 1, 1, 1])
    """
    entries: list[T] = []
    counts: list[int] = []
    for block, equal in groupby(blocks):
        number = len(list(equal))
        own = [1] * number if number < 3 else [1, number - 2, 1]
        entries += [block] * len(own)
        counts += own
    return entries, np.array(counts)


def exposed_one_ahead(collectives: Floats, slowed: Floats, compute: Floats, counts: Any) -> Any:
    """Return the seconds added to a pass if each block is gathered while the block before it
    computes.

    The pass waits for the first block. Every other block either arrives before the compute beside
    it ends, and lengthens this compute by ``slowed``, or the pass waits for it. The last axis of
    all arguments has the entries of ``Groups``.

    >>> each = [np.array(values) for values in ((2.0, 1.0, 6.0), (0.5, 0.25, 1.5), (3.0, 4.0, 1.0))]
    >>> float(exposed_one_ahead(*each, [1, 1, 1]))  # 2, then 0.25 beside 3, then 6 beside 4
    4.25
    """
    return (counts * np.maximum(slowed, collectives - _before(compute))).sum(axis=-1)


def exposed_from_start(collectives: Floats, slowed: Floats, compute: Floats, counts: Any) -> Any:
    """Return the seconds added to a pass if all blocks are gathered in sequence from its start on.

    Block h is gathered in S_h seconds (``collectives``), computes for C_h (``compute``), and its
    gather slows compute by s_h (``slowed``). Let g be the last block that the pass waits for: it
    arrives after ``Σ_{h≤g} S_h`` seconds, in which ``Σ_{h<g} C_h`` are computed; later gathers slow
    the rest by ``Σ_{h>g} s_h``. So the pass takes ``max_g (Σ_{h≤g} S_h - Σ_{h<g} C_h + Σ_{h>g}
    s_h)`` seconds longer; if it waits for no block, ``Σ s_h``. Summing gradients during the
    backward adds the same, in reverse order of time.

    >>> each = [np.array(values) for values in ((2.0, 1.0, 6.0), (0.5, 0.25, 1.5), (3.0, 4.0, 1.0))]
    >>> float(exposed_from_start(*each, [1, 1, 1]))  # block 0: 2 + 1.75; block 2: 9 - 7
    3.75
    """
    lost = (counts * slowed).sum(axis=-1)
    there = (counts * collectives).cumsum(axis=-1)
    before = (counts * compute).cumsum(axis=-1) - compute
    after = lost[..., None] - (counts * slowed).cumsum(axis=-1)
    return np.maximum(lost, (there - before + after).max(axis=-1))


def _before(values: Floats) -> Floats:
    """Return ``values`` shifted by one: each entry is its predecessor's value, the first 0."""
    found = np.zeros_like(values)
    found[..., 1:] = values[..., :-1]
    return found


def _after(values: Floats) -> Floats:
    """Return ``values`` shifted by one: each entry is its successor's value, the last 0."""
    found = np.zeros_like(values)
    found[..., :-1] = values[..., 1:]
    return found


def seconds_of_passes(
    seconds: Floats, groups: Groups, shares_links: bool | NDArray[np.bool_]
) -> tuple[Any, Any, Any, Any]:
    """Return a stage's seconds: a micro-batch's forward, its backward, the wait before a step's
    first forward for gathered parameters, and the time after the last backward.

    ``seconds[..., RESOURCE]`` belong to the stage, ``groups`` to its blocks. Collectives of states
    overlap compute and, unless they share links (``shares_links``), other collectives. In the
    forward, ZeRO 3 gathers each block while the previous block computes. In the backward, while a
    block computes, ZeRO 3 gathers the block before it, and ZeRO 2 and 3 scatter the gradients of
    the block after it. Of the copies to and from the host among them, activations leave the link
    free for the rest of the compute. The host's time to launch kernels is not counted.
    """

    def of(resource: Resource) -> Floats:
        found: Floats = groups.seconds[..., resource]
        return found

    passes, compute = [], []
    for direction in ("FORWARD", "BACKWARD"):
        whole = seconds[..., Resource[f"{direction}_COMPUTE"]]
        communication = seconds[..., Resource[f"{direction}_COMMUNICATION"]]
        own = of(Resource[f"{direction}_COMPUTE"])
        hides = np.where(shares_links, whole, whole + communication)
        total = (groups.counts * own).sum(axis=-1)
        scale = np.divide(hides, total, out=np.zeros_like(total), where=total > 0)
        compute.append(own * scale[..., None])
        passes.append(whole + communication)
    gathered = of(Resource.FORWARD_STATES), of(Resource.FORWARD_SLOWED)
    scattered = (
        of(Resource.BACKWARD_STATES) - gathered[0],
        of(Resource.BACKWARD_SLOWED) - gathered[1],
    )
    both, slowed = (_before(g) + _after(s) for g, s in zip(gathered, scattered, strict=True))
    counts = groups.counts
    ends = gathered[0][..., -1] + scattered[0][..., 0]
    least = [gathered[1], slowed]
    copies = of(Resource.FORWARD_COPIES), of(Resource.BACKWARD_COPIES)
    if copies[1].any():
        link = [np.maximum(0.0, own - groups.activations) for own in compute]
        least[0] = np.maximum(least[0], copies[0] - _before(link[0]))
        moved = _before(copies[0]) + _after(copies[1] - copies[0])
        least[1] = np.maximum(slowed, moved - link[1])
    forward = passes[0] + exposed_one_ahead(gathered[0], least[0], compute[0], counts)
    backward = passes[1] + ends + (counts * np.maximum(least[1], both - compute[1])).sum(axis=-1)
    gather = of(Resource.PARAMETER_GATHER), of(Resource.GATHER_SLOWED)
    sync = of(Resource.GRADIENT_SYNC), of(Resource.SYNC_SLOWED)
    end = exposed_from_start(*sync, compute[1], counts) + seconds[..., Resource.OPTIMIZER]
    return forward, backward, exposed_from_start(*gather, compute[0], counts), end
