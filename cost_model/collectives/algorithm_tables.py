"""The tables of the collective algorithms (see ``algorithms``), one function each.

In: ranks per host; for pipelined algorithms the number of pieces that follow each other.
Out: a ``Table``, or None where the algorithm does not exist for such a layout: recursive
doubling of an all-gather needs 2^k ranks, a hierarchy needs hosts with equally many ranks.
Reduction in a switch has no table: it is not made of messages between ranks.

Sources: those of ``collectives``; Bruck et al., "Efficient Algorithms for All-to-All
Communications in Multiport Message-Passing Systems", IEEE TPDS 8(11), 1997; NCCL,
src/graph/trees.cc (the two binary trees).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest

from .algorithms import (
    CollectiveKind,
    Message,
    Round,
    Table,
    mirrored,
    scattered_and_gathered,
)

Hosts = tuple[int, ...]
Gather = Callable[[Sequence[int], Sequence[Sequence[int]]], tuple[Round, ...]]


def find_table(
    kind: CollectiveKind, name: str, hosts: Sequence[int], *, num_pieces: int = 1
) -> Table | None:
    """The table of an algorithm of ``collectives.algorithm_seconds``, by its name there.

    >>> table = find_table("all_gather", "ring", [3])
    >>> len(table.rounds), table.rounds[0][0]
    (2, Message(sender=0, receiver=1, parts=(0,), adds=False))
    """
    layout = tuple(hosts)
    if (kind, name) in _PIPELINED:
        return _PIPELINED[kind, name](layout, num_pieces)
    if (kind, name) in _WHOLE:
        return _WHOLE[kind, name](layout)
    gather = _GATHERS[name](layout)
    if gather is None or kind == "all_gather":
        return gather
    return mirrored(gather) if kind == "reduce_scatter" else scattered_and_gathered(gather, name)


def _together(*parallel: Sequence[Round]) -> tuple[Round, ...]:
    """Rounds of groups that work at the same time."""
    return tuple(sum(both, ()) for both in zip_longest(*parallel, fillvalue=()))


# All-gathers, of which the reduce-scatters and most all-reduces are made.


def _ring_rounds(order: Sequence[int], owned: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Around ``order`` each place passes on what it got last; place i starts with owned[i]."""
    n = len(order)
    return tuple(
        tuple(Message(order[i], order[(i + 1) % n], tuple(owned[(i - step) % n])) for i in range(n))
        for step in range(n - 1)
    )


