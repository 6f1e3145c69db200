"""Costs of a schedule: seconds and bytes of each stage, and of its actions and messages.

In: the ``StageCosts`` of the stages, checked once, and a schedule. Out: the seconds of each compute
action by kind and stage, the lines that messages go by between stages of different ranks, with the
seconds of a message on each, and the part that a slice is of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from .actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    SEND_FORWARD,
    WEIGHT_BACKWARD,
    Edges,
    Schedule,
    chain,
)

OF_EDGES = ("send_", "receive_")
"""Prefixes of the fields of ``StageCosts`` that have one entry per edge between stages."""
OF_SLICES = ("slice_", "edges")
"""Prefixes of the fields of ``StageCosts`` whose entries belong neither to stages nor to edges."""


class Buckets(NamedTuple):
    """Buckets in which a stage's parameters are gathered and its gradients summed. Each tuple has
    one share per bucket, in the order of the forward, and adds up to 1. The tuples are shares of
    the forward's compute, of the time to gather, of the backward's compute, and of the time to
    sum."""

    forward: tuple[float, ...]
    gathered: tuple[float, ...]
    backward: tuple[float, ...]
    summed: tuple[float, ...]

    @staticmethod
    def equal(number: int) -> Buckets:
        """Return the shares of ``number`` equal buckets."""
        return Buckets(*((1 / number,) * number for _ in range(4)))


ONE_BUCKET = Buckets((1,), (1,), (1,), (1,))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds and bytes by stage, one entry per stage. Fields that are left empty are zero.

    ``forward_seconds``, ``backward_seconds``: of one micro-batch, including the collectives inside,
    whose seconds ``forward_communication_seconds`` and ``backward_communication_seconds`` also
    give. ``send_seconds[s]``: one micro-batch's message from stage s to s+1, and the same backwards
    unless ``send_backward_seconds[s]`` (from s+1 to s) says otherwise; one entry less than there
    are stages. With ``edges`` between stages they have one entry per edge.
    ``send_latency_seconds``: the part of them in which a message is on its way without keeping its
    ranks from sending and receiving others. ``send_call_seconds``, ``receive_call_seconds``: the
    time of a rank itself to send such a message and to post its receive; a message is on its way
    from the beginning of the call. All three are for both directions. ``forward_states_seconds``,
    ``backward_states_seconds``: collectives of parameters and gradients that run during a
    micro-batch's compute, for the timeline only (``forward_seconds`` and ``backward_seconds``
    include the time that they add). ``gather_seconds``: gathering sharded parameters, once per
    step, for the first forward. ``gradient_sync_seconds``: summing gradients, once per step, after
    the last backward. Where the ``slowed_share`` is below 1, both run beside that forward and that
    backward in ``buckets`` (one where this is empty): a part of the parameters is there before its
    part of the forward, and a part of the gradients is summed after its part of the backward. While
    one of them runs, that share of the rank's compute is lost: 0 where they do not disturb each
    other. With 1, the default, they stop their rank. ``step_seconds``: the optimizer, once.
    ``activation_bytes``: kept of one micro-batch until its backward, on the worst rank.
    ``static_bytes``: held throughout. ``weight_backward_seconds``: the part of the backward that a
    split schedule may delay, half of it by default. ``slice_forward_shares``,
    ``slice_backward_shares``: of a micro-batch in slices, the part of its time that each slice
    takes, in every stage; by default its share of the length. ``replica_sum_seconds``: summing a
    stage's gradients with those of its replicas in other pipeline ranks, once, where the schedule
    has replicas.
    """

    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    send_seconds: Sequence[float] = ()
    step_seconds: Sequence[float] = ()
    activation_bytes: Sequence[int] = ()
    static_bytes: Sequence[int] = ()
    send_backward_seconds: Sequence[float] = ()
    weight_backward_seconds: Sequence[float] = ()
    gradient_sync_seconds: Sequence[float] = ()
    gather_seconds: Sequence[float] = ()
    forward_communication_seconds: Sequence[float] = ()
    backward_communication_seconds: Sequence[float] = ()
    edges: Edges | None = None
    replica_sum_seconds: Sequence[float] = ()
    slice_forward_shares: Sequence[float] = ()
    slice_backward_shares: Sequence[float] = ()
    send_latency_seconds: Sequence[float] = ()
    send_call_seconds: Sequence[float] = ()
    receive_call_seconds: Sequence[float] = ()
    slowed_share: Sequence[float] = ()
    forward_states_seconds: Sequence[float] = ()
    backward_states_seconds: Sequence[float] = ()
    buckets: Sequence[Buckets] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        num_edges = stages - 1 if self.edges is None else len(self.edges)
        for name in self.__slots__:
            if name.startswith(OF_SLICES):
                continue
            found = len(getattr(self, name))
            length = num_edges if name.startswith(OF_EDGES) else stages
            if found != length and not (found == 0 and name != "backward_seconds"):
                raise ValueError(f"{name} has {found} entries for {stages} stages, not {length}")
        if not all(0 <= share <= 1 for share in self.slowed_share):
            raise ValueError(f"shares of compute that is lost: {self.slowed_share}")
        for buckets in self.buckets:
            if len(set(map(len, buckets))) > 1 or not buckets.forward:
                raise ValueError("a stage has at least one bucket, and of each all four shares")


