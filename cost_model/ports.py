"""Messages on their way: each pipeline rank has one port to send by and one to receive by.

In: messages, when each is ready (sent, and its receive posted). Out: when each arrives.

A message of ``latency`` α that occupies a port for o seconds (its bytes over the link's rate)
leaves once it is ready and its sender's port is free, keeps that port for o, reaches its
receiver's port α later and keeps that one for o from when it is free:

    start  = max(ready, port of the sender free)
    arrive = max(start + α, port of the receiver free) + o

Alone it takes α + o (Hockney, The communication challenge for MPP, Parallel Computing 20, 1994).
Between the two ports it waits in the network, so it keeps no other message from leaving. A
port serves messages in the order in which they come to it, those that come at the same moment
in the order of its rank's row of the action table.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal, NamedTuple

LEAVES, REACHES = 0, 1


class Message(NamedTuple):
    """One message. ``number`` and ``source`` are its names, the rest is as above.

    ``sent_at`` and ``posted_at`` are the places of its send and of its receive in their rows.
    """

    sender: int
    receiver: int
    number: int
    source: int
    sent_at: int
    posted_at: int
    latency: float
    occupied: float


class Arrival(NamedTuple):
    """A message that has come, when it left, and when its sender's port was free again."""

    message: Message
    start_seconds: float
    left_seconds: float
    end_seconds: float


_Entry = tuple[float, Literal[0, 1], int, Message, float]


class Ports:
    """The ports of all ranks, and the messages that are on their way.

    Messages may be given in any order, as long as none is ready before the last that arrived
    had reached its receiver: so it is if every rank goes on as far as it can after each arrival.

    >>> ports = Ports(3, 0.0)
    >>> for receiver in (1, 2):
    ...     ports.add(0.0, Message(0, receiver, 0, 0, receiver, 0, latency=0.5, occupied=2.0))
    >>> ports.next().end_seconds, ports.next().end_seconds, ports.next()
    (2.5, 4.5, None)
    """

    def __init__(self, num_ranks: int, zero: float) -> None:
        self._send_free = [zero] * num_ranks
        self._receive_free = [zero] * num_ranks
        self._coming: list[_Entry] = []

    def add(self, ready_seconds: float, message: Message) -> None:
        """A message that is ready then."""
        heappush(
            self._coming, (ready_seconds, LEAVES, message.sent_at, message, ready_seconds)
        )  # fmt: skip

    def next(self) -> Arrival | None:
        """The next message to reach its receiver; None if all have."""
        while self._coming:
            now, what, _, message, start = heappop(self._coming)
            if what == REACHES:
                end = max(now, self._receive_free[message.receiver]) + message.occupied
                self._receive_free[message.receiver] = end
                return Arrival(message, start, start + message.occupied, end)
            start = max(now, self._send_free[message.sender])
            self._send_free[message.sender] = start + message.occupied
            reaches = start + message.latency
            heappush(self._coming, (reaches, REACHES, message.posted_at, message, start))
        return None
