"""An algorithm's messages: counted in closed form, and as a table of who sends which part to whom.

In: the counts and the rounds of a collective algorithm (see ``algorithms``). Out: the parts that
each rank holds before and after a table, and the table's rounds and bytes, by which counts are
tested.
``runtime.messages.all_reduces`` executes the same tables over point-to-point messages.

A tensor is cut into ``num_parts`` equal parts. Part ids are positions in the tensor, except
in an all-to-all, where id s·n + d is rank s's part for rank d. All messages of a round
start with what their senders held when the round began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

    def messages(self) -> Iterator[Message]:
        for messages in self.rounds:
            yield from messages


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


def starting_parts(table: Table, rank: int) -> tuple[int, ...]:
    """Return the ids of the tensor parts that ``rank`` holds before the collective."""
    n, parts = table.num_ranks, table.num_parts
    if table.kind == "all_gather":
        return tuple(range(rank * parts // n, (rank + 1) * parts // n))
    if table.kind == "all_to_all":
        return tuple(range(rank * n, (rank + 1) * n))
    return tuple(range(parts)) if table.kind != "broadcast" or rank == 0 else ()


def final_parts(table: Table, rank: int) -> tuple[int, ...]:
    """Return the ids of the tensor parts that ``rank`` must hold after the collective."""
    n, parts = table.num_ranks, table.num_parts
    if table.kind == "reduce_scatter":
        return tuple(range(rank * parts // n, (rank + 1) * parts // n))
    if table.kind == "all_to_all":
        return tuple(range(rank, n * n, n))
    return tuple(range(parts))


def wrong_parts(table: Table) -> list[str]:
    """Describe, one text each, the tensor parts that ranks lack or hold with wrong contents after
    all messages of a table; empty for a correct table. A part's contents are followed as the list
    of ranks whose values are summed in it."""
    ranks = range(table.num_ranks)
    held: list[dict[int, tuple[int, ...]]] = [
        dict.fromkeys(starting_parts(table, rank), (rank,)) for rank in ranks
    ]
    wrong = []
    for number, messages in enumerate(table.rounds):
        sent = [(m, [held[m.sender].get(part) for part in m.parts]) for m in messages]
        for message, contents in sent:
            for part, content in zip(message.parts, contents, strict=True):
                if content is None:
                    wrong.append(f"round {number}: rank {message.sender} lacks part {part}")
                    continue
                own = held[message.receiver].get(part, ()) if message.adds else ()
                held[message.receiver][part] = own + content
    summed = tuple(ranks) if table.kind in ("all_reduce", "reduce_scatter") else None
    for rank in ranks:
        for part in final_parts(table, rank):
            found = tuple(sorted(held[rank].get(part, ())))
            source = {"all_gather": part * len(ranks) // table.num_parts, "broadcast": 0}
            expected = summed or (source.get(table.kind, part // len(ranks)),)
            if found != expected:
                wrong.append(f"rank {rank}, part {part}: sum of {found}, not {expected}")
    return wrong


def rounds(table: Table) -> Levels:
    """Count the rounds of a table: ``intra``, in which all messages stay within hosts, and
    ``inter``, in which a message crosses hosts."""
    host = table.host_of()
    inter = sum(any(host[m.sender] != host[m.receiver] for m in r) for r in table.rounds)
    return Levels(len(table.rounds) - inter, inter)


def chain(table: Table) -> Levels:
    """Count the messages, within and between hosts, of the longest chain in which each message
    passes on parts that the previous message delivered. If chains differ, messages between hosts
    decide, as they take longer. The result is a lower bound of the latency of a pipelined
    algorithm, whose rings or trees run independently."""
    host = table.host_of()
    longest: dict[tuple[int, int], tuple[int, int]] = {}
    for messages in table.rounds:
        arrivals = []
        for message in messages:
            keys = [(message.sender, part) for part in message.parts]
            inter, intra = max(longest.get(key, (0, 0)) for key in keys)
            crosses = host[message.sender] != host[message.receiver]
            arrivals.append((message, (inter + crosses, intra + (not crosses))))
        for message, length in arrivals:
            for part in message.parts:
                key = (message.receiver, part)
                longest[key] = max(longest.get(key, (0, 0)), length)
    inter, intra = max(longest.values(), default=(0, 0))
    return Levels(intra, inter)


def bytes_in_rounds(table: Table) -> Levels:
    """Return the bytes that the busiest rank sends or receives in each round, summed over the
    rounds of a table, within and between hosts. The unit is the bytes of the tensor (for an
    all-to-all, of one rank's input)."""
    return _busiest_tensors(table, table.rounds)


def busiest_bytes(table: Table) -> Levels:
    """Return the bytes that the busiest rank sends or receives over the whole table, within and
    between hosts, as multiples of the tensor's bytes. They bound a pipelined algorithm's time from
    below."""
    return _busiest_tensors(table, (tuple(table.messages()),))


def _busiest_tensors(table: Table, rounds: Rounds) -> Levels:
    host = table.host_of()
    levels = (
        [busiest_port(each, host, crosses=crosses) for each in rounds] for crosses in (False, True)
    )
    return Levels(*(sum(parts) / table.num_parts for parts in levels))


def sent_bytes(table: Table, rank: int) -> float:
    """Return the bytes that ``rank`` sends in all, as a multiple of the tensor's bytes."""
    sent = sum(len(m.parts) for m in table.messages() if m.sender == rank)
    return sent / table.num_parts


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
