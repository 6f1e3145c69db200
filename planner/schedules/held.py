"""Micro-batches that stages of a schedule hold at once, by the half of their backward still to run.

In: a schedule, the numbers of stages and micro-batches. Out: for each stage the pairs
(micro-batches whose backward has not begun, micro-batches that wait for weight gradients only) that
are held at some time, without dominated pairs. A schedule that does not split backwards has a
single pair, with 0 as the second number.

>>> half_pairs("1f1b", 1, 3, 8), half_pairs("zb-h1", 3, 3, 8), half_pairs("zb-h1", 1, 3, 8)
(((1, 0),), ((3, 0), (2, 1)), ((1, 2), (0, 3)))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ...cost_model.simulator.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVES,
    RECV_FORWARD,
    SEND_FORWARD,
    SENDS,
    WEIGHT_BACKWARD,
    Action,
    Schedule,
)
from .catalogue import Size
from .check import sends_under_way
from .schedules import can_have, compute_orders, find_schedule, in_flight

HalfPairs = tuple[tuple[int, int], ...]

MANY_TIMES = 4
"""Ratio of micro-batches to stages beyond which more micro-batches do not raise the number held."""


@lru_cache(maxsize=64)
def splits(name: str) -> bool:
    """Return whether a schedule splits backwards and defers the weight gradients.

    >>> splits("zb-h2"), splits("eager-1f1b")
    (True, False)
    """
    info = find_schedule(name)
    if info.splits_backward is not None:
        return info.splits_backward
    orders = info.orders(Size(2, 4, info.chunks[0]))
    return any(action.kind == WEIGHT_BACKWARD for row in orders for action in row)


@lru_cache(maxsize=65536)
def half_pairs(name: str, depth: int, num_stages: int, num_microbatches: int) -> HalfPairs:
    """Return the largest pairs (micro-batches before their backward, micro-batches with deferred
    weight gradients) that a stage holds at one time, without pairs that another pair exceeds in
    both. ``depth``: number of stages from this stage to the last, both included."""
    if find_schedule(name).is_registered:
        number = max(num_stages, depth)
        if not can_have(name, number, num_microbatches, 1):
            return ((1, 0),)  # at least
        return stage_half_pairs(name, number, num_microbatches)[number - depth]
    if not splits(name):
        return ((in_flight(name, depth, num_stages, num_microbatches), 0),)
    if num_stages == 1:
        return ((1, 0),)
    num_stages = max(num_stages, depth)
    found = stage_half_pairs(name, num_stages, min(num_microbatches, MANY_TIMES * num_stages))
    return found[num_stages - depth]


@lru_cache(maxsize=1024)
def stage_half_pairs(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[HalfPairs, ...]:
    """Return, for every stage, the largest pairs (micro-batches before their backward, with
    deferred weight gradients) held at one time, counted in the schedule's table."""
    held = [[0, 0] for _ in range(num_stages)]
    seen: list[set[tuple[int, int]]] = [set() for _ in range(num_stages)]
    for row in compute_orders(name, num_stages, num_microbatches, num_chunks):
        for kind, stage, *_ in row:
            own = held[stage]
            if kind == FORWARD:
                own[0] += 1
            elif kind in (BACKWARD, INPUT_BACKWARD):
                own[0] -= 1
                own[1] += kind == INPUT_BACKWARD
            elif kind == WEIGHT_BACKWARD:
                own[1] -= 1
            seen[stage].add((own[0], own[1]))
    return tuple(_largest(each) for each in seen)


def _largest(pairs: set[tuple[int, int]]) -> HalfPairs:
    found: list[tuple[int, int]] = []
    for waiting, late in sorted(pairs, reverse=True):
        if not found or late > found[-1][1]:
            found.append((waiting, late))
    return tuple(found)


def is_split(pairs: HalfPairs) -> bool:
    """Return whether some micro-batches have deferred weight gradients. ``pairs`` are numbers of
    micro-batches (before their backward, with deferred weight gradients)."""
    return any(late for _, late in pairs)


def most_held(pairs: HalfPairs) -> int:
    """Return the most micro-batches held at once. ``pairs`` are numbers of micro-batches (before
    their backward, with deferred weight gradients)."""
    return max(waiting + late for waiting, late in pairs)


def held_bytes(pairs: HalfPairs, kept_bytes: float, late_bytes: float) -> float:
    """Return the most bytes of activations that a stage holds at once, given its ``pairs`` of
    numbers of micro-batches (before their backward, with deferred weight gradients), which hold
    ``kept_bytes`` and ``late_bytes`` each.

    >>> held_bytes(((3, 0), (2, 1)), 10.0, 20.0)
    40.0
    """
    return max(waiting * kept_bytes + late * late_bytes for waiting, late in pairs)


KEPT_ON_GLOO = 4
"""Least number of messages per receiver that a gloo sender keeps before its host waits for the
oldest. On a GPU the host does not wait, so the schedule's own bound suffices."""

Pair = tuple[int, int]
"""Sending and receiving stage of a message; gradients go to an earlier stage."""

_Unit = tuple[bool, int, int, int]
"""Key of a message: whether it is an activation, its receiving stage, micro-batch and slice."""


