"""Seconds of collectives and transfers: latency plus bytes over bandwidth, per algorithm.

In: the kind, the bytes of the full tensor, and the group of ranks. Out: seconds of the
cheapest algorithm that is valid for the group and that its library has. Notation in the
formulas: n ranks, of which p on each of h hosts; S bytes; α seconds per message and β bytes
per second of a link, index 1 within a host and 2 between hosts. Where all p ranks of a host
talk to other hosts at once, each by its own share of the network, the host's rate is p·β2.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations
in MPICH", IJHPCA 19(1), 2005 (below: Thakur); Rabenseifner, "Optimization of Collective
Reduction Operations", ICCS 2004; Sanders, Speck, Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; NCCL, src/graph/
tuning.cc (the count of steps within and between hosts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from .cluster import Cluster, Link

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Library = Literal["nccl", "gloo", "any"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that run a collective together.

    ``num_ranks`` = ``ranks_per_host`` × ``num_hosts`` where the hosts hold equally many of
    them; otherwise ``ranks_per_host`` is the fewest. ``sharing`` is how many such groups
    talk at the same time over the same device's link (1: each rank has its link's bandwidth
    to itself, which holds for the groups of a mesh axis, as links are per device).
    ``library`` limits the algorithms to those it has: NCCL has rings, trees, in-switch
    reduction and, with one rank per host, butterflies; gloo has rings, and sums all of a
    tensor where it should reduce-scatter it; ``"any"`` has all.
    """

    num_ranks: int
    ranks_per_host: int
    num_hosts: int
    intra: Link
    inter: Link
    sharing: int = 1
    library: Library = "any"

    @property
    def is_flat(self) -> bool:
        """Whether every two ranks are joined by the same kind of link."""
        return self.num_hosts == 1 or self.ranks_per_host == 1

    @property
    def is_even(self) -> bool:
        return self.num_ranks == self.ranks_per_host * self.num_hosts


def group_of(cluster: Cluster, ranks: Sequence[int]) -> Group:
    """The group that ``ranks`` of ``cluster`` form, with the slowest link of its hosts.

    >>> from .shorthand import parse_cluster
    >>> group = group_of(parse_cluster("4x8xH100"), range(0, 32, 8))
    >>> group.num_hosts, group.ranks_per_host
    (4, 1)
    """
    counts: dict[int, int] = {}
    for rank in ranks:
        host = cluster.host_of[rank]
        counts[host] = counts.get(host, 0) + 1
    hosts = [cluster.hosts[host] for host in counts]
    on_gpus = all(host.device.kind == "cuda" for host in hosts)
    return Group(
        num_ranks=len(ranks),
        ranks_per_host=min(counts.values()),
        num_hosts=len(counts),
        intra=min((host.link for host in hosts), key=lambda link: link.bytes_per_second),
        inter=cluster.inter_link,
        library="nccl" if on_gpus else "gloo",
    )


def p2p_seconds(num_bytes: float, link: Link) -> float:
    """Seconds of one message from one rank to another: α + S/β (Thakur, section 3)."""
    if num_bytes <= 0:
        return 0.0
    return link.base_seconds + link.alpha_seconds + num_bytes / link.bytes_per_second


def collective_seconds(kind: CollectiveKind, num_bytes: float, group: Group) -> float:
    """Seconds of a collective by its cheapest algorithm; 0 for one rank or no bytes.

    ``num_bytes`` is the full tensor: the input of an all-reduce, a reduce-scatter or a
    broadcast, the gathered result of an all-gather, one rank's local input of an all-to-all.
    More bytes are never faster.

    >>> link = Link("wire", alpha_seconds=0.0, bytes_per_second=1e9)
    >>> collective_seconds("all_gather", 4e9, Group(4, 4, 1, link, link))
    3.0
    """
    if group.num_ranks <= 1 or num_bytes <= 0:
        return 0.0
    return min(algorithm_seconds(kind, num_bytes, group).values())