def _doubling_rounds(order: Sequence[int], owned: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Places at distance 1, 2, 4, … exchange all they have; their number is 2^k."""
    n, distance, rounds = len(order), 1, []
    while distance < n:
        rounds.append(
            tuple(
                Message(
                    order[i],
                    order[i ^ distance],
                    tuple(
                        part
                        for j in range(n)
                        if j // distance == i // distance
                        for part in owned[j]
                    ),
                )
                for i in range(n)
            )
        )
        distance *= 2
    return tuple(rounds)


def _gather_ring(hosts: Hosts) -> Table:
    """One ring, or over hosts as many as the smallest has ranks, each leaving at another."""
    n, rings = sum(hosts), min(hosts) if len(hosts) > 1 else 1
    parallel = []
    for ring in range(rings):
        order = [rank for ranks in _rotated(hosts, ring) for rank in ranks]
        parallel.append(_ring_rounds(order, [[rank * rings + ring] for rank in order]))
    return Table("all_gather", "ring", hosts, n * rings, _together(*parallel))


def _rotated(hosts: Hosts, start: int) -> list[list[int]]:
    """The ranks of each host, from the ``start``-th on and around."""
    firsts = accumulate(hosts, initial=0)
    return [
        [first + (start + place) % count for place in range(count)]
        for first, count in zip(firsts, hosts, strict=False)
    ]


def _gather_doubling(hosts: Hosts) -> Table | None:
    n = sum(hosts)
    if n & (n - 1):
        return None
    rounds = _doubling_rounds(range(n), [[rank] for rank in range(n)])
    return Table("all_gather", "recursive_doubling", hosts, n, rounds)


def _gather_hierarchical(hosts: Hosts, between: Gather) -> Table | None:
    """Equal places of all hosts gather, then each host around its ring."""
    places, num_hosts = hosts[0], len(hosts)
    if any(count != places for count in hosts) or num_hosts < 2 or places < 2:
        return None
    if between is _doubling_rounds and num_hosts & (num_hosts - 1):
        return None
    columns = [[host * places + place for host in range(num_hosts)] for place in range(places)]
    rows = [[host * places + place for place in range(places)] for host in range(num_hosts)]
    across = _together(*(between(column, [[rank] for rank in column]) for column in columns))
    within = _together(*(_ring_rounds(row, columns) for row in rows))
    return Table("all_gather", "hierarchical", hosts, sum(hosts), across + within)


_GATHERS: Mapping[str, Callable[[Hosts], Table | None]] = {
    "ring": _gather_ring,
    "recursive_doubling": _gather_doubling,
    "halving_doubling": _gather_doubling,
    "hierarchical": lambda hosts: _gather_hierarchical(hosts, _ring_rounds),
    "hierarchical_doubling": lambda hosts: _gather_hierarchical(hosts, _doubling_rounds),
}


# All-reduces by butterflies; ranks over 2^k join before and are told after (Thakur, 4.5).


def _folded(hosts: Hosts, name: str, core_rounds: Gather) -> Table:
    n = sum(hosts)
    core_size = 1 << (n.bit_length() - 1)
    extra = n - core_size
    parts = core_size if name == "halving_doubling" else 1
    whole = tuple(range(parts))
    core = [2 * place + 1 if place < extra else place + extra for place in range(core_size)]
    rounds = core_rounds(core, [[part] for part in range(parts)])
    if extra:
        before = tuple(Message(2 * i, 2 * i + 1, whole, adds=True) for i in range(extra))
        after = tuple(Message(2 * i + 1, 2 * i, whole) for i in range(extra))
        rounds = (before, *rounds, after)
    return Table("all_reduce", name, hosts, parts, rounds)


def _halving_doubling_rounds(
    order: Sequence[int], owned: Sequence[Sequence[int]]
) -> tuple[Round, ...]:
    gather = Table("all_gather", "", (), 1, _doubling_rounds(order, owned))
    return mirrored(gather).rounds + gather.rounds


def _exchanging_rounds(order: Sequence[int], owned: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Places at distance 1, 2, 4, … exchange and add the whole tensor."""
    n, distance, rounds = len(order), 1, []
    while distance < n:
        rounds.append(
            tuple(Message(order[i], order[i ^ distance], (0,), adds=True) for i in range(n))
        )
        distance *= 2
    return tuple(rounds)


# Trees, rings and exchanges.


def _tree_parents(n: int) -> list[int]:
    """Each rank's parent in the binary tree that has the odd ranks as leaves; −1 the root's.

    A rank's lowest set bit says its height; its parent has the next bit set or, beyond the
    last rank, the bit cleared alone (NCCL's btree).
    """
    parents = [-1]
    for rank in range(1, n):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents.append(up if up < n else rank ^ bit)
    return parents


def two_trees(n: int) -> tuple[list[int], list[int]]:
    """Parents in two trees in which no rank but one is inner twice: mirrored or shifted."""
    first = _tree_parents(n)
    if n % 2 == 0:
        other = [n - 1 - first[n - 1 - r] if first[n - 1 - r] >= 0 else -1 for r in range(n)]
    else:
        shifted = [first[(r - 1) % n] for r in range(n)]
        other = [(parent + 1) % n if parent >= 0 else -1 for parent in shifted]
    return first, other


def _reduce_tree(hosts: Hosts, num_pieces: int) -> Table:
    """Two trees over the hosts per rank of the smallest host, a chain in each; or over all ranks.

    The chains of a host start at different ranks, each of which joins its host to a tree.
    """
    tree_of = hosts if len(hosts) > 1 else (1,) * sum(hosts)
    num_heads = min(tree_of)
    num_trees, parallel = 2 * num_heads, []
    for head in range(num_heads):
        chains = _rotated(tree_of, head)
        for number, parents in enumerate(two_trees(len(tree_of))):
            chained = [-1] * sum(hosts)
            for ranks, up in zip(chains, parents, strict=True):
                chained[ranks[0]] = chains[up][0] if up >= 0 else -1
                for above, rank in pairwise(ranks):
                    chained[rank] = above
            parts = range(2 * head + number, num_trees * num_pieces, num_trees)
            parallel.append(_up_and_down(chained, parts))
    return Table("all_reduce", "tree", hosts, num_trees * num_pieces, _together(*parallel))


def _up_and_down(parents: Sequence[int], parts: Sequence[int]) -> tuple[Round, ...]:
    """Each of ``parts``, one round behind the one before, summed up a tree and copied down."""
    depths = [_depth(parents, rank) for rank in range(len(parents))]
    deepest = max(depths)
    rounds: list[list[Message]] = [[] for _ in range(2 * deepest + len(parts) - 1)]
    for piece, part in enumerate(parts):
        for rank, parent in enumerate(parents):
            if parent >= 0:
                up, down = deepest - depths[rank], deepest + depths[parent]
                rounds[piece + up].append(Message(rank, parent, (part,), adds=True))
                rounds[piece + down].append(Message(parent, rank, (part,)))
    return tuple(map(tuple, rounds))


def _depth(parents: Sequence[int], rank: int) -> int:
    return 0 if parents[rank] < 0 else 1 + _depth(parents, parents[rank])


def _broadcast_ring(hosts: Hosts, num_pieces: int) -> Table:
    """Pieces follow each other along the ranks; rank 0's go first."""
    n = sum(hosts)
    rounds = tuple(
        tuple(
            Message(rank, rank + 1, (step - rank,))
            for rank in range(n - 1)
            if 0 <= step - rank < num_pieces
        )
        for step in range(n - 2 + num_pieces)
    )
    return Table("broadcast", "pipelined_ring", hosts, num_pieces, rounds)


def _binomial_rounds(n: int, parts_below: Callable[[int, int], Sequence[int]]) -> tuple[Round, ...]:
    """From rank 0 to ranks at distance 2^k, …, 2, 1; ``parts_below(first, last)`` of a subtree."""
    distance, rounds = 1 << ((n - 1).bit_length() - 1), []
    while distance:
        rounds.append(
            tuple(
                Message(
                    rank,
                    rank + distance,
                    tuple(parts_below(rank + distance, min(rank + 2 * distance, n))),
                )
                for rank in range(0, n - distance, 2 * distance)
            )
        )
        distance //= 2
    return tuple(rounds)


def _broadcast_binomial(hosts: Hosts) -> Table:
    rounds = _binomial_rounds(sum(hosts), lambda first, last: (0,))
    return Table("broadcast", "binomial_tree", hosts, 1, rounds)


def _broadcast_scattered(hosts: Hosts) -> Table:
    """Scatter along a binomial tree, then all-gather around a ring (van de Geijn)."""
    n = sum(hosts)
    gather = _ring_rounds(range(n), [[rank] for rank in range(n)])
    rounds = _binomial_rounds(n, range) + gather
    return Table("broadcast", "scatter_all_gather", hosts, n, rounds)


def _exchange_directly(hosts: Hosts) -> Table:
    """Every rank sends to every other at once."""
    rounds = _exchange_pairwise(hosts).rounds
    return Table("all_to_all", "direct", hosts, sum(hosts), (sum(rounds, ()),))


def _exchange_pairwise(hosts: Hosts) -> Table:
    """One peer per round: first within the host, then in the hosts at distance 1, 2, …

    With unequal hosts the peer is the rank at distance 1, 2, …
    """
    n, places = sum(hosts), hosts[0]
    is_even = all(count == places for count in hosts)
    rounds = []
    for shift in range(1, n):
        across, along = divmod(shift, places) if is_even else (0, shift)
        peers = [
            (rank // places + across) % len(hosts) * places + (rank % places + along) % places
            if is_even
            else (rank + shift) % n
            for rank in range(n)
        ]
        rounds.append(tuple(Message(r, peer, (r * n + peer,)) for r, peer in enumerate(peers)))
    return Table("all_to_all", "pairwise", hosts, n, tuple(rounds))


def _exchange_bruck(hosts: Hosts) -> Table:
    """What still has to go 2^k on goes 2^k on, for k = 0, 1, …, with whatever waits there."""
    n, distance, rounds = sum(hosts), 1, []
    while distance < n:
        messages = []
        for rank in range(n):
            travelling = [left for left in range(n) if left & distance]
            parts = [
                (rank - left % distance) % n * n + (rank - left % distance + left) % n
                for left in travelling
            ]
            messages.append(Message(rank, (rank + distance) % n, tuple(parts)))
        rounds.append(tuple(messages))
        distance *= 2
    return Table("all_to_all", "bruck", hosts, n, tuple(rounds))


_WHOLE: Mapping[tuple[str, str], Callable[[Hosts], Table | None]] = {
    ("all_reduce", "recursive_doubling"): lambda hosts: _folded(
        hosts, "recursive_doubling", _exchanging_rounds
    ),
    ("all_reduce", "halving_doubling"): lambda hosts: _folded(
        hosts, "halving_doubling", _halving_doubling_rounds
    ),
    ("broadcast", "binomial_tree"): _broadcast_binomial,
    ("broadcast", "scatter_all_gather"): _broadcast_scattered,
    ("all_to_all", "direct"): _exchange_directly,
    ("all_to_all", "pairwise"): _exchange_pairwise,
    ("all_to_all", "bruck"): _exchange_bruck,
}

_PIPELINED: Mapping[tuple[str, str], Callable[[Hosts, int], Table | None]] = {
    ("all_reduce", "tree"): _reduce_tree,
    ("broadcast", "pipelined_ring"): _broadcast_ring,
}

ALGORITHMS: Mapping[CollectiveKind, tuple[str, ...]] = {
    "all_reduce": (
        "ring", "tree", "recursive_doubling", "halving_doubling",
        "hierarchical", "hierarchical_doubling",
    ),
    "all_gather": ("ring", "recursive_doubling", "hierarchical", "hierarchical_doubling"),
    "reduce_scatter": ("ring", "recursive_doubling", "hierarchical", "hierarchical_doubling"),
    "all_to_all": ("direct", "pairwise", "bruck"),
    "broadcast": ("binomial_tree", "scatter_all_gather", "pipelined_ring"),
}  # fmt: skip
"""The names of the algorithms that have tables."""
