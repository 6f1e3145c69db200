"""What single actions of a schedule cost, from what its stages cost.

In: a schedule and the ``StageCosts`` of its stages. Out: the seconds of each compute action by
kind and stage, of each message by sender and receiver, and the part that a slice is of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    SEND_FORWARD,
    WEIGHT_BACKWARD,
    Schedule,
    chain,
)
from .stage_costs import StageCosts


def send_seconds(
    schedule: Schedule, costs: StageCosts
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """The seconds of the messages of each direction, by (sending stage, receiving stage)."""
    edges = chain(schedule.num_stages) if schedule.edges is None else schedule.edges
    forward = costs.send_seconds
    backward = costs.send_backward_seconds or forward
    there = dict(zip(edges, forward, strict=False))
    back = {(target, source): s for (source, target), s in zip(edges, backward, strict=False)}
    return there, back


def num_messages(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many messages of other ranks each stage's forward and backward wait for."""
    ranks = schedule.stage_rank
    forward, backward = (
        tuple(sum(ranks[other] != ranks[s] for other in needed) for s, needed in enumerate(side))
        for side in schedule.wiring
    )
    return forward, backward


def slice_shares(schedule: Schedule, costs: StageCosts) -> dict[str, Sequence[float]]:
    """By kind, the part of a micro-batch that each slice is; empty where sequences are whole.

    A slice's message is by its length; a message costs nothing to begin.
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
