"""All-gathers, the reduce-scatters and all-reduces made of them, and butterflies.

Notation and sources: see ``algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest

from .tables import Algorithm, Counts, Hosts, Levels, Made, Message, Round, Rounds, Shape

Gather = Callable[[Sequence[int], Sequence[Sequence[int]]], Rounds]
"""Function that returns an all-gather's rounds, from the order of its ranks and the parts that each
rank begins with."""


def mirrored(gather: Rounds) -> Rounds:
    """Return the rounds of messages of the reduce-scatter that reverses an all-gather: the messages
    are sent back in reverse order, and each receiver adds."""
    return tuple(
        tuple(Message(m.receiver, m.sender, m.parts, adds=True) for m in messages)
        for messages in reversed(gather)
    )


def reduce_scatter(gather: Algorithm) -> Algorithm:
    """Return the reduce-scatter that reverses an all-gather, with equal counts of messages and
    bytes."""
    return _derived(gather, lambda counts: counts, mirrored)


def all_reduce(gather: Algorithm) -> Algorithm:
    """Return the all-reduce that consists of the reverse of the all-gather ``gather`` (a
    reduce-scatter), followed by ``gather`` itself."""
    return _derived(gather, Counts.doubled, lambda rounds: mirrored(rounds) + rounds)


def _derived(
    gather: Algorithm, counts_of: Callable[[Counts], Counts], rounds_of: Callable[[Rounds], Rounds]
) -> Algorithm:
    def count(shape: Shape) -> Counts | None:
        counts = gather.count(shape)
        return None if counts is None else counts_of(counts)

    def make(hosts: Hosts, num_pieces: int) -> Made | None:
        made = gather.make(hosts, num_pieces)
        return None if made is None else (made[0], rounds_of(made[1]))

    return Algorithm(count, make)


def side_by_side(*groups: Sequence[Round]) -> Rounds:
    """Merge the rounds of messages of several groups of ranks that work at the same time: the first
    rounds of all groups become the first round, and so on."""
    return tuple(sum(messages, ()) for messages in zip_longest(*groups, fillvalue=()))


def is_power_of_two(count: int) -> bool:
    """Return true if ``count`` is 1, 2, 4, 8, …"""
    return count & (count - 1) == 0


def _fold(n: int) -> int:
    """Return the number of additional rounds of an all-reduce of n ranks by recursive doubling: 0
    if n is a power of two; else 2, in which ranks beyond the largest power of two hand in their
    values before and receive the result after."""
    return 0 if is_power_of_two(n) else 2


def log2_ceil(count: int) -> int:
    return (count - 1).bit_length()


def _log2_floor(count: int) -> int:
    return count.bit_length() - 1


def count_ring(shape: Shape) -> Counts:
    """Count messages and bytes of an all-gather of S bytes around a ring of n ranks (α latency, β
    rate of a link). On equal links: (n − 1)·α + (n − 1)/n·S/β (Thakur 2005, 4.1, 4.2). Over h hosts
    of p ranks a part takes n − 1 hops, up to h of them between hosts: h·α2 + (n − 1 − h)·α1 (1
    within, 2 between hosts). p rings run at once, each leaving a host at another rank, so 1/p of a
    rank's bytes cross hosts: (n − 1)/n·S·max((p − 1)/(p·β1), 1/(p·β2))."""
    n, p, h = shape
    share = (n - 1) / n
    if shape.is_flat and shape.is_even:
        return Counts(shape.on_one_level(n - 1), shape.on_one_level(share))
    within = (p - 1) / p if shape.is_even else 1.0
    messages = Levels(max(0, n - 1 - h), h)
    return Counts(messages, Levels(share * within, share / p), at_once=True)


def ring_rounds(order: Sequence[int], owned: Sequence[Sequence[int]]) -> Rounds:
    """Return the rounds of messages of an all-gather around a ring ``order`` of ranks: each passes
    on the parts that it received last. Rank ``order[i]`` begins with the parts ``owned[i]``."""
    n = len(order)
    return tuple(
        tuple(Message(order[i], order[(i + 1) % n], tuple(owned[(i - step) % n])) for i in range(n))
        for step in range(n - 1)
    )


def _make_ring(hosts: Hosts, _: int) -> Made:
    """Return the number of parts and the rounds of messages of an all-gather around a ring. Over
    several hosts there is a ring per rank of the smallest host, each of which leaves hosts at
    another rank."""
    n, rings = sum(hosts), min(hosts) if len(hosts) > 1 else 1
    parallel = []
    for ring in range(rings):
        order = [rank for ranks in rotated(hosts, ring) for rank in ranks]
        parallel.append(ring_rounds(order, [[rank * rings + ring] for rank in order]))
    return n * rings, side_by_side(*parallel)


def rotated(hosts: Hosts, start: int) -> list[list[int]]:
    """Return the ranks of each host, rotated so that the rank at index ``start`` within its host
    comes first. ``hosts``: number of ranks on each host."""
    firsts = accumulate(hosts, initial=0)
    return [
        [first + (start + place) % count for place in range(count)]
        for first, count in zip(firsts, hosts, strict=False)
    ]


def _count_doubling(shape: Shape) -> Counts | None:
    """Count messages and bytes of an all-gather of S bytes by recursive doubling over n ranks, a
    power of two: log2 n·α + (n − 1)/n·S/β for latency α and rate β (Thakur 2005, 4.1; NCCL 2.23's
    PAT). None for other n, or if the ranks are on several hosts of several ranks."""
    n = shape.n
    if not (shape.is_flat and shape.is_even and is_power_of_two(n)):
        return None
    return Counts(shape.on_one_level(_log2_floor(n)), shape.on_one_level((n - 1) / n))