def sends_kept(schedule: Schedule, *, is_gpu: bool) -> int:
    """Return how many sent messages a rank keeps in memory, at most, per receiving rank."""
    most = sends_under_way(schedule)
    return most if is_gpu else max(most, KEPT_ON_GLOO)


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """Bytes of one micro-batch's message by (sending stage, receiving stage): ``sent`` as held by a
    sending device, ``taken`` as held by a receiving device.

    A pair of stages without an entry sends nothing.
    """

    sent: Mapping[Pair, float]
    taken: Mapping[Pair, float]


def messages_held(
    schedule: Schedule, rank: int, sizes: MessageBytes, most: int
) -> Iterator[tuple[Action, float]]:
    """Yield each action of a rank except sends and receives, with the bytes of the messages that
    the rank holds during it. ``most``: number of sent messages kept per receiving rank.

    Example: two stages on two ranks that exchange messages of 8 bytes and keep one:

    >>> from .schedules import build_schedule
    >>> sizes = MessageBytes({(0, 1): 8.0, (1, 0): 8.0}, {(0, 1): 8.0, (1, 0): 8.0})
    >>> held = messages_held(build_schedule("1f1b", 2, 2), 0, sizes, 1)
    >>> [(str(action), num_bytes) for action, num_bytes in held]
    [('0F0', 0.0), ('0F1', 8.0), ('0B0', 8.0), ('0B1', 8.0), ('0REDUCE', 8.0), ('0STEP', 8.0)]
    """
    walk = _Walk(schedule, rank, sizes, most)
    for action in schedule.table[rank]:
        if action.kind in RECEIVES:
            walk.post(action)
        elif action.kind in SENDS:
            walk.send(action)
        else:
            walk.take(action)
            yield action, walk.num_bytes
            walk.give(action)


@dataclass
class _Walk:
    """Messages that a rank holds at one point of its list of actions; each method advances by an
    action. ``most``: number of sent messages kept per receiving rank."""

    schedule: Schedule
    rank: int
    sizes: MessageBytes
    most: int
    num_bytes: float = 0.0
    expected: dict[int, deque[Action]] = field(default_factory=dict)
    arrived: set[Action] = field(default_factory=set)
    waiting: dict[_Unit, float] = field(default_factory=dict)
    kept: dict[int, deque[float]] = field(default_factory=dict)
    takers: dict[tuple[int, bool, int], list[Pair]] = field(default_factory=dict)
    senders: dict[tuple[int, bool], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for source, taker in self.sizes.sent:
            is_forward, peer = source < taker, self.schedule.stage_rank[taker]
            self.takers.setdefault((source, is_forward, peer), []).append((source, taker))
            self.senders.setdefault((taker, is_forward), []).append(source)
        for other, row in enumerate(self.schedule.table):
            sends = (a for a in row if a.kind in SENDS and self._to(a, self.rank))
            self.expected[other] = deque(sends) if other != self.rank else deque()

    def post(self, receive: Action) -> None:
        """Add the messages that ``receive`` takes, and all earlier messages of the senders."""
        is_forward = receive.kind == RECV_FORWARD
        kind = SEND_FORWARD if is_forward else "SEND_B"
        for source in self.senders.get((receive.stage, is_forward), ()):
            other = self.schedule.stage_rank[source]
            if other == self.rank:
                continue
            wanted = receive._replace(kind=kind, stage=source)
            lane = self.expected[other]
            while wanted not in self.arrived and lane:
                self._arrive(lane.popleft())

    def _arrive(self, send: Action) -> None:
        self.arrived.add(send)
        for pair in self._to(send, self.rank):
            self._wait(send, pair, self.sizes.taken[pair])

    def send(self, action: Action) -> None:
        """Keep a sent message for each receiving rank; drop the rank's oldest beyond ``most``."""
        for peer in dict.fromkeys(self.schedule.stage_rank):
            pairs = self._to(action, peer) if peer != self.rank else ()
            if not pairs:
                continue
            kept = self.kept.setdefault(peer, deque())
            kept.append(self._share(action) * sum(self.sizes.sent[pair] for pair in pairs))
            self.num_bytes += kept[-1] - (kept.popleft() if len(kept) > self.most else 0.0)

    def take(self, action: Action) -> None:
        """Remove the messages that an action consumes as its inputs."""
        if action.kind in (FORWARD, BACKWARD, INPUT_BACKWARD):
            is_forward = action.kind == FORWARD
            unit = is_forward, action.stage, action.microbatch, action.slice
            self.num_bytes -= self.waiting.pop(unit, 0.0)

    def give(self, action: Action) -> None:
        """Add the results of an action that other stages of the same rank will read."""
        if action.kind in (FORWARD, BACKWARD, INPUT_BACKWARD):
            for pair in self._to(action, self.rank):
                self._wait(action, pair, self.sizes.taken[pair])

    def _wait(self, made: Action, pair: Pair, num_bytes: float) -> None:
        unit = pair[0] < pair[1], pair[1], made.microbatch, made.slice
        size = self._share(made) * num_bytes
        self.waiting[unit] = self.waiting.get(unit, 0.0) + size
        self.num_bytes += size

    def _to(self, made: Action, rank: int) -> Sequence[Pair]:
        """Return the (sending, receiving) stages by which ``rank`` gets the result ``made``."""
        return self.takers.get((made.stage, made.kind in (FORWARD, SEND_FORWARD), rank), ())

    def _share(self, action: Action) -> float:
        """Return the fraction of a sequence in the action's slice; 1 if it is not sliced."""
        slices = self.schedule.slices
        return slices[action.slice] / sum(slices) if slices else 1.0