def of_replicas(costs: StageCosts, schedule: Schedule) -> StageCosts:
    """Return the costs per stage of a schedule with replicas, given the costs per part of the
    model: replicas of a part have its costs."""
    if not schedule.parts:
        return costs
    if costs.edges is not None:
        raise ValueError("replicas of stages that are no chain")
    spread: dict[str, tuple[float, ...]] = {}
    for name in costs.__slots__:
        values = getattr(costs, name)
        if name.startswith(OF_SLICES) or not values:
            continue
        if name.startswith(OF_EDGES):
            assert schedule.edges is not None
            spread[name] = tuple(values[schedule.parts[source]] for source, _ in schedule.edges)
        else:
            spread[name] = tuple(values[part] for part in schedule.parts)
    return replace(costs, edges=schedule.edges, **spread)  # type: ignore[arg-type]


class Line(NamedTuple):
    """Connection for messages from stage ``source`` to stage ``target`` of another rank. Seconds of
    one message: ``latency``, until its first byte arrives; ``occupied``, for which it occupies a
    port; and the calls to send and to receive."""

    source: int
    target: int
    sender: int
    receiver: int
    latency: float
    occupied: float
    send_call: float
    receive_call: float


Lines = Sequence[Sequence[Sequence[Line]]]
"""Connections for messages of forwards (index 0) and of backwards (1): a list for each stage."""


def lines_of(schedule: Schedule, costs: StageCosts) -> tuple[Lines, Lines]:
    """Return the connections over which each stage receives, and those over which it sends, sorted
    by the number of the other stage."""
    edges = chain(schedule.num_stages) if schedule.edges is None else schedule.edges
    none = (0 * costs.forward_seconds[0],) * len(edges)
    latency, forward = costs.send_latency_seconds or none, costs.send_seconds or none
    seconds = forward, costs.send_backward_seconds or forward
    calls, posts = costs.send_call_seconds or none, costs.receive_call_seconds or none
    ranks = schedule.stage_rank
    into, out = ([[list[Line]() for _ in ranks] for _ in seconds] for _ in range(2))
    for at, edge in sorted(enumerate(edges), key=itemgetter(1)):
        for direction, (source, target) in enumerate((edge, edge[::-1])):
            if ranks[source] == ranks[target]:
                continue
            first = min(latency[at], seconds[direction][at])
            occupied = seconds[direction][at] - first
            ends = (source, target, ranks[source], ranks[target])
            line = Line(*ends, first, occupied, calls[at], posts[at])
            into[direction][target].append(line)
            out[direction][source].append(line)
    return into, out


def slice_shares(schedule: Schedule, costs: StageCosts) -> dict[str, Sequence[float]]:
    """Return each sequence slice's share of a micro-batch's seconds, by kind of action; empty if
    sequences are whole. The share of a slice's message is that of its length."""
    if not schedule.slices:
        return {}
    length = sum(schedule.slices)
    even = [each / length for each in schedule.slices]
    forward = costs.slice_forward_shares or even
    backward = costs.slice_backward_shares or even
    if len(forward) != len(even) or len(backward) != len(even):
        raise ValueError(f"shares of {len(forward)} and {len(backward)} slices, not {len(even)}")
    return {
        FORWARD: forward,
        BACKWARD: backward,
        INPUT_BACKWARD: backward,
        WEIGHT_BACKWARD: backward,
        SEND_FORWARD: even,
    }


def part_of(num_bytes: int, slices: Sequence[int], part: int) -> int:
    """Return the share of ``num_bytes`` that belongs to slice number ``part``, in proportion to its
    length; the shares add up exactly."""
    length, before = sum(slices), sum(slices[:part])
    return num_bytes * (before + slices[part]) // length - num_bytes * before // length


def action_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """Return the seconds of each compute action, by kind and stage."""
    whole = costs.backward_seconds
    weight = costs.weight_backward_seconds or [s / 2 for s in whole]
    return {
        FORWARD: costs.forward_seconds,
        BACKWARD: whole,
        INPUT_BACKWARD: [s - w for s, w in zip(whole, weight, strict=True)],
        WEIGHT_BACKWARD: weight,
    }


def inside_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """Return the seconds of collectives inside compute actions, by kind and stage; empty if none
    are known."""
    if not costs.forward_communication_seconds and not costs.backward_communication_seconds:
        return {}
    none = (0.0,) * len(costs.forward_seconds)
    backward = costs.backward_communication_seconds or none
    return {
        FORWARD: costs.forward_communication_seconds or none,
        BACKWARD: backward,
        INPUT_BACKWARD: backward,
        WEIGHT_BACKWARD: none,
    }
