"""What a node, a parameter or a block costs: seconds by direction and resource, bytes held."""

from __future__ import annotations

from enum import IntEnum
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cost_model.cluster import Source

Floats = NDArray[np.float64]


class Resource(IntEnum):
    """The last axis of arrays of seconds: the fields of ``Seconds``, in their order."""

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


MICROBATCH = slice(Resource.FORWARD_COMPUTE, Resource.PARAMETER_GATHER)
"""The resources whose seconds are of one micro-batch."""

FORWARD = slice(Resource.FORWARD_COMPUTE, Resource.BACKWARD_COMPUTE)
"""The resources of the forward, but for gathering parameters: what recomputation repeats."""

STEP = slice(Resource.PARAMETER_GATHER, Resource.FORWARD_ISSUE)
"""The resources whose seconds are of a step."""


class State(IntEnum):
    """The last axis of arrays of state bytes: the fields of ``StateBytes``, in their order."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    GATHERED = 3


HELD = slice(State.PARAMETERS, State.GATHERED)
"""The states that a device holds all the time."""


class Seconds(NamedTuple):
    """Seconds of a micro-batch by direction and resource; those from ``parameter_gather`` to
    ``optimizer`` are of a step.

    ``forward_states``/``backward_states``: gathering parameters and scattering gradients in
    every micro-batch (ZeRO 2 and 3), which recomputation does not repeat. ``parameter_gather``:
    gathering parameters once (ZeRO 1 and 2), ``gradient_sync``: summing gradients once. All four
    run beside compute (``beside_compute``): ``*_slowed`` is how much longer that compute takes
    if all of it does, at most as long as the collectives.
    ``forward_issue``/``backward_issue``: what the host takes to issue the kernels, beside
    compute, and of a stage until each block is both issued and computed. They bound a block,
    not an op, and are in no sum of the solvers.
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

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))


class Priced(NamedTuple):
    """Seconds forward and backward, where they come from, and the host's to issue them."""

    forward: float
    backward: float
    source: Source
    forward_issue: float = 0.0
    backward_issue: float = 0.0


class StateBytes(NamedTuple):
    """Bytes that a parameter holds all the time, and its whole copy while in use."""

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
"""What runs beside compute, and how much longer that takes."""


def objective_weights(
    num_microbatches: int, num_groups: int, *, exposed: float = 0.0, shares_links: bool = True
) -> Floats:
    """What a second of each resource counts in the solvers' sums: seconds per micro-batch.

    The sum is never above the objective (``seconds_of_passes``), where collectives S that slow
    compute C by s add max(s, S - C) to it, but for the first of the groups: it counts
    (1 - e)·s + e·(S - C) of that, for any share e that is ``exposed``.

    >>> weights = objective_weights(4, 2)
    >>> weights[[Resource.FORWARD_COMPUTE, Resource.GRADIENT_SYNC, Resource.SYNC_SLOWED]].tolist()
    [1.0, 0.125, 0.125]
    """
    rest = 1 - 1 / num_groups
    weights = np.zeros(len(Resource))
    weights[MICROBATCH] = 1 - rest * exposed
    if shares_links:
        weights[[Resource.FORWARD_COMMUNICATION, Resource.BACKWARD_COMMUNICATION]] = 1.0
    weights[Resource.OPTIMIZER] = 1 / num_microbatches
    for collective, slowed in COLLECTIVES_OF_STATES:
        is_of_step = collective in range(*STEP.indices(len(Resource)))
        share = 1 / num_microbatches if is_of_step else 1.0
        weights[collective] = share * (1 - rest + rest * exposed)
        weights[slowed] = share * rest * (1 - exposed)
    return weights


def beside_compute(collectives: Any, slowed: Any, compute: Any, num_groups: Any) -> Any:
    """Seconds that collectives of states add to the compute that they run beside.

    A stage's parameters travel in ``num_groups`` equal groups, one per block where all blocks
    have as many. The first group is
    gathered before its block's forward, or the last one's gradients are summed after its
    backward: that part is exposed. Each of the others runs beside the compute of one block. It
    either ends before that, which takes ``slowed`` seconds longer in all, or is waited for.
    ``slowed`` is no more than ``collectives``, so that the fewer the groups, the more is exposed.

    >>> float(beside_compute(4.0, 1.0, 12.0, 4)), float(beside_compute(4.0, 1.0, 2.0, 4))
    (1.75, 2.5)
    """
    rest = 1 - 1 / num_groups
    return collectives / num_groups + rest * np.maximum(slowed, collectives - compute)


def seconds_of_passes(
    seconds: Floats, num_groups: Any, shares_links: bool
) -> tuple[Any, Any, Any, Any]:
    """Of ``seconds[..., RESOURCE]``: forward and backward of a micro-batch; of a step what
    gathering parameters adds to its first forward, and what comes after its last backward.

    Collectives of states run beside compute, and beside the stage's other collectives unless they
    share links with those. What the host takes to issue a pass is not in it.
    """
    found: list[tuple[Any, Any]] = []
    for direction in ("FORWARD", "BACKWARD"):
        compute = seconds[..., Resource[f"{direction}_COMPUTE"]]
        communication = seconds[..., Resource[f"{direction}_COMMUNICATION"]]
        added = [
            beside_compute(
                seconds[..., collective], seconds[..., slowed],
                compute if shares_links else compute + communication, num_groups,
            )
            for collective, slowed in COLLECTIVES_OF_STATES[len(found) :: 2]
        ]  # fmt: skip
        found.append((compute + communication + added[0], added[1]))
    (forward, gather), (backward, sync) = found
    return forward, backward, gather, sync + seconds[..., Resource.OPTIMIZER]
