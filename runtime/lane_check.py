"""Whether both sides of each lane know the same messages in the same order.

In: what a rank sends and takes in a step, by lane. Out: nothing, or on every rank an error that
names the first message that differs. Without it a difference would be a hang, or, between
messages of one size, a wrong gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from ..planner.errors import PlanError
from .lanes import Lane
from .shared import gather_values

T = TypeVar("T")

Messages = Mapping[Lane, Sequence[str]]
"""The messages of a step in order, by lane."""


def check_lanes(sent: Messages, taken: Messages) -> None:
    """Raises PlanError AP542 on every rank where two sides differ. Collective over all ranks."""
    if dist.get_world_size() == 1:
        return
    digests = [_merged(found) for found in _gathered((_digests(sent), _digests(taken)))]
    lanes = digests[0].keys() | digests[1].keys()
    wrong = sorted(lane for lane in lanes if digests[0].get(lane) != digests[1].get(lane))
    if not wrong:
        return
    lane = wrong[0]
    ends = [_merged(found) for found in _gathered((_only(sent, lane), _only(taken, lane)))]
    pairs = zip_longest(ends[0].get(lane, ()), ends[1].get(lane, ()), fillvalue="nothing")
    number, (own, other) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    raise PlanError(
        "AP542",
        f"rank {lane[0]} sends rank {lane[1]} messages that rank {lane[1]} does not expect",
        why=f"message {number} is {own} on rank {lane[0]}, and {other} on rank {lane[1]}",
        where="schedule",
        fix="all ranks must run one plan file; otherwise report it as a bug",
    )


def _digests(found: Messages) -> dict[Lane, str]:
    return {
        lane: hashlib.sha256("\n".join(messages).encode()).hexdigest()
        for lane, messages in found.items() if messages
    }  # fmt: skip


def _only(found: Messages, lane: Lane) -> Messages:
    return {lane: found[lane]} if lane in found else {}


def _gathered(own: tuple[T, T]) -> list[tuple[T, ...]]:
    """Of every rank, in the order of ranks: the first of the two, and the second."""
    return list(zip(*gather_values(own), strict=True))


def _merged(parts: Sequence[Mapping[Lane, T]]) -> dict[Lane, T]:
    """Each lane's is of one rank."""
    return {lane: value for part in parts for lane, value in part.items()}
