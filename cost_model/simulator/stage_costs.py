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
    """Buckets in which a stage's parameters are gathered and its gradients summed. Each tuple has a
    share per bucket, in the order of the forward, and adds up to 1: shares of the forward's compute
    (``forward``), of the gathering time (``gathered``), of the backward's compute (``backward``)
    and of the summing time (``summed``)."""

    forward: tuple[float, ...]
    gathered: tuple[float, ...]
    backward: tuple[float, ...]
    summed: tuple[float, ...]

    @staticmethod
    def equal(number: int) -> Buckets:
        """Return ``number`` buckets with equal shares of compute and communication."""
        return Buckets(*((1 / number,) * number for _ in range(4)))


ONE_BUCKET = Buckets((1,), (1,), (1,), (1,))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds and bytes of a pipeline schedule, one entry per stage in each field; an empty field
    means zeros, unless another default is given.

    Per micro-batch: ``forward_seconds`` and ``backward_seconds`` include the collectives inside,
    whose seconds ``forward_communication_seconds`` and ``backward_communication_seconds`` give.
    ``forward_states_seconds`` and ``backward_states_seconds``: collectives of parameters and
    gradients that run beside this compute (for the timeline alone); ``forward_copies_seconds`` and
    ``backward_copies_seconds``: likewise copies to and from the host. ``weight_backward_seconds``:
    part of the backward that a schedule may delay, by default half. ``activation_bytes``: bytes
    kept from forward to backward, on the worst rank.

    Per message of a micro-batch, with an entry for each of ``edges`` (None: each stage to the
    next): ``send_seconds`` forwards; ``send_backward_seconds`` backwards, by default the same;
    ``send_latency_seconds``, the part of either in which its ranks can send and receive other
    messages; ``send_call_seconds`` and ``receive_call_seconds``, the time of the rank itself to
    call send and receive.

    Per step: ``gather_seconds`` to gather sharded parameters for the first forward,
    ``gradient_sync_seconds`` to sum gradients after the last backward, ``replica_sum_seconds`` to
    sum them over replicas of the stage in other pipeline ranks, ``step_seconds`` for the optimizer.
    ``slowed_share`` is the share of compute speed lost while parameters are gathered or gradients
    summed: 1, the default, stops the rank; below 1 they overlap, bucket by bucket (``buckets``, by
    default one), with the first forward and last backward. ``static_bytes`` are held all the time.

    ``slice_forward_shares`` and ``slice_backward_shares``: share of a micro-batch's time that each
    slice of the sequence takes in any stage, by default in proportion to its length.
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
    forward_copies_seconds: Sequence[float] = ()
    backward_copies_seconds: Sequence[float] = ()
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
    """Return the costs by stage of a schedule, given costs by part of the model: each stage has the
    costs of the part that it computes. Stages that compute the same part are replicas."""
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
    """Connection for messages from stage ``source`` (on rank ``sender``) to stage ``target`` (on
    rank ``receiver``). Seconds per message: ``latency`` until the first byte arrives, ``occupied``
    on the ports of both ranks, ``send_call`` and ``receive_call`` of the ranks' own time."""

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
    """Return the connections over which each stage receives messages, and the connections over
    which it sends, each sorted by the stage at the other end."""
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
    """Return for each kind of action the share of a micro-batch's seconds that each slice of its
    sequences takes; empty if sequences are whole. Messages are shared by length."""
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
    length. ``slices``: lengths of all slices; the shares of all slices add up to ``num_bytes``."""
    length, before = sum(slices), sum(slices[:part])
    return num_bytes * (before + slices[part]) // length - num_bytes * before // length


def action_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """Return the seconds of a micro-batch's forward, backward and halves of it, by kind and
    stage."""
    whole = costs.backward_seconds
    weight = costs.weight_backward_seconds or [s / 2 for s in whole]
    return {
        FORWARD: costs.forward_seconds,
        BACKWARD: whole,
        INPUT_BACKWARD: [s - w for s, w in zip(whole, weight, strict=True)],
        WEIGHT_BACKWARD: weight,
    }


def inside_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """Return the seconds of the collectives within a micro-batch's forward, backward and halves of
    it, by kind of action and stage; empty if unknown."""
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
