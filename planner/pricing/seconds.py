"""What a node, a parameter or a block costs: seconds by direction and resource, bytes held."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from ...cost_model.cluster import Source


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
