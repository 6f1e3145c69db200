"""Collective algorithms as data: who sends which part of the tensor to whom, round by round.

In: a kind, an algorithm's name and the number of ranks on each host. Out: a ``Table`` of messages,
and what follows from it: the rounds and bytes that ``collectives`` puts into formulas, and what
every rank holds at the end. ``runtime.messages.all_reduces`` executes the same tables
over point-to-point messages.

A tensor is cut into ``num_parts`` equal parts. Part ids are positions in the tensor, except
in an all-to-all, where id s·n + d is what rank s has for rank d. All messages of a round
start with what their senders held when the round began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


class Message(NamedTuple):
    """``sender`` sends ``parts``; ``receiver`` adds them to its own, or else copies them."""

    sender: int
    receiver: int
    parts: tuple[int, ...]
    adds: bool = False


Round = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """An algorithm on ranks 0 … n − 1, numbered host by host. A broadcast starts at rank 0."""

    kind: CollectiveKind
    name: str
    hosts: tuple[int, ...]
    num_parts: int
    rounds: tuple[Round, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.hosts)

    def host_of(self) -> tuple[int, ...]:
        """For each rank its host."""
        return tuple(host for host, count in enumerate(self.hosts) for _ in range(count))

    def messages(self) -> Iterator[Message]:
        for messages in self.rounds:
            yield from messages


class Levels(NamedTuple):
    """A count within hosts and one between hosts."""

    intra: float
    inter: float


def starting_parts(table: Table, rank: int) -> tuple[int, ...]:
    """The parts that ``rank`` holds before the collective."""
    n, parts = table.num_ranks, table.num_parts
    if table.kind == "all_gather":
        return tuple(range(rank * parts // n, (rank + 1) * parts // n))
    if table.kind == "all_to_all":
        return tuple(range(rank * n, (rank + 1) * n))
    return tuple(range(parts)) if table.kind != "broadcast" or rank == 0 else ()


def final_parts(table: Table, rank: int) -> tuple[int, ...]:
    """The parts that ``rank`` must hold after the collective."""
    n, parts = table.num_ranks, table.num_parts
    if table.kind == "reduce_scatter":
        return tuple(range(rank * parts // n, (rank + 1) * parts // n))
    if table.kind == "all_to_all":
        return tuple(range(rank, n * n, n))
    return tuple(range(parts))


def wrong_parts(table: Table) -> list[str]:
    """What the ranks would end with and should not: empty for a right table.

    Each part is followed as the list of ranks whose numbers are summed in it.
    """
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
    """Rounds that stay within hosts, and rounds in which a message crosses hosts."""
    host = table.host_of()
    inter = sum(any(host[m.sender] != host[m.receiver] for m in r) for r in table.rounds)
    return Levels(len(table.rounds) - inter, inter)


def chain(table: Table) -> Levels:
    """Messages on the longest chain in which each sends what the one before brought.

    It bounds the latency of a pipelined algorithm, whose rings or trees run on their own.
    Messages between hosts count first, as they take longer.
    """
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
    """Per round the most that one rank sends or receives on a level, summed over rounds.

    In tensors (1.0 is all bytes of the tensor, or of one rank's input of an all-to-all).
    """
    host = table.host_of()
    intra = sum(max(_port_parts(messages, host, crosses=False)) for messages in table.rounds)
    inter = sum(max(_port_parts(messages, host, crosses=True)) for messages in table.rounds)
    return Levels(intra / table.num_parts, inter / table.num_parts)


def busiest_bytes(table: Table) -> Levels:
    """The most that one rank sends or receives on a level in all, in tensors.

    It bounds the time of a pipelined algorithm whose parts are many.
    """
    host, messages = table.host_of(), tuple(table.messages())
    intra = max(_port_parts(messages, host, crosses=False))
    inter = max(_port_parts(messages, host, crosses=True))
    return Levels(intra / table.num_parts, inter / table.num_parts)


def sent_bytes(table: Table, rank: int) -> float:
    """What ``rank`` sends in all, in tensors."""
    sent = sum(len(m.parts) for m in table.messages() if m.sender == rank)
    return sent / table.num_parts


def _port_parts(
    messages: Iterable[Message], host: Sequence[int], *, crosses: bool
) -> tuple[int, ...]:
    """Parts through each port of a level: every rank's outgoing, then incoming."""
    count = [0] * (2 * len(host))
    for message in messages:
        if (host[message.sender] != host[message.receiver]) == crosses:
            count[message.sender] += len(message.parts)
            count[len(host) + message.receiver] += len(message.parts)
    return tuple(count)


def mirrored(gather: Table) -> Table:
    """The reduce-scatter that undoes an all-gather: its messages backwards, adding."""
    backwards = tuple(
        tuple(Message(m.receiver, m.sender, m.parts, adds=True) for m in messages)
        for messages in reversed(gather.rounds)
    )
    return replace(gather, kind="reduce_scatter", rounds=backwards)


def scattered_and_gathered(gather: Table, name: str) -> Table:
    """The all-reduce that reduce-scatters by an all-gather's mirror image, then gathers."""
    both = mirrored(gather).rounds + gather.rounds
    return replace(gather, kind="all_reduce", name=name, rounds=both)