def algorithm_seconds(kind: CollectiveKind, num_bytes: float, group: Group) -> dict[str, float]:
    """For each algorithm that ``group`` can run, its seconds. Needs two ranks or more."""
    if kind == "all_reduce":
        seconds = _all_reduce(num_bytes, group)
    elif kind == "all_gather" or kind == "reduce_scatter":
        whole = kind == "reduce_scatter" and group.library == "gloo"
        seconds = (_all_reduce if whole else _gather_or_scatter)(num_bytes, group)
    elif kind == "all_to_all":
        seconds = _all_to_all(num_bytes, group)
    else:
        seconds = _broadcast(num_bytes, group)
    base = _base_seconds(group)
    if base:
        for name in seconds:
            seconds[name] += base
    return seconds


def _base_seconds(group: Group) -> float:
    if group.num_hosts == 1:
        return group.intra.base_seconds
    if group.ranks_per_host == 1:
        return group.inter.base_seconds
    return max(group.intra.base_seconds, group.inter.base_seconds)


def _log2_ceil(count: int) -> int:
    return (count - 1).bit_length()


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _flat(group: Group) -> tuple[float, float]:
    """(α, β) of the one kind of link of a flat group; the worst of both otherwise."""
    intra, inter = group.intra, group.inter
    if group.num_hosts == 1:
        return intra.alpha_seconds, intra.bytes_per_second / group.sharing
    if group.ranks_per_host == 1:
        return inter.alpha_seconds, inter.bytes_per_second / group.sharing
    return (
        max(intra.alpha_seconds, inter.alpha_seconds),
        min(intra.bytes_per_second, inter.bytes_per_second) / group.sharing,
    )


def _ring(group: Group) -> tuple[float, float]:
    """(latency of n − 1 steps, bandwidth) of the rings that pass all ranks.

    A chunk takes n − 1 hops, h − 1 of them between hosts: (n − h)·α1 + (h − 1)·α2. Several
    rings run at once, each leaving a host at another device: min(β1, p·β2).
    Source: NCCL tuning.cc (nsteps, nInterSteps).
    """
    if group.is_flat:
        alpha, rate = _flat(group)
        return (group.num_ranks - 1) * alpha, rate
    intra, inter, hosts = group.intra, group.inter, group.num_hosts
    latency = (group.num_ranks - hosts) * intra.alpha_seconds + (hosts - 1) * inter.alpha_seconds
    rate = min(intra.bytes_per_second, group.ranks_per_host * inter.bytes_per_second)
    return latency, rate / group.sharing


def _all_reduce(num_bytes: float, group: Group) -> dict[str, float]:
    n = group.num_ranks
    latency, rate = _ring(group)
    seconds = {"ring": ring_all_reduce_seconds(num_bytes, n, latency, rate)}
    if group.library == "gloo":
        return seconds
    seconds["tree"] = _tree_all_reduce(num_bytes, group)
    if group.intra.reduction_bytes_per_second and group.ranks_per_host > 1:
        seconds["in_switch"] = _in_switch_all_reduce(num_bytes, group)
    if group.library != "any":
        return seconds
    if group.is_flat and _is_power_of_two(n):
        alpha, rate = _flat(group)
        seconds["recursive_doubling"] = _log2_ceil(n) * (alpha + num_bytes / rate)
        seconds["halving_doubling"] = halving_doubling_seconds(num_bytes, n, alpha, rate)
    if not group.is_flat and group.is_even:
        seconds["hierarchical"] = _hierarchical_all_reduce(num_bytes, group)
    return seconds


def ring_all_reduce_seconds(num_bytes: float, n: int, latency: float, rate: float) -> float:
    """Reduce-scatter then all-gather around a ring: 2·latency + 2(n − 1)/n·S/β.

    ``latency`` is that of one round of n − 1 steps, (n − 1)·α on equal links.
    Source: Thakur, section 4.5 and 4.1; NCCL.

    >>> ring_all_reduce_seconds(4e9, 4, 3e-6, 1e9)
    6.000006
    """
    return 2 * latency + 2 * (n - 1) / n * num_bytes / rate


