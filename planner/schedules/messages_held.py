"""The bytes of messages that a rank holds at each action of its row of the schedule.

In: a schedule, a pipeline rank, the bytes of each message. Out: for each action of the rank that is
no send or receive, the bytes of the messages in its memory, without those that the action itself
reads or makes. A rank holds messages that

- it has received and needs later: posting a receive also posts all earlier messages of its sender;
- it has sent: the latest ``sends_kept`` to each receiver, until the step's end;
- one of its stages has made for another of its stages, which has not used them yet.

``runtime.exchange``, ``runtime.outbox`` and ``runtime.handover`` do what this predicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...cost_model.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVES,
    RECV_FORWARD,
    SEND_FORWARD,
    SENDS,
    Action,
    Schedule,
)
from .check import sends_under_way

KEPT_ON_GLOO = 4
"""On gloo a sender keeps at least this many messages to each receiver before its host waits for the
oldest. On a GPU the host does not wait, so the schedule's own bound is enough."""

Pair = tuple[int, int]
"""The sending and the receiving stage; gradients go from a later to an earlier stage."""

_Unit = tuple[bool, int, int, int]
"""Whether the message is an activation, the receiving stage, the micro-batch, the slice."""


def sends_kept(schedule: Schedule, *, is_gpu: bool) -> int:
    """The largest number of messages to one receiver that a rank keeps."""
    most = sends_under_way(schedule)
    return most if is_gpu else max(most, KEPT_ON_GLOO)


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """The bytes of a micro-batch's messages, on a device of the sending and of the receiving stage.

    A pair of stages without an entry sends nothing.
    """

    sent: Mapping[Pair, float]
    taken: Mapping[Pair, float]


def messages_held(
    schedule: Schedule, rank: int, sizes: MessageBytes, most: int
) -> Iterator[tuple[Action, float]]:
    """Each action of a rank but sends and receives, and the bytes of the messages held beside it.

    Of two stages on two ranks, one message of 8 bytes kept at a time:

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
    """A rank at some point of its row."""

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
        """Receives what a stage needs, and all that its senders send before."""
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
        """Keeps a message to each rank that takes it; the oldest of too many has gone."""
        for peer in dict.fromkeys(self.schedule.stage_rank):
            pairs = self._to(action, peer) if peer != self.rank else ()
            if not pairs:
                continue
            kept = self.kept.setdefault(peer, deque())
            kept.append(self._share(action) * sum(self.sizes.sent[pair] for pair in pairs))
            self.num_bytes += kept[-1] - (kept.popleft() if len(kept) > self.most else 0.0)

    def take(self, action: Action) -> None:
        """What the stage computes with is its own."""
        if action.kind in (FORWARD, BACKWARD, INPUT_BACKWARD):
            is_forward = action.kind == FORWARD
            unit = is_forward, action.stage, action.microbatch, action.slice
            self.num_bytes -= self.waiting.pop(unit, 0.0)

    def give(self, action: Action) -> None:
        """What it makes for other stages of the rank waits for them."""
        if action.kind in (FORWARD, BACKWARD, INPUT_BACKWARD):
            for pair in self._to(action, self.rank):
                self._wait(action, pair, self.sizes.taken[pair])

    def _wait(self, made: Action, pair: Pair, num_bytes: float) -> None:
        unit = pair[0] < pair[1], pair[1], made.microbatch, made.slice
        size = self._share(made) * num_bytes
        self.waiting[unit] = self.waiting.get(unit, 0.0) + size
        self.num_bytes += size

    def _to(self, made: Action, rank: int) -> Sequence[Pair]:
        """The messages of what a stage makes in an action to the stages of a rank."""
        return self.takers.get((made.stage, made.kind in (FORWARD, SEND_FORWARD), rank), ())

    def _share(self, action: Action) -> float:
        """Of a micro-batch's message, what one of a slice is."""
        slices = self.schedule.slices
        return slices[action.slice] / sum(slices) if slices else 1.0
