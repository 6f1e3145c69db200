"""What a stage costs in all: seconds per micro-batch and per step, bytes by category.

In: the sums of its blocks (``stage_cost``). Out: what a device or its host waits for, and what
a pipeline does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .prices import Seconds

N = TypeVar("N", int, float)

BRIEF = ("transient", "reserve", "communicators")
"""Memory that the stages of a rank take in turn, or once. The prices of the search have the
communicators of a stage's mesh in its reserve, and those of messages not at all."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage's seconds and bytes. ``seconds`` per micro-batch and, the last two, per step.

    ``receive_seconds`` are the transfers from earlier stages (forward, backward), per
    micro-batch. ``memory_bytes`` by category, see ``StagePrediction``. ``late_seconds`` of the
    backward are the gradients of weights, where they are put off; None where that is not known.
    """

    seconds: Seconds
    receive_seconds: tuple[float, float]
    memory_bytes: Mapping[str, float]
    activation_bytes: float
    late_seconds: float | None = None

    @property
    def compute_seconds(self) -> tuple[float, float]:
        """Forward and backward: until the device has computed and the host issued each block."""
        own = self.seconds
        forward = max(own.forward_compute, own.forward_issue)
        return forward, max(own.backward_compute, own.backward_issue)

    @property
    def forward_seconds(self) -> float:
        own = self.seconds
        return self.compute_seconds[0] + own.forward_communication + own.forward_states

    @property
    def backward_seconds(self) -> float:
        own = self.seconds
        return self.compute_seconds[1] + own.backward_communication + own.backward_states

    @property
    def step_seconds(self) -> float:
        return self.seconds.gradient_sync + self.seconds.optimizer

    def objective(self, num_microbatches: int) -> float:
        """Seconds per micro-batch with the step's share: what the solvers minimize.

        The device's alone: that the host may take longer to issue a pass is no sum of ops.
        """
        microbatch = sum(self.seconds[:6]) + sum(self.receive_seconds)
        return microbatch + self.step_seconds / num_microbatches

    def once_and_slowest(self, num_microbatches: int) -> tuple[float, float]:
        """What a pipeline waits for it once, and what it takes more as the slowest stage of all:
        messages go beside the compute of other micro-batches."""
        micro = self.forward_seconds + self.backward_seconds
        rest = (num_microbatches - 1) * micro + self.step_seconds
        return micro + sum(self.receive_seconds), rest

    @property
    def total_bytes(self) -> float:
        return sum(self.memory_bytes.values())


def together(stages: Iterable[Mapping[str, N]], once: Collection[str]) -> dict[str, N]:
    """The bytes by category of a rank that runs several stages; those of ``once`` count once.

    >>> together(({"parameters": 3, "transient": 2}, {"parameters": 1, "transient": 4}),
    ...          once=("transient",))
    {'parameters': 4, 'transient': 4}
    """
    found: dict[str, N] = {}
    for stage in stages:
        for name, size in stage.items():
            if name in found:
                found[name] = max(found[name], size) if name in once else found[name] + size
            else:
                found[name] = size
    return found