def halving_doubling_seconds(num_bytes: float, n: int, alpha: float, rate: float) -> float:
    """Recursive halving then doubling: 2·log2 n·α + 2(n − 1)/n·S/β, n a power of two.

    Source: Rabenseifner 2004; Thakur, section 4.5.

    >>> halving_doubling_seconds(4e9, 4, 1e-6, 1e9)
    6.000004
    """
    return 2 * _log2_ceil(n) * alpha + 2 * (n - 1) / n * num_bytes / rate


def _tree_all_reduce(num_bytes: float, group: Group) -> float:
    """Two binary trees over the hosts, a chain within each host, pipelined.

    Up and down: 2·((p − 1)·α1 + ⌈log2 h⌉·α2). Every rank is an inner node of one tree and a
    leaf of the other, each for half of S, so at most 2·S leave it (S where only two take
    part): min(2, h − 1)·S/(p·β2). Source: Sanders et al. 2009; NCCL 2.4 trees.
    """
    if group.is_flat:
        alpha, rate = _flat(group)
        n = group.num_ranks
        return 2 * _log2_ceil(n) * alpha + min(2, n - 1) * num_bytes / rate
    p, hosts, intra, inter = group.ranks_per_host, group.num_hosts, group.intra, group.inter
    latency = (p - 1) * intra.alpha_seconds + _log2_ceil(hosts) * inter.alpha_seconds
    within = min(2, p - 1) / intra.bytes_per_second
    between = min(2, hosts - 1) / (p * inter.bytes_per_second)
    return 2 * latency + max(within, between) * num_bytes * group.sharing


def _in_switch_all_reduce(num_bytes: float, group: Group) -> float:
    """The switch of each host sums, two trees join the hosts, all pipelined.

    2·α1 + 2·⌈log2 h⌉·α2 + max(S/ρ, min(2, h − 1)·S/(p·β2)), ρ the switch's rate.
    Source: NCCL's NVLS and NVLSTree.
    """
    intra, inter, hosts = group.intra, group.inter, group.num_hosts
    seconds_per_byte = 1 / intra.reduction_bytes_per_second
    latency = 2 * intra.alpha_seconds
    if hosts > 1:
        latency += 2 * _log2_ceil(hosts) * inter.alpha_seconds
        between = min(2, hosts - 1) / (group.ranks_per_host * inter.bytes_per_second)
        seconds_per_byte = max(seconds_per_byte, between)
    return latency + seconds_per_byte * num_bytes * group.sharing


def _hierarchical_all_reduce(num_bytes: float, group: Group) -> float:
    """Reduce-scatter in the host, all-reduce of S/p between hosts, all-gather in the host.

    2·((p − 1)·α1 + (p − 1)/p·S/β1) + the best flat all-reduce of S/p over h ranks.
    """
    p, hosts, sharing = group.ranks_per_host, group.num_hosts, group.sharing
    within = _ring_round(num_bytes, p, group.intra, sharing)
    alpha, rate = group.inter.alpha_seconds, group.inter.bytes_per_second / sharing
    part = num_bytes / p
    between = ring_all_reduce_seconds(part, hosts, (hosts - 1) * alpha, rate)
    if _is_power_of_two(hosts):
        between = min(between, halving_doubling_seconds(part, hosts, alpha, rate))
    return 2 * within + between


def _ring_round(num_bytes: float, n: int, link: Link, sharing: int) -> float:
    """All-gather or reduce-scatter around one ring: (n − 1)·α + (n − 1)/n·S/β."""
    return (n - 1) * (link.alpha_seconds + num_bytes / n / link.bytes_per_second * sharing)


