"""An algorithm's messages: counted in closed form, and as a table of who sends which part to whom.

``algorithms`` makes both; ``runtime.messages.all_reduces`` executes tables over point-to-point
messages.

A tensor is cut into ``num_parts`` equal parts. Part ids are positions in the tensor, except
in an all-to-all, where id s·n + d is rank s's part for rank d. All messages of a round
start with what their senders held when the round began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


class Message(NamedTuple):
    """Message in one round of a collective: rank ``sender`` sends tensor parts (by id) to rank
    ``receiver``, which adds them to its own if ``adds``, else stores them."""

    sender: int
    receiver: int
    parts: tuple[int, ...]
    adds: bool = False


Round = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """All messages of a collective algorithm, round by round, between ranks 0 … n − 1, which are
    numbered host by host. ``hosts`` has the number of ranks on each host. The tensor is cut into
    ``num_parts`` equal parts. A broadcast starts at rank 0."""

    kind: CollectiveKind
    name: str
    hosts: tuple[int, ...]
    num_parts: int
    rounds: tuple[Round, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.hosts)

    def host_of(self) -> tuple[int, ...]:
        """Return the index of each rank's host."""
        return tuple(host for host, count in enumerate(self.hosts) for _ in range(count))


class Levels(NamedTuple):
    """Number of messages, or of bytes as multiples of the tensor's bytes, by kind of link: within
    hosts (``intra``), between hosts (``inter``), and over the slower of these two (``slowest``)."""

    intra: float
    inter: float
    slowest: float = 0


class Shape(NamedTuple):
    """Layout of a group: ``n`` ranks on ``h`` hosts, the smallest of which has ``p`` of them."""

    n: int
    p: int
    h: int

    @property
    def is_flat(self) -> bool:
        """True if one kind of link joins all ranks: a single host, or one rank per host."""
        return self.h == 1 or self.p == 1

    @property
    def is_even(self) -> bool:
        return self.n == self.p * self.h

    def on_one_level(self, count: float) -> Levels:
        """Return ``count`` (of messages or bytes) for the only kind of link, if the group is on one
        host or has one rank per host; else for the slower of the links within and between hosts.

        >>> Shape(4, 4, 1).on_one_level(3.0)
        Levels(intra=3.0, inter=0, slowest=0)
        """
        if self.h == 1:
            return Levels(count, 0)
        return Levels(0, count) if self.p == 1 else Levels(0, 0, count)


class Counts(NamedTuple):
    """Costs of a collective algorithm: the number of successive ``messages``, and the bytes through
    the busiest rank as multiples of the tensor's bytes (``tensors``). ``at_once``: links within and
    between hosts carry bytes at the same time. ``num_posts``: number of peers beyond the first to
    which a rank sends at once. ``num_hops``: length of the chain along which a pipelined tensor is
    sent in the best number of parts (0: no pipeline); ``messages`` then counts for one part."""

    messages: Levels
    tensors: Levels
    at_once: bool = False
    num_posts: int = 0
    num_hops: int = 0

    def doubled(self) -> Counts:
        """Return the costs of two runs, as of an all-reduce (reduce-scatter, then all-gather)."""
        messages, tensors = (Levels(*(2 * count for count in each)) for each in self[:2])
        return self._replace(messages=messages, tensors=tensors)


Hosts = tuple[int, ...]
"""Number of ranks on each host."""
Rounds = tuple[Round, ...]
Made = tuple[int, Rounds]
"""Number of parts of a table, and its rounds of messages."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Collective algorithm. ``count`` returns its numbers of messages and bytes for a layout of
    ranks on hosts; ``make`` returns its number of tensor parts and its rounds of messages, from the
    numbers of ranks on each host and of parts of a pipeline. Both return None if the algorithm
    cannot run on a layout: recursive doubling of an all-gather needs 2^k ranks, a hierarchy equal
    hosts."""

    count: Callable[[Shape], Counts | None]
    make: Callable[[Hosts, int], Made | None]


def busiest_port(
    messages: Iterable[Message], host: Sequence[int], *, crosses: bool, by_host: bool = False
) -> int:
    """Return the number of tensor parts that pass in one direction through the busiest port: of
    messages within hosts or, with ``crosses``, between hosts. Each rank has its own port or, with
    ``by_host``, all ranks of a host share one. ``host``: index of each rank's host."""
    sent, received = [0] * len(host), [0] * len(host)
    for message in messages:
        sender, receiver = host[message.sender], host[message.receiver]
        if (sender != receiver) == crosses:
            sent[sender if by_host else message.sender] += len(message.parts)
            received[receiver if by_host else message.receiver] += len(message.parts)
    return max(sent + received)
