"""Messages on their way: each pipeline rank has one port to send by and one to receive by.

In: messages, when each is ready (sent, and its receive posted). Out: when each arrives.

A message of ``latency`` α that occupies a port for o seconds (its bytes over the link's rate)
leaves once it is ready and its sender's port is free, keeps that port for o, and flows into its
receiver's port from α later on, for o seconds too. A port that several messages flow into at
once lets them through at the rate of one; what it has not let through yet waits in the network:

    start  = max(ready, port of the sender free)
    arrive = start + α + o + what waits at the receiver's port at start + α + o
    d waiting / dt = messages that flow in - 1, or nothing where none waits and none flows in

Alone a message takes α + o (Hockney, The communication challenge for MPP, Parallel Computing
20, 1994). Two that come together are there together, after α + 2o: packets of both take turns.
A port sends in the order in which messages are ready, those that are so at the same moment in
the order of the rank's row of the action table.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal, NamedTuple

LEAVES, REACHES, PASSES = 0, 1, 2


class Message(NamedTuple):
    """One message. ``number`` and ``source`` are its names, the rest is as above.

    ``place`` is that of its send in the sender's row.
    """

    sender: int
    receiver: int
    number: int
    source: int
    place: int
    latency: float
    occupied: float


class Arrival(NamedTuple):
    """A message that has come, when it left, and when its sender's port was free again."""

    message: Message
    start_seconds: float
    left_seconds: float
    end_seconds: float


_Entry = tuple[float, Literal[0, 1, 2], int, Message, float]


class Ports:
    """The ports of all ranks, and the messages that are on their way.

    Messages may be given in any order, as long as none is ready before the last that was
    returned had reached its receiver: so it is if every rank goes on as far as it can each time.

    >>> ports = Ports(3, 0.0)
    >>> for receiver in (1, 2):
    ...     ports.add(0.0, Message(0, receiver, 0, 0, receiver, latency=0.5, occupied=2.0))
    >>> ports.next().end_seconds, ports.next().end_seconds, ports.next()
    (2.5, 4.5, None)
    """

    def __init__(self, num_ranks: int, zero: float) -> None:
        self._free = [zero] * num_ranks
        self._waiting = [zero] * num_ranks
        self._seen = [zero] * num_ranks
        self._flowing = [0] * num_ranks
        self._coming: list[_Entry] = []

    def add(self, ready_seconds: float, message: Message) -> None:
        """A message that is ready then."""
        entry: _Entry = (ready_seconds, LEAVES, message.place, message, ready_seconds)
        heappush(self._coming, entry)

    def next(self) -> Arrival | None:
        """The next message that reaches its receiver whole; None if all have."""
        while self._coming:
            now, what, place, message, start = heappop(self._coming)
            if what == LEAVES:
                start = max(now, self._free[message.sender])
                self._free[message.sender] = start + message.occupied
                entry: _Entry = (start + message.latency, REACHES, place, message, start)
                heappush(self._coming, entry)
                continue
            receiver = message.receiver
            waiting = self._wait(receiver, now)
            if what == PASSES:
                self._flowing[receiver] -= 1
                return Arrival(message, start, start + message.occupied, now + waiting)
            self._flowing[receiver] += 1
            heappush(self._coming, (now + message.occupied, PASSES, place, message, start))
        return None

    def _wait(self, receiver: int, now: float) -> float:
        """What waits at a port now, in seconds."""
        more = (now - self._seen[receiver]) * (self._flowing[receiver] - 1)
        self._seen[receiver] = now
        self._waiting[receiver] = max(self._waiting[receiver] + more, 0 * now)
        return self._waiting[receiver]
