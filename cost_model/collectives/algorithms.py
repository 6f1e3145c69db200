"""Collective algorithms: each described once, by its counts and by its table of messages.

In: how the ranks lie on hosts. Out: an algorithm's ``Counts``, closed forms for groups of any
size, from which ``collectives`` prices it, and its ``Table`` of messages, which the runtime runs.
A test compares the counts with those of the tables: rounds and bytes of algorithms whose rounds
follow each other, the longest chain of messages and the busiest rank's bytes of rings and trees,
whose parts are pipelined.

Notation: n ranks, of which p on each of h hosts; S bytes of the whole tensor; α seconds per message
and β bytes per second of a link, index 1 within a host and 2 between hosts. All p ranks of a host
talk to other hosts at once, each by its own share of the network: the host's rate is p·β2. m is the
largest power of two that is at most n; f is 0 where n = m, else 2.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005 (below: Thakur); Rabenseifner, "Optimization of Collective Reduction
Operations", ICCS 2004; Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35(12), 2009; Bruck et al., "Efficient Algorithms for
All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS 8(11), 1997; NCCL,
src/graph/tuning.cc (steps within and between hosts) and src/graph/trees.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from .gathers import (
    GATHERS,
    all_reduce,
    count_butterfly,
    count_halving_doubling,
    count_ring,
    log2_ceil,
    make_butterfly,
    make_halving_doubling,
    own_parts,
    powers_below,
    reduce_scatter,
    ring_rounds,
    rotated,
    side_by_side,
)
from .tables import (
    Algorithm,
    CollectiveKind,
    Counts,
    Hosts,
    Levels,
    Made,
    Message,
    Rounds,
    Shape,
    Table,
)


def find_table(
    kind: CollectiveKind, name: str, hosts: Sequence[int], *, num_pieces: int = 1
) -> Table | None:
    """Return the table of messages (who sends which part of the tensor to whom, by round) of the
    algorithm ``name`` for a collective; None if it cannot run on ``hosts`` (number of ranks on each
    host). A pipelined algorithm sends the tensor in ``num_pieces`` parts, one after the other.

    >>> table = find_table("all_gather", "ring", [3])
    >>> len(table.rounds), table.rounds[0][0]
    (2, Message(sender=0, receiver=1, parts=(0,), adds=False))
    """
    made = ALGORITHMS[kind][name].make(tuple(hosts), num_pieces)
    return None if made is None else Table(kind, name, tuple(hosts), *made)


# Trees.


def _count_tree(shape: Shape) -> Counts:
    """Count messages and bytes of an all-reduce of S bytes by two pipelined binary trees over h
    hosts and a chain of p ranks in each (n ranks in all; α latency, β rate of a link, index 1
    within a host, 2 between hosts). Latency, up and down: 2·((p − 1)·α1 + ⌈log2 h⌉·α2). Each tree
    reduces half of the tensor, and a rank is an inner node of one tree and a leaf of the other, so
    it sends min(2, h/2)·S/p in the trees and 2(p − 1)/p·S in the chains; the slower of the two
    counts. With a single kind of link, h is n and p is 1. With unequal hosts, a chain has at most n
    − (h − 1)·p ranks. Source: Sanders et al. 2009; NCCL 2.4 trees."""
    n, p, h = shape
    if shape.is_flat and shape.is_even:
        tensors = shape.on_one_level(min(2, n / 2))
        return Counts(shape.on_one_level(2 * log2_ceil(n)), tensors)
    messages = Levels(2 * (n - (h - 1) * p - 1), 2 * log2_ceil(h))
    within = 2 * (p - 1) / p if shape.is_even else 2
    return Counts(messages, Levels(within, min(2, h / 2) / p), at_once=True)


def _tree_parents(n: int) -> list[int]:
    """Return each rank's parent in the binary tree of ``n`` ranks whose leaves are the odd ranks;
    −1 for the root. The lowest set bit of a rank gives its height. Its parent has the next bit set
    instead or, if no such rank exists, the bit cleared (NCCL's btree)."""
    parents = [-1]
    for rank in range(1, n):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents.append(up if up < n else rank ^ bit)
    return parents


def two_trees(n: int) -> tuple[list[int], list[int]]:
    """Return two binary trees over ``n`` ranks, as each rank's parent (−1 for the root). Each rank
    is an inner node of at most one tree: the second tree is the first one mirrored or shifted."""
    first = _tree_parents(n)
    if n % 2 == 0:
        other = [n - 1 - first[n - 1 - r] if first[n - 1 - r] >= 0 else -1 for r in range(n)]
    else:
        shifted = [first[(r - 1) % n] for r in range(n)]
        other = [(parent + 1) % n if parent >= 0 else -1 for parent in shifted]
    return first, other


def _make_tree(hosts: Hosts, num_pieces: int) -> Made:
    """Return the number of parts and the rounds of messages of the all-reduce by trees: two trees
    over the hosts for each rank of the smallest host, and a chain in each host. Each chain starts
    at another rank, which joins its host to a tree. ``num_pieces``: parts per tree."""
    tree_of = hosts if len(hosts) > 1 else (1,) * sum(hosts)
    num_heads = min(tree_of)
    num_trees, parallel = 2 * num_heads, []
    for head in range(num_heads):
        chains = rotated(tree_of, head)
        for number, parents in enumerate(two_trees(len(tree_of))):
            chained = [-1] * sum(hosts)
            for ranks, up in zip(chains, parents, strict=True):
                chained[ranks[0]] = chains[up][0] if up >= 0 else -1
                for above, rank in pairwise(ranks):
                    chained[rank] = above
            parts = range(2 * head + number, num_trees * num_pieces, num_trees)
            parallel.append(_up_and_down(chained, parts))
    return num_trees * num_pieces, side_by_side(*parallel)


def _up_and_down(parents: Sequence[int], parts: Sequence[int]) -> Rounds:
    """Return the rounds of messages that sum each of ``parts`` up a tree and copy the sum down,
    each part one round after the previous. ``parents``: each rank's parent, −1 for the root."""
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


# Broadcasts.


def _count_binomial(shape: Shape) -> Counts:
    """Count messages and bytes of a broadcast by a binomial tree over n ranks: ⌈log2 n⌉·(α + S/β)
    for S bytes, latency α and rate β (Thakur 2005, 4.3)."""
    steps = shape.on_one_level(log2_ceil(shape.n))
    return Counts(steps, steps)


def _binomial_rounds(n: int, parts_below: Callable[[int, int], Sequence[int]]) -> Rounds:
    """Return the rounds of messages along a binomial tree of ``n`` ranks from rank 0: in the rounds
    of distance 2^k, …, 2, 1, every rank that has data sends to the rank at this distance.
    ``parts_below(first, last)``: the parts sent to the subtree of ranks first … last − 1."""
    return tuple(
        tuple(
            Message(
                rank,
                rank + distance,
                tuple(parts_below(rank + distance, min(rank + 2 * distance, n))),
            )
            for rank in range(0, n - distance, 2 * distance)
        )
        for distance in reversed(powers_below(n))
    )


def _make_binomial(hosts: Hosts, _: int) -> Made:
    return 1, _binomial_rounds(sum(hosts), lambda first, last: (0,))


def _count_scattered(shape: Shape) -> Counts:
    """Count messages and bytes of a broadcast by a scatter and an all-gather over n ranks: (⌈log2
    n⌉ + n − 1)·α + 2(n − 1)/n·S/β for S bytes, latency α and rate β (Thakur 2005, 4.3)."""
    n = shape.n
    messages = shape.on_one_level(log2_ceil(n) + n - 1)
    return Counts(messages, shape.on_one_level(2 * (n - 1) / n))


def _make_scattered(hosts: Hosts, _: int) -> Made:
    """Return the number of parts and the rounds of messages of the broadcast that scatters along a
    binomial tree, then all-gathers around a ring (van de Geijn)."""
    n = sum(hosts)
    return n, _binomial_rounds(n, range) + ring_rounds(range(n), own_parts(n))


def _count_pipeline(shape: Shape) -> Counts:
    """Count messages and bytes of a broadcast along a line of ranks, each of which passes on the
    whole tensor, part after part (NCCL)."""
    ring, n = count_ring(shape), shape.n
    tensors = Levels(*(count * n / (n - 1) for count in ring.tensors))
    return ring._replace(tensors=tensors, num_hops=n - 1)


def _make_pipeline(hosts: Hosts, num_pieces: int) -> Made:
    """Return the number of parts and the rounds of messages of the broadcast from rank 0 along a
    line of ranks, which sends the tensor in ``num_pieces`` parts, one after the other."""
    n = sum(hosts)
    return num_pieces, tuple(
        tuple(
            Message(rank, rank + 1, (step - rank,))
            for rank in range(n - 1)
            if 0 <= step - rank < num_pieces
        )
        for step in range(n - 2 + num_pieces)
    )


# All-to-alls.


def _count_direct(shape: Shape) -> Counts:
    """Count messages and bytes of an all-to-all in which each of n ranks sends S bytes, to all
    peers at once: α + (n − 2)·post + max((p − 1)/n·S/β1, (n − p)/n·S/β2). α is latency, β rate of a
    link (1 within a host of p ranks, 2 between hosts), ``post`` is ``POST_SECONDS``. A device's
    links within the host and to the network work at the same time. Source: NCCL's grouped sends."""
    n, p, _ = shape
    message = Levels(0, 0, 1) if n > p else Levels(1, 0)
    return Counts(message, Levels((p - 1) / n, (n - p) / n), at_once=True, num_posts=n - 2)


def _make_direct(hosts: Hosts, num_pieces: int) -> Made:
    """Return the number of parts and the single round of messages of the all-to-all in which every
    rank sends to all others at once."""
    num_parts, rounds = _make_pairwise(hosts, num_pieces)
    return num_parts, (sum(rounds, ()),)


def _count_pairwise(shape: Shape) -> Counts:
    """Count messages and bytes of an all-to-all of n ranks with one peer per round, p ranks per
    host: (p − 1)·(α1 + S/n/β1) + (n − p)·(α2 + S/n/β2) for S bytes per rank, latency α and rate β
    of links within a host (1) and between hosts (2) (Thakur 2005, 4.4)."""
    n, p, _ = shape
    return Counts(Levels(p - 1, n - p), Levels((p - 1) / n, (n - p) / n))


def _make_pairwise(hosts: Hosts, _: int) -> Made:
    """Return the number of parts and the rounds of messages of the all-to-all with one peer per
    round: first the peers on the same host, then on the hosts at distance 1, 2, … If hosts have
    unequal numbers of ranks, the peer in round k is the rank at distance k."""
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
    return n, tuple(rounds)


def _count_bruck(shape: Shape) -> Counts:
    """Count messages and bytes of Bruck's all-to-all of n ranks with S bytes each: ⌈log2 n⌉·α +
    b/n·S/β for latency α and rate β, where b is the number of bits set in all numbers below n
    (Thakur 2005, 4.4)."""
    n, ones = shape.n, 0
    for block in powers_below(n):
        ones += n // (2 * block) * block + max(0, n % (2 * block) - block)
    return Counts(shape.on_one_level(log2_ceil(n)), shape.on_one_level(ones / n))


def _make_bruck(hosts: Hosts, _: int) -> Made:
    """Return the number of parts and the rounds of messages of Bruck's all-to-all: in round k = 0,
    1, … a part moves on by 2^k ranks if bit k of the distance to its receiver is set."""
    n, rounds = sum(hosts), []
    for distance in powers_below(n):
        messages = []
        for rank in range(n):
            travelling = [left for left in range(n) if left & distance]
            parts = [
                (rank - left % distance) % n * n + (rank - left % distance + left) % n
                for left in travelling
            ]
            messages.append(Message(rank, (rank + distance) % n, tuple(parts)))
        rounds.append(tuple(messages))
    return n, tuple(rounds)


ALGORITHMS: Mapping[CollectiveKind, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": all_reduce(GATHERS["ring"]),
        "tree": Algorithm(_count_tree, _make_tree),
        "recursive_doubling": Algorithm(count_butterfly, make_butterfly),
        "halving_doubling": Algorithm(count_halving_doubling, make_halving_doubling),
        "hierarchical": all_reduce(GATHERS["hierarchical"]),
        "hierarchical_doubling": all_reduce(GATHERS["hierarchical_doubling"]),
    },
    "all_gather": GATHERS,
    "reduce_scatter": {name: reduce_scatter(gather) for name, gather in GATHERS.items()},
    "all_to_all": {
        "direct": Algorithm(_count_direct, _make_direct),
        "pairwise": Algorithm(_count_pairwise, _make_pairwise),
        "bruck": Algorithm(_count_bruck, _make_bruck),
    },
    "broadcast": {
        "binomial_tree": Algorithm(_count_binomial, _make_binomial),
        "scatter_all_gather": Algorithm(_count_scattered, _make_scattered),
        "pipelined_ring": Algorithm(_count_pipeline, _make_pipeline),
    },
}
"""Algorithms of each kind of collective, by name. Reduction in a switch is not among them, as it
does not consist of messages between ranks."""
