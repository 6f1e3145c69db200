"""What a node, a parameter or a block costs: seconds by direction and resource, bytes held."""

from __future__ import annotations

from enum import IntEnum
from operator import add
from typing import NamedTuple

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
    GRADIENT_SYNC = 6
    OPTIMIZER = 7
    FORWARD_ISSUE = 8
    BACKWARD_ISSUE = 9


MICROBATCH = slice(Resource.FORWARD_COMPUTE, Resource.GRADIENT_SYNC)
"""The resources whose seconds are of one micro-batch, and which the solvers add up."""

FORWARD = slice(Resource.FORWARD_COMPUTE, Resource.BACKWARD_COMPUTE)
"""The resources of the forward, but for gathering parameters: what recomputation repeats."""

STEP = slice(Resource.GRADIENT_SYNC, Resource.FORWARD_ISSUE)
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
    """Seconds of a micro-batch by direction and resource; ``gradient_sync`` and
    ``optimizer`` are of a step.

    ``forward_states``/``backward_states``: gathering parameters and scattering gradients in
    every micro-batch (ZeRO 2 and 3), which recomputation does not repeat.
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
    gradient_sync: float = 0.0
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


def objective_weights(num_microbatches: int) -> Floats:
    """What a second of each resource counts in the objective: seconds per micro-batch.

    >>> objective_weights(4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.25, 0.25, 0.0, 0.0]
    """
    weights = np.zeros(len(Resource))
    weights[MICROBATCH] = 1.0
    weights[STEP] = 1 / num_microbatches
    return weights
