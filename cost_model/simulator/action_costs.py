"""What single actions of a schedule cost, from what its stages cost.

In: a schedule and the ``StageCosts`` of its stages. Out: the seconds of each compute action by
kind and stage, of each message by sender and receiver, and the part that a slice is of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    SEND_FORWARD,
    WEIGHT_BACKWARD,
    Schedule,
    Wiring,
    chain,
)
from .stage_costs import StageCosts


class MessageCost(NamedTuple):
    """Seconds of one message: until its first byte is there, of a port, of its two ends' calls."""

    latency: float
    occupied: float
    send_call: float
    receive_call: float


MessageCosts = dict[tuple[int, int], MessageCost]


def message_costs(schedule: Schedule, costs: StageCosts) -> tuple[MessageCosts, MessageCosts]:
    """What the messages of each direction cost, by (sending stage, receiving stage)."""
    edges = chain(schedule.num_stages) if schedule.edges is None else schedule.edges
    none = (0 * costs.forward_seconds[0],) * len(edges)
    latency, forward = costs.send_latency_seconds or none, costs.send_seconds or none
    backward = costs.send_backward_seconds or forward
    calls, posts = costs.send_call_seconds or none, costs.receive_call_seconds or none
    there: MessageCosts = {}
    back: MessageCosts = {}
    for at, (source, target) in enumerate(edges):
        for found, key, whole in (
            (there, (source, target), forward[at]),
            (back, (target, source), backward[at]),
        ):
            first = min(latency[at], whole)
            found[key] = MessageCost(first, whole - first, calls[at], posts[at])
    return there, back


def wiring_of_ranks(schedule: Schedule) -> Wiring:
    """The schedule's wiring without what a rank makes for itself: one message for each."""
    ranks = schedule.stage_rank
    return Wiring(
        *(
            tuple(
                tuple(other for other in needed if ranks[other] != ranks[stage])
                for stage, needed in enumerate(side)
            )
            for side in schedule.wiring
        )
    )


def slice_shares(schedule: Schedule, costs: StageCosts) -> dict[str, Sequence[float]]:
    """By kind, the part of a micro-batch that each slice is; empty where sequences are whole.

    A slice's message occupies its ports by its length.
    """
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
    """A slice's bytes by its length; those of all slices add up to the whole."""
    length, before = sum(slices), sum(slices[:part])
    return num_bytes * (before + slices[part]) // length - num_bytes * before // length


def action_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """The seconds of each compute action, by kind and stage."""
    whole = costs.backward_seconds
    weight = costs.weight_backward_seconds or [s / 2 for s in whole]
    return {
        FORWARD: costs.forward_seconds,
        BACKWARD: whole,
        INPUT_BACKWARD: [s - w for s, w in zip(whole, weight, strict=True)],
        WEIGHT_BACKWARD: weight,
    }


def inside_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """Of those, the seconds of collectives; a weight backward has none. Empty if none has."""
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
