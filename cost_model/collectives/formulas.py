"""Latency and transfer of each collective algorithm, in closed form.

In: bytes of the whole tensor, how the ranks lie on hosts, latency and rate of both levels.
Out: seconds per algorithm. Notation: n ranks, of which p on each of h hosts; S bytes; α
seconds per message and β bytes per second of a link, index 1 within a host and 2 between
hosts. All p ranks of a host talk to other hosts at once, each by its own share of the
network: the host's rate is p·β2. m is the largest power of two that is at most n.

Each formula is what ``algorithms`` counts in the algorithm's table of messages (a test
compares them): rounds for those whose rounds follow each other, the longest chain of
messages and the busiest rank's bytes for the pipelined ring and trees.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations
in MPICH", IJHPCA 19(1), 2005 (below: Thakur); Rabenseifner, "Optimization of Collective
Reduction Operations", ICCS 2004; Sanders, Speck, Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; NCCL, src/graph/
tuning.cc (steps within and between hosts) and src/graph/trees.cc.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple


class Shape(NamedTuple):
    """How a group lies: n ranks, p on the host with the fewest, h hosts."""

    n: int
    p: int
    h: int

    @property
    def is_flat(self) -> bool:
        """Whether every two ranks are joined by the same kind of link."""
        return self.h == 1 or self.p == 1

    @property
    def is_even(self) -> bool:
        return self.n == self.p * self.h


class Wires(NamedTuple):
    """α in seconds and β in bytes per second, within a host (1) and between hosts (2)."""

    alpha1: float
    beta1: float
    alpha2: float
    beta2: float

    def flat(self, shape: Shape) -> tuple[float, float]:
        """(α, β) of the one kind of link of a flat group; the worst of both otherwise."""
        if shape.h == 1:
            return self.alpha1, self.beta1
        if shape.p == 1:
            return self.alpha2, self.beta2
        return max(self.alpha1, self.alpha2), min(self.beta1, self.beta2)


POST_SECONDS = 0.5e-6
"""What each further peer costs where a rank sends to many at once. From the latency of empty
all-to-alls on 16 to 128 H100, 37 to 98 µs (meta-pytorch/autoparallel@a54c252, measured fit)."""


def ring_round(num_bytes: float, shape: Shape, wires: Wires) -> tuple[float, float]:
    """(latency, transfer) of one way around: an all-gather; a reduce-scatter is its mirror.

    On equal links (n − 1)·α and (n − 1)/n·S/β (Thakur, 4.1, 4.2). Over hosts a part takes
    n − 1 hops, up to h of them between hosts: h·α2 + (n − 1 − h)·α1. p rings run at once,
    each leaving a host at another rank, so 1/p of what a rank sends crosses hosts:
    (n − 1)/n·S·max((p − 1)/(p·β1), 1/(p·β2)).
    """
    n, p, h = shape
    share = (n - 1) / n * num_bytes
    if h == 1 or p == 1:
        alpha, beta = wires.flat(shape)
        if n == p * h:
            return (n - 1) * alpha, share / beta
    alpha1, beta1, alpha2, beta2 = wires
    within = (p - 1) / p if n == p * h else 1.0
    return h * alpha2 + max(0, n - 1 - h) * alpha1, share * max(within / beta1, 1 / (p * beta2))


def butterfly_all_reduce(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """Recursive doubling: (log2 m + f)·(α + S/β), where f = 2 unless n = m: ranks above m
    hand theirs over before and are told after. Source: Thakur, 4.5.

    >>> butterfly_all_reduce(1e9, 8, 1.0, 1e9)
    6.0
    """
    return (_log2_floor(n) + _fold(n)) * (alpha + num_bytes / beta)


def halving_doubling(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """Recursive halving then doubling: 2·log2 m·α + 2(m − 1)/m·S/β + f·(α + S/β).

    f as for recursive doubling. Source: Rabenseifner 2004; Thakur, 4.5.

    >>> halving_doubling(4e9, 4, 1e-6, 1e9)
    6.000004
    """
    steps = _log2_floor(n)
    core = 2 * steps * alpha + 2 * (1 - 1 / (1 << steps)) * num_bytes / beta
    return core + _fold(n) * (alpha + num_bytes / beta)


def tree_all_reduce(num_bytes: float, shape: Shape, wires: Wires) -> float:
    """Two binary trees over the hosts, a chain within each host, pipelined.

    Up and down: 2·((p − 1)·α1 + ⌈log2 h⌉·α2). In the trees every rank is inner in one and a
    leaf in the other, each for half of S, so min(2, h/2)·S/p leave a rank; in the chains
    2(p − 1)/p·S. The slower of both counts. On one level h is n and p is 1. Where hosts differ,
    a chain has at most n − (h − 1)·p ranks. Source: Sanders et al. 2009; NCCL 2.4 trees.
    """
    n, p, h = shape
    alpha1, beta1, alpha2, beta2 = wires
    if shape.is_flat and shape.is_even:
        (alpha2, beta2), p, h = wires.flat(shape), 1, n
    latency = 2 * ((n - (h - 1) * p - 1) * alpha1 + _log2_ceil(h) * alpha2)
    within = 2 * (p - 1) / p if n == p * h else 2
    return latency + num_bytes * max(within / beta1, min(2, h / 2) / (p * beta2))


def in_switch_all_reduce(
    num_bytes: float, shape: Shape, wires: Wires, *, rate: float, fill_seconds: float
) -> float:
    """The switch of each host sums, two trees join the hosts, all pipelined.

    2·α1 + 2·⌈log2 h⌉·α2 + max(S/ρ, min(2, h/2)·S/(p·β2)) + min(S/ρ, fill), ρ the switch's
    ``rate``. The last: what was summed is sent out once a whole chunk is there, so a tensor
    below one chunk passes twice in turn. Source: NCCL's NVLS and NVLSTree.
    """
    alpha1, _, alpha2, beta2 = wires
    summed = num_bytes / rate
    latency, transfer = 2 * alpha1, summed
    if shape.h > 1:
        latency += 2 * _log2_ceil(shape.h) * alpha2
        transfer = max(summed, min(2, shape.h / 2) * num_bytes / (shape.p * beta2))
    return latency + transfer + min(summed, fill_seconds)


def hierarchical_round(
    num_bytes: float, shape: Shape, wires: Wires, *, doubling: bool
) -> tuple[float, float]:
    """(latency, transfer) of an all-gather first between hosts, by p ranks at once, then in them.

    ring: (h − 1)·α2 + (p − 1)·α1 and (h − 1)/h·S/p/β2 + (p − 1)/p·S/β1; with ``doubling``
    log2 h·α2 instead, h a power of two. An all-reduce is twice that.
    """
    _, p, h = shape
    alpha1, beta1, alpha2, beta2 = wires
    steps = _log2_ceil(h) if doubling else h - 1
    transfer = (h - 1) / h * num_bytes / p / beta2 + (p - 1) / p * num_bytes / beta1
    return steps * alpha2 + (p - 1) * alpha1, transfer


def pairwise_all_to_all(num_bytes: float, shape: Shape, wires: Wires) -> float:
    """A peer per round: (p − 1)·(α1 + S/n/β1) + (n − p)·(α2 + S/n/β2) (Thakur, 4.4)."""
    n, p = shape.n, shape.p
    alpha1, beta1, alpha2, beta2 = wires
    part = num_bytes / n
    return (p - 1) * (alpha1 + part / beta1) + (n - p) * (alpha2 + part / beta2)


def direct_all_to_all(num_bytes: float, shape: Shape, wires: Wires) -> float:
    """All peers at once: α + (n − 2)·post + max((p − 1)/n·S/β1, (n − p)/n·S/β2).

    A device's link within the host and its share of the network are busy at once. Source:
    NCCL's grouped sends and receives.
    """
    n, p = shape.n, shape.p
    alpha = max(wires.alpha1, wires.alpha2) if n > p else wires.alpha1
    within, between = (p - 1) / n / wires.beta1, (n - p) / n / wires.beta2
    return alpha + (n - 2) * POST_SECONDS + num_bytes * max(within, between)


def bruck_all_to_all(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """⌈log2 n⌉·α + b/n·S/β, b the ones in the binary digits of 0 … n − 1 (Thakur, 4.4).

    >>> bruck_all_to_all(4e9, 4, 0.0, 1e9)
    4.0
    """
    ones = 0
    for bit in range(_log2_ceil(n)):
        block = 1 << bit
        ones += n // (2 * block) * block + max(0, n % (2 * block) - block)
    return _log2_ceil(n) * alpha + ones / n * num_bytes / beta


def binomial_broadcast(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """⌈log2 n⌉·(α + S/β) (Thakur, 4.3)."""
    return _log2_ceil(n) * (alpha + num_bytes / beta)


def scattered_broadcast(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """Scatter, then all-gather: (⌈log2 n⌉ + n − 1)·α + 2(n − 1)/n·S/β (Thakur, 4.3)."""
    return (_log2_ceil(n) + n - 1) * alpha + 2 * (n - 1) / n * num_bytes / beta


def pipelined_broadcast(num_bytes: float, shape: Shape, wires: Wires) -> float:
    """k chunks over n − 1 hops, (n − 2 + k)·(α + S/(kβ)), at the best k ≥ 1.

    (√((n − 2)·α) + √(S/β))² where that k is more than 1; α is the mean hop of a ring and
    S/β what a ring needs for S. Source: NCCL's ring.
    """
    n = shape.n
    latency, share = ring_round(num_bytes, shape, wires)
    hop, transfer = latency / (n - 1), share * n / (n - 1)
    if (n - 2) * transfer <= hop:
        return (n - 1) * (hop + transfer)
    return (sqrt((n - 2) * hop) + sqrt(transfer)) ** 2


def is_power_of_two(count: int) -> bool:
    """Whether ``count`` is 1, 2, 4, …"""
    return count & (count - 1) == 0


def _fold(n: int) -> int:
    return 0 if is_power_of_two(n) else 2


def _log2_ceil(count: int) -> int:
    return (count - 1).bit_length()


def _log2_floor(count: int) -> int:
    return count.bit_length() - 1