def _gather_or_scatter(num_bytes: float, group: Group) -> dict[str, float]:
    """All-gather, or the reduce-scatter that is its mirror image.

    ring: (n − 1)·α + (n − 1)/n·S/β (Thakur, section 4.1, 4.2; NCCL).
    recursive_doubling (halving for reduce-scatter): log2 n·α + (n − 1)/n·S/β, n a power of
    two (Thakur, section 4.1; NCCL 2.23's PAT, with one rank per host).
    hierarchical: all-gather S/p between the hosts, by p ranks at once, then S in the host.
    """
    n = group.num_ranks
    latency, rate = _ring(group)
    transfer = (n - 1) / n * num_bytes / rate
    seconds = {"ring": latency + transfer}
    if group.library == "gloo":
        return seconds
    has_butterfly = group.library == "any" or group.ranks_per_host == 1
    if group.is_flat and has_butterfly and _is_power_of_two(n):
        alpha, rate = _flat(group)
        seconds["recursive_doubling"] = _log2_ceil(n) * alpha + transfer
    if not group.is_flat and group.is_even and group.library == "any":
        p, hosts, inter = group.ranks_per_host, group.num_hosts, group.inter
        steps = _log2_ceil(hosts) if _is_power_of_two(hosts) else hosts - 1
        part = (hosts - 1) / hosts * num_bytes / p
        between = steps * inter.alpha_seconds + part / inter.bytes_per_second * group.sharing
        seconds["hierarchical"] = between + _ring_round(num_bytes, p, group.intra, group.sharing)
    return seconds


def _all_to_all(num_bytes: float, group: Group) -> dict[str, float]:
    """Every rank sends S/n to every other.

    pairwise: (p − 1)·α1 + (n − p)·α2 + max((p − 1)/n·S/β1, (n − p)/n·S/β2), a device's link
    within the host and its share of the network being busy at once (Thakur, section 4.4).
    bruck: ⌈log2 n⌉·(α + S/2/β) (Thakur, section 4.4), short messages.
    """
    n, p = group.num_ranks, group.ranks_per_host if group.num_hosts > 1 else group.num_ranks
    intra, inter, sharing = group.intra, group.inter, group.sharing
    latency = (p - 1) * intra.alpha_seconds + (n - p) * inter.alpha_seconds
    within = (p - 1) / n * num_bytes / intra.bytes_per_second
    between = (n - p) / n * num_bytes / inter.bytes_per_second
    seconds = {"pairwise": latency + max(within, between) * sharing}
    if group.library == "any":
        alpha, rate = _flat(group)
        seconds["bruck"] = _log2_ceil(n) * (alpha + num_bytes / 2 / rate)
    return seconds


def _broadcast(num_bytes: float, group: Group) -> dict[str, float]:
    """One rank's S to all.

    binomial_tree: ⌈log2 n⌉·(α + S/β) (Thakur, section 4.3).
    scatter_all_gather: (⌈log2 n⌉ + n − 1)·α + 2(n − 1)/n·S/β (van de Geijn; Thakur, 4.3).
    pipelined_ring: k chunks over n − 1 hops, (n − 2 + k)·(α + S/(kβ)), at the best k ≥ 1:
    (√((n − 2)·α) + √(S/β))² where that k is more than 1 (NCCL's ring), α the mean hop.
    """
    n = group.num_ranks
    alpha, rate = _flat(group)
    hops = _log2_ceil(n)
    seconds: dict[str, float] = {}
    if group.library != "nccl":
        seconds["binomial_tree"] = hops * (alpha + num_bytes / rate)
    if group.library == "any":
        seconds["scatter_all_gather"] = (hops + n - 1) * alpha + 2 * (n - 1) / n * num_bytes / rate
    if group.library != "gloo":
        latency, ring_rate = _ring(group)
        hop, transfer = latency / (n - 1), num_bytes / ring_rate
        is_one_chunk = (n - 2) * transfer <= hop
        seconds["pipelined_ring"] = (
            (n - 1) * (hop + transfer)
            if is_one_chunk
            else (sqrt((n - 2) * hop) + sqrt(transfer)) ** 2
        )
    return seconds