def _doubling_rounds(order: Sequence[int], owned: Sequence[Sequence[int]]) -> Rounds:
    """Return the rounds of messages in which 2^k ranks, at distance 1, 2, 4, … in ``order``,
    exchange all parts that they hold. Rank ``order[i]`` begins with the parts ``owned[i]``."""
    n, rounds = len(order), []
    for distance in powers_below(n):
        held = [
            sum((tuple(owned[j]) for j in range(n) if j // distance == i // distance), ())
            for i in range(n)
        ]
        rounds.append(tuple(Message(order[i], order[i ^ distance], held[i]) for i in range(n)))
    return tuple(rounds)


def powers_below(count: int) -> list[int]:
    return [1 << bit for bit in range(log2_ceil(count))]


def _make_doubling(hosts: Hosts, _: int) -> Made | None:
    n = sum(hosts)
    return (n, _doubling_rounds(range(n), own_parts(n))) if is_power_of_two(n) else None


def own_parts(n: int) -> list[list[int]]:
    return [[rank] for rank in range(n)]


def _hierarchical(between: Gather, steps: Callable[[int], int | None]) -> Algorithm:
    """Return the all-gather that first gathers between h hosts (among ranks with equal index in
    their hosts; ``between`` makes the ``steps(h)`` rounds), then around a ring of the p ranks of
    each host. Latency: ``steps(h)``·α2 + (p − 1)·α1. Time for S bytes: (h − 1)/h·S/p/β2 + (p −
    1)/p·S/β1. α, β are latency and rate of links within (1) and between hosts (2)."""

    def count(shape: Shape) -> Counts | None:
        _, p, h = shape
        num_steps = steps(h)
        if shape.is_flat or not shape.is_even or num_steps is None:
            return None
        return Counts(Levels(p - 1, num_steps), Levels((p - 1) / p, (h - 1) / h / p))

    def make(hosts: Hosts, _: int) -> Made | None:
        p, h = hosts[0], len(hosts)
        if len(set(hosts)) > 1 or h < 2 or p < 2 or steps(h) is None:
            return None
        columns = [[host * p + place for host in range(h)] for place in range(p)]
        rows = [[host * p + place for place in range(p)] for host in range(h)]
        across = side_by_side(*(between(column, [[rank] for rank in column]) for column in columns))
        within = side_by_side(*(ring_rounds(row, columns) for row in rows))
        return sum(hosts), across + within

    return Algorithm(count, make)


# All-reduces by butterflies; ranks over 2^k join before and are told after (Thakur, 4.5).


def count_butterfly(shape: Shape) -> Counts | None:
    """Count messages and bytes of an all-reduce of S bytes by recursive doubling over n ranks:
    (log2 m + f)·(α + S/β), where m is the largest power of two up to n, f is 0 if n = m and else 2,
    α the latency and β the rate of a link (Thakur 2005, 4.5)."""
    if not (shape.is_flat and shape.is_even):
        return None
    steps = shape.on_one_level(_log2_floor(shape.n) + _fold(shape.n))
    return Counts(steps, steps)


def count_halving_doubling(shape: Shape) -> Counts | None:
    """Count messages and bytes of an all-reduce of S bytes by recursive halving, then doubling
    (Rabenseifner 2004): 2·log2 m·α + 2(m − 1)/m·S/β + f·(α + S/β). Symbols: see
    ``count_butterfly``."""
    if not (shape.is_flat and shape.is_even):
        return None
    steps, fold = _log2_floor(shape.n), _fold(shape.n)
    tensors = 2 * (1 - 1 / (1 << steps)) + fold
    return Counts(shape.on_one_level(2 * steps + fold), shape.on_one_level(tensors))


def make_butterfly(hosts: Hosts, _: int) -> Made:
    return _folded(hosts, 1, _exchange_rounds)


def make_halving_doubling(hosts: Hosts, _: int) -> Made:
    core_size = 1 << _log2_floor(sum(hosts))

    def rounds(core: Sequence[int]) -> Rounds:
        gather = _doubling_rounds(core, own_parts(core_size))
        return mirrored(gather) + gather

    return _folded(hosts, core_size, rounds)


def _folded(hosts: Hosts, num_parts: int, core_rounds: Callable[[Sequence[int]], Rounds]) -> Made:
    n = sum(hosts)
    core_size = 1 << _log2_floor(n)
    extra = n - core_size
    whole = tuple(range(num_parts))
    core = [2 * place + 1 if place < extra else place + extra for place in range(core_size)]
    rounds = core_rounds(core)
    if extra:
        before = tuple(Message(2 * i, 2 * i + 1, whole, adds=True) for i in range(extra))
        after = tuple(Message(2 * i + 1, 2 * i, whole) for i in range(extra))
        rounds = (before, *rounds, after)
    return num_parts, rounds


def _exchange_rounds(order: Sequence[int]) -> Rounds:
    """Return the rounds of messages in which ranks at distance 1, 2, 4, … in ``order`` exchange the
    whole tensor and add the received one to their own."""
    n = len(order)
    return tuple(
        tuple(Message(order[i], order[i ^ distance], (0,), adds=True) for i in range(n))
        for distance in powers_below(n)
    )


GATHERS: Mapping[str, Algorithm] = {
    "ring": Algorithm(count_ring, _make_ring),
    "recursive_doubling": Algorithm(_count_doubling, _make_doubling),
    "hierarchical": _hierarchical(ring_rounds, lambda h: h - 1),
    "hierarchical_doubling": _hierarchical(
        _doubling_rounds, lambda h: log2_ceil(h) if is_power_of_two(h) else None
    ),
}
