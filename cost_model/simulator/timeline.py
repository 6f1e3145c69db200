"""A simulated step: the events on each pipeline rank, and the time that is lost to waiting.

A pipeline rank stands for ``replicas`` devices, its data- and tensor-parallel peers, which
do the same at the same time and are therefore simulated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from .actions import Action

Stream = Literal[
    "compute", "send forward", "send backward", "gradient sync", "parameter gather", "host copies"
]
STREAMS: tuple[Stream, ...] = get_args(Stream)

NO_STAGE = -1


class Event(NamedTuple):
    """Execution of an action on a ``stream`` of its rank, with start and end in seconds. A message
    is one event, on the sender's stream; ``to`` is the stage that receives it. A collective is one
    event per bucket: ``REDUCE`` on ``"gradient sync"``, ``GATHER`` on ``"parameter gather"``. A
    forward that waits for parameters on its way is one event, which includes the waiting."""

    action: Action
    start_seconds: float
    end_seconds: float
    stream: Stream
    to: int = NO_STAGE


class Exposed(NamedTuple):
    """Seconds of a step in which a rank communicates, or waits for communication, and does not
    compute. ``inside``: collectives within forwards and backwards (tensor parallelism, ZeRO 3);
    ``messages``: waiting for a message from another stage; ``gradient_sync``: waiting until
    gradients are summed; ``gather``: waiting until parameters are gathered."""

    inside: float = 0.0
    messages: float = 0.0
    gradient_sync: float = 0.0
    gather: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Simulated training step; tuples have one entry per pipeline rank.

    ``bubble_fraction``: the share of the step, averaged over ranks, in which a rank neither
    computes nor runs the optimizer nor takes part in a collective. ``exposed``: seconds of
    communication that do not overlap with compute. ``slowdown_seconds``: seconds that compute takes
    longer because of collectives at the same time. ``peak_activation_bytes``: the most bytes that
    micro-batches in flight hold at once; ``peak_memory_bytes`` adds memory that is held all the
    time. ``memory_bytes``: (second, bytes held from then on) at each change. ``replicas``: number
    of devices that each rank represents.
    """

    step_seconds: float
    bubble_fraction: float
    events: tuple[tuple[Event, ...], ...]
    exposed: tuple[Exposed, ...]
    slowdown_seconds: tuple[float, ...]
    peak_activation_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    memory_bytes: tuple[tuple[tuple[float, int], ...], ...]
    replicas: tuple[int, ...]

    @property
    def exposed_seconds(self) -> tuple[float, ...]:
        """Seconds of communication of each pipeline rank that do not overlap with compute."""
        return tuple(sum(each) for each in self.exposed)

    @property
    def num_devices(self) -> int:
        return sum(self.replicas)
