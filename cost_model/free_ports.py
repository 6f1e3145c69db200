"""Messages that never share a port: what no message of ``ports`` comes earlier than.

In and out as in ``ports``. A message leaves when it is ready and the last of the same sender and
receiver has left, and takes latency and bytes:

    left = max(ready, left before) + o,    arrive = left + α

Two things follow, by induction over a table's actions, whose order on each rank is fixed. Under
shared ports nothing happens earlier than here: there a message flows at no more than this rate.
And nothing here happens earlier when some action or message takes longer: all times are sums and
maxima of others. Under shared ports that is not so: a message that is ready later may leave its
port to another one that more hangs on. What keeps dominated ways out of a search therefore asks
for the step under these ports (``planner.search.exact``).

Both hold where the messages from one rank to another are ready in the order of the rows, as they
are in pipelines of one stage per rank, whose micro-batches go in order.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from .ports import Arrival, Message


class FreePorts:
    """The interface of ``Ports``.

    >>> ports = FreePorts(3, 0.0)
    >>> for receiver in (1, 2):
    ...     ports.add(0.0, Message(0, receiver, receiver, 0, 0, latency=0.5, occupied=2.0))
    >>> ports.next().end_seconds, ports.next().end_seconds, ports.next()
    (2.5, 2.5, None)
    """

    def __init__(self, num_ranks: int, zero: float) -> None:
        self._zero = zero
        self._left: dict[tuple[int, int], float] = {}
        self._order = count()
        self._coming: list[tuple[float, int, int, Message]] = []

    def add(self, ready_seconds: float, message: Message) -> None:
        """A message that is ready then."""
        heappush(self._coming, (ready_seconds, message.place, next(self._order), message))

    def next(self) -> Arrival | None:
        """The message that is ready first of those that have not come; None if all have."""
        if not self._coming:
            return None
        ready, _, _, message = heappop(self._coming)
        pair = message.sender, message.receiver
        start = max(ready, self._left.get(pair, self._zero))
        left = start + message.occupied
        self._left[pair] = left
        return Arrival(message, start, left, left + message.latency)
