"""Messages on their way: each pipeline rank has one port to send by and one to receive by.

In: messages, when each is ready (sent, and its receive posted). Out: when each arrives.

A message of ``latency`` α takes its sender's port o seconds (its bytes over the link's rate)
and flows into its receiver's port α later, as fast as it leaves. Messages to one rank leave one
after the other, in the order in which they are ready, at one moment in that of the rank's row.
Messages to several ranks share the port evenly, as connections do. A port that more flows into
than it lets through, one second of messages per second, keeps the rest waiting in the network:

    arrive = end of sending + α + seconds that wait at the receiver's port then
    d waiting / dt = sum of the rates that flow in - 1, as long as any waits

Alone a message takes α + o (Hockney, The communication challenge for MPP, Parallel Computing
20, 1994). Two that come together are there together, after α + 2o: their packets take turns.
"""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

LEAVES, LEFT, FLOWS, PASSES = 0, 1, 2, 3


class Message(NamedTuple):
    """Message from pipeline rank ``sender`` to rank ``receiver``. ``number`` (of the compute action
    that needs it) and ``source`` (stage) identify it. ``place`` is the index of its send in the
    sender's row of actions, ``latency`` the seconds until its first byte arrives, ``occupied`` the
    seconds that it takes on a port that no other message shares."""

    sender: int
    receiver: int
    number: int
    source: int
    place: int
    latency: float
    occupied: float


class Arrival(NamedTuple):
    """Message that has arrived, with the times (seconds) at which its sending began, its last byte
    left the sender and its last byte arrived."""

    message: Message
    start_seconds: float
    left_seconds: float
    end_seconds: float


class _Sending:
    """Sending port of a rank. For each receiver it has a queue of messages and, for the first
    message of the queue, the seconds of sending that are left and the time of its start."""

    def __init__(self, zero: float) -> None:
        self.queues: defaultdict[int, deque[Message]] = defaultdict(deque)
        self.left: dict[int, float] = {}
        self.began: dict[int, float] = {}
        self.seen = zero
        self.version = 0

    def run(self, now: float) -> None:
        """Advance the messages that are being sent to the time ``now`` (seconds)."""
        if self.left:
            done = (now - self.seen) / len(self.left)
            for receiver in self.left:
                self.left[receiver] -= done
        self.seen = now


class _Receiving:
    """Receiving port of a rank: the rate at which each message flows in, and the backlog: the
    seconds that the port needs for data that has arrived but not passed it."""

    def __init__(self, zero: float) -> None:
        self.rates: dict[int, float] = {}
        self.waiting = self.seen = self.zero = zero

    def run(self, now: float) -> float:
        """Advance the port to the time ``now`` (seconds); return the seconds of its backlog."""
        if self.waiting or len(self.rates) > 1:  # one alone flows no faster than it passes
            more = (now - self.seen) * (sum(self.rates.values()) - 1)
            self.waiting = max(self.waiting + more, self.zero)
        self.seen = now
        return self.waiting


class Ports:
    """Sending and receiving ports of all ranks, with the messages that are on their way and share
    them. Messages may be added in any order, but none may be ready before the time at which the
    message that ``next`` returned last left its sender.

    >>> ports = Ports(3, 0.0)
    >>> for receiver in (1, 2):
    ...     ports.add(0.0, Message(0, receiver, receiver, 0, 0, latency=0.5, occupied=2.0))
    >>> ports.next().end_seconds, ports.next().end_seconds, ports.next()
    (4.5, 4.5, None)
    """

    def __init__(self, num_ranks: int, zero: float) -> None:
        self._sending = [_Sending(zero) for _ in range(num_ranks)]
        self._receiving = [_Receiving(zero) for _ in range(num_ranks)]
        self._one = zero + 1
        self._order = count()
        self._coming: list[tuple[float, int, int, int, Message, Any]] = []

    def add(self, ready_seconds: float, message: Message) -> None:
        """Add a message that is ready to leave its sender at time ``ready_seconds``."""
        self._push(ready_seconds, LEAVES, message, 0)

    def next(self) -> Arrival | None:
        """Return the next message to have arrived in full, with its times; None if no messages are
        left."""
        coming = self._coming
        while coming:
            now, what, _, _, message, value = heappop(coming)
            if what == LEAVES:
                self._leaves(now, message)
            elif what == LEFT:
                if value == self._sending[message.sender].version:
                    self._left(now, message)
            else:
                port = self._receiving[message.receiver]
                waiting = port.run(now)
                if what == PASSES:
                    port.rates.pop(id(message), None)
                    began, left = value
                    return Arrival(message, began, left, now + waiting)
                port.rates[id(message)] = value  # it lives until it passes
        return None

    def _push(self, when: float, what: int, message: Message, value: Any) -> None:
        heappush(self._coming, (when, what, message.place, next(self._order), message, value))

    def _leaves(self, now: float, message: Message) -> None:
        port = self._sending[message.sender]
        queue = port.queues[message.receiver]
        queue.append(message)
        if len(queue) == 1:
            port.run(now)
            self._begin(now, message, port)
            self._share(now, port)

    def _begin(self, now: float, message: Message, port: _Sending) -> None:
        """Begin at time ``now`` to send ``message``, the first in the queue to its receiver."""
        port.left[message.receiver] = message.occupied
        port.began[message.receiver] = now

    def _left(self, now: float, message: Message) -> None:
        port, receiver = self._sending[message.sender], message.receiver
        port.run(now)
        queue = port.queues[receiver]
        queue.popleft()
        del port.left[receiver]
        self._push(now + message.latency, PASSES, message, (port.began[receiver], now))
        if queue:
            self._begin(now, queue[0], port)
        self._share(now, port)

    def _share(self, now: float, port: _Sending) -> None:
        """Divide a sending port equally among its current messages at time ``now``: tell the
        receivers the new rates, and schedule the end of the message that ends first."""
        port.version += 1
        left, queues = port.left, port.queues
        number = len(left)
        if number == 1:  # as below, for the commonest case
            (receiver,) = left
            head = queues[receiver][0]
            self._push(now + head.latency, FLOWS, head, self._one)
            end = now + max(left[receiver], 0 * now)
            self._push(end, LEFT, head, port.version)
        elif number:
            for receiver in left:
                head = queues[receiver][0]
                self._push(now + head.latency, FLOWS, head, self._one / number)
            receiver = min(left, key=left.__getitem__)
            end = now + max(left[receiver], 0 * now) * number
            self._push(end, LEFT, queues[receiver][0], port.version)
