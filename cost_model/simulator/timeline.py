"""A simulated step: the events on each pipeline rank, and the time that is lost to waiting.

A pipeline rank stands for ``replicas`` devices, its data- and tensor-parallel peers, which
do the same at the same time and are therefore simulated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from .actions import Action

Stream = Literal["compute", "send forward", "send backward", "gradient sync", "parameter gather"]
STREAMS: tuple[Stream, ...] = get_args(Stream)

NO_STAGE = -1


class Event(NamedTuple):
    """Execution of an action on a stream of its rank, with its start and end. A message is one
    event, on a sending stream of its sender; ``to`` is the receiving stage. A collective is one
    event per bucket: ``REDUCE`` on ``"gradient sync"``, ``GATHER`` on ``"parameter gather"``. A
    forward that waits for parameters within is one event, its wait included."""

    action: Action
    start_seconds: float
    end_seconds: float
    stream: Stream
    to: int = NO_STAGE


class Exposed(NamedTuple):
    """Seconds of a step in which a rank communicates, or waits for communication, and does not
    compute. ``inside``: collectives within forwards and backwards (tensor parallelism, ZeRO 3);
    ``messages``: waiting for a message of another stage that is on its way; ``gradient_sync`` and
    ``gather``: waiting for gradients to be summed and for parameters."""

    inside: float = 0.0
    messages: float = 0.0
    gradient_sync: float = 0.0
    gather: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Simulated training step; tuples have one entry per pipeline rank.

    ``bubble_fraction``: the share of the step, averaged over ranks, in which a rank neither
    computes nor runs the optimizer nor takes part in a collective. ``exposed``: communication that
    no compute hides. ``slowdown_seconds``: additional time of compute because of collectives at the
    same time. ``peak_activation_bytes``: the most bytes that micro-batches in flight hold at once;
    ``peak_memory_bytes`` adds static memory. ``memory_bytes``: the held bytes whenever they change,
    as (second, bytes). ``replicas``: the devices that each rank stands for.
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
        """Seconds of communication of each rank that no compute hides."""
        return tuple(sum(each) for each in self.exposed)

    @property
    def longest_span_seconds(self) -> float:
        """Largest number of seconds that a rank takes from the start of its first action to the end
        of its last. Zero-bubble papers measure a step so: a rank may begin the next step without
        the others."""
        rows = [[each for each in events if each.stream == "compute"] for events in self.events]
        return max(row[-1].end_seconds - row[0].start_seconds for row in rows if row)

    @property
    def num_devices(self) -> int:
        return sum(self.replicas)
