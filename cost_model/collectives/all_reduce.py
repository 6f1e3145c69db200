"""Costs of an all-reduce of gradients by each algorithm that can really run it.

In: the algorithm's name, the bytes, the group and how many of its ranks each host has. Out:
seconds. ``"library"`` is the all-reduce of the communication library. Of NCCL that is all there is:
it chooses between its algorithms itself, and the cheapest is the one that it is taken to choose.
Beside gloo, whose own is a ring, any table of ``algorithms`` can be run over point-to-point
messages (``runtime.messages.all_reduces``). Its rounds follow each other, so a table costs

    Σ over rounds of  α + overhead + the time of the busiest port

where a port is a rank's link within its host, or a host's link to the others, in one direction
(Thakur, Rabenseifner, Gropp 2005, section 3, per round of the table instead of in closed form).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..cluster.cluster import Cluster
from .algorithms import ALGORITHMS, find_table
from .collectives import Group, algorithm_seconds, collective_seconds
from .tables import Table, busiest_port

LIBRARY = "library"

BY_MESSAGES = tuple(ALGORITHMS["all_reduce"])
"""Names of the all-reduce algorithms that the runtime executes by point-to-point messages."""

ROUND_SECONDS = 1e-4
"""Seconds that a round of messages takes beyond the links' latency: for posting the messages from
Python and waking the waiting thread. ``benchmarks/collectives/all_reduces.py`` measures it."""

LEAST_GAIN = 0.1
"""Least share of the library's predicted time that another all-reduce must save to be chosen, as
the prediction for the library is more certain."""

PIECES = (1, 2, 4, 8, 16, 32)
"""Numbers of parts into which a pipelined algorithm may cut the share of the tensor that each of
its trees reduces."""


class RoundParts(NamedTuple):
    """Numbers of tensor parts that one round of an all-reduce sends through the busiest port:
    ``within``, a rank's port to its own host; ``between``, a host's port to other hosts."""

    within: int
    between: int


def hosts_of(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of ``ranks`` on each host that has any of them, host by host.

    >>> from ..cluster.shorthand import parse_cluster
    >>> hosts_of(parse_cluster("2x4xH100"), (0, 1, 4))
    (2, 1)
    """
    return tuple(Counter(cluster.host_of[rank] for rank in sorted(ranks)).values())


def algorithms_of(group: Group, hosts: tuple[int, ...]) -> tuple[str, ...]:
    """List the names of the algorithms that can all-reduce over ``group``, beginning with "library"
    (the communication library's own). ``hosts``: number of the group's ranks on each host."""
    if group.library == "nccl":
        return (LIBRARY,)
    return (LIBRARY, *(name for name in BY_MESSAGES if _exists(name, hosts)))


def all_reduce_seconds(
    algorithm: str, num_bytes: float, group: Group, hosts: tuple[int, ...]
) -> float:
    """Return the seconds of an all-reduce of a tensor of ``num_bytes`` by an algorithm that
    ``algorithms_of`` lists. ``hosts``: number of the group's ranks on each host."""
    if group.num_ranks <= 1 or num_bytes <= 0:
        return 0.0
    if algorithm == LIBRARY or group.library == "nccl":
        return collective_seconds("all_reduce", num_bytes, group)
    return min(
        _seconds(_rounds(algorithm, hosts, pieces), num_bytes, group)
        for pieces in _pieces(algorithm)
    )


def best_all_reduce(num_bytes: float, group: Group, hosts: tuple[int, ...]) -> str:
    """Return the name of the cheapest all-reduce algorithm for ``num_bytes``; for NCCL, the
    algorithm that NCCL is assumed to choose. ``hosts``: number of the group's ranks on each host.

    >>> from ..cluster.cluster import Link
    >>> slow = Link("wire", alpha_seconds=1e-2, bytes_per_second=1e9)
    >>> group = Group(8, 8, 1, slow, slow, library="gloo")
    >>> best_all_reduce(1e3, group, (8,)), best_all_reduce(1e9, group, (8,))
    ('recursive_doubling', 'library')
    """
    if group.library == "nccl":
        known = algorithm_seconds("all_reduce", num_bytes, group)
        return min(known, key=known.__getitem__)
    names = algorithms_of(group, hosts)
    seconds = {name: all_reduce_seconds(name, num_bytes, group, hosts) for name in names}
    best = min(names, key=seconds.__getitem__)
    return best if seconds[best] < (1 - LEAST_GAIN) * seconds[LIBRARY] else LIBRARY


def table_for(algorithm: str, num_bytes: float, group: Group, hosts: tuple[int, ...]) -> Table:
    """Return the table of messages of an all-reduce of ``num_bytes``, cut into the best number of
    parts if ``algorithm`` is pipelined. ``hosts``: number of the group's ranks on each host."""
    pieces = min(
        _pieces(algorithm),
        key=lambda number: _seconds(_rounds(algorithm, hosts, number), num_bytes, group),
    )
    table = find_table("all_reduce", algorithm, hosts, num_pieces=pieces)
    assert table is not None, algorithm
    return table


def _pieces(algorithm: str) -> tuple[int, ...]:
    return PIECES if algorithm == "tree" else (1,)


@lru_cache(maxsize=256)
def _exists(algorithm: str, hosts: tuple[int, ...]) -> bool:
    return find_table("all_reduce", algorithm, hosts) is not None


@lru_cache(maxsize=256)
def _rounds(
    algorithm: str, hosts: tuple[int, ...], pieces: int
) -> tuple[int, tuple[RoundParts, ...]]:
    """Return the number of parts into which an all-reduce cuts the tensor, and for each of its
    rounds the numbers of parts through the busiest ports. ``hosts``: number of ranks on each host;
    ``pieces``: parts that a pipelined algorithm sends along each of its trees."""
    table = find_table("all_reduce", algorithm, hosts, num_pieces=pieces)
    assert table is not None, algorithm
    host = table.host_of()
    rounds = []
    for messages in table.rounds:
        within = busiest_port(messages, host, crosses=False)
        between = busiest_port(messages, host, crosses=True, by_host=True)
        rounds.append(RoundParts(within, between))
    return table.num_parts, tuple(rounds)


def _seconds(rounds: tuple[int, tuple[RoundParts, ...]], num_bytes: float, group: Group) -> float:
    """Return the seconds of an all-reduce of ``num_bytes``, given (number of tensor parts, parts
    through the busiest ports in each round). All ranks of a host share its link to other hosts."""
    num_parts, each = rounds
    part = num_bytes / num_parts
    intra, inter = group.intra, group.inter
    within = part / intra.bytes_per_second
    between = part / (group.ranks_per_host * inter.bytes_per_second)
    total = 0.0
    for parts in each:
        start = inter.alpha_seconds if parts.between else intra.alpha_seconds
        total += start + ROUND_SECONDS + max(parts.within * within, parts.between * between)
    return total
