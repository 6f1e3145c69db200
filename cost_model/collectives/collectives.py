"""Seconds of collectives and transfers: latency plus bytes over bandwidth, per algorithm.

In: the kind, the bytes of the full tensor, and the group of ranks. Out: seconds of the
cheapest algorithm that is valid for the group and that its library has. The algorithms are
described in ``algorithms``, with their formulas and sources.

NCCL carries any of its algorithms by one of several protocols. Those for short messages
(LL, LL128) have little latency and reach a part of a link's rate; the one for long messages
(Simple) reaches all of it and synchronizes at every step. Both are priced and the cheaper
counts, with the figures of ``links.toml`` for the kind of link. Source: NCCL,
src/graph/tuning.cc; calibrated on measurements, see ``benchmarks/collectives``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Literal, NamedTuple

from ..cluster.cluster import Cluster, Link
from ..cluster.presets import Protocols, link_protocols
from .algorithms import ALGORITHMS
from .gathers import log2_ceil
from .tables import CollectiveKind as CollectiveKind
from .tables import Counts, Shape

Library = Literal["nccl", "gloo", "any"]

PLAIN = Protocols()
"""Figures for links that NCCL does not use, or on which its protocols were not measured."""

POST_SECONDS = 0.5e-6
"""Seconds for each peer beyond the first when a rank sends to many. From the latency of empty
all-to-alls on 16 to 128 H100, 37 to 98 µs (meta-pytorch/autoparallel@a54c252, measured fit)."""

SMALLEST_IN_SWITCH = 5
"""Number of a group's ranks on a host from which NCCL lets the NVLink switch sum: on 8 H200, ring
is its default for 4 and NVLS for 5 (stas00/ml-engineering@744d01e network/README.md, NCCL 2.27)."""


class Wires(NamedTuple):
    """Latencies α1, α2 in seconds, rates β1, β2 in bytes per second: within (1), between hosts
    (2)."""

    alpha1: float
    beta1: float
    alpha2: float
    beta2: float


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that run a collective together, over links ``intra`` within and ``inter`` between
    hosts. ``ranks_per_host`` is the smallest number of ranks on a host. Each rank has the bandwidth
    of its link to itself. ``library`` limits the algorithms: NCCL has rings, trees, in-switch
    reduction and, with one rank per host, recursive doubling; gloo has rings, and a reduce-scatter
    by an all-to-all, after which each rank sums (``runtime.messages.communicator``); ``"any"`` has
    all algorithms. For a message between two ranks ``num_pairs`` is the number of pairs that send
    between their hosts at once, which may share a link."""

    num_ranks: int
    ranks_per_host: int
    num_hosts: int
    intra: Link
    inter: Link
    library: Library = "any"
    num_pairs: int = 1

    @property
    def is_even(self) -> bool:
        return self.num_ranks == self.ranks_per_host * self.num_hosts


def group_of(cluster: Cluster, ranks: Sequence[int]) -> Group:
    """Return the group of ``ranks`` of ``cluster``. It has one link within hosts, the slowest of
    its hosts' links, and one between hosts: if the group spans racks, this is the link between
    racks, as a ring waits for its slowest link.

    >>> from ..cluster.shorthand import parse_cluster
    >>> group = group_of(parse_cluster("4x8xH100"), range(0, 32, 8))
    >>> group.num_hosts, group.ranks_per_host
    (4, 1)
    """
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.host_of[rank], []).append(rank)
    hosts = [cluster.hosts[host] for host in members]
    on_gpus = all(host.device.kind == "cuda" for host in hosts)
    links = (cluster.link_within(host, own) for host, own in members.items())
    return Group(
        num_ranks=len(ranks),
        ranks_per_host=min(len(own) for own in members.values()),
        num_hosts=len(members),
        intra=min(links, key=lambda link: link.bytes_per_second),
        inter=cluster.host_link({host.rack for host in hosts}),
        library="nccl" if on_gpus else "gloo",
    )


def p2p_seconds(
    num_bytes: float, link: Link, *, protocols: Mapping[str, Protocols] | None = None
) -> float:
    """Return the seconds of one message of ``num_bytes`` from one rank to another: latency plus
    bytes by rate (Thakur 2005, section 3). NCCL gives two ranks few channels, so a message up to a
    certain size reaches only a share of the rate. ``protocols``: NCCL's figures by name of link;
    None for the figures in ``links.toml``."""
    if num_bytes <= 0:
        return 0.0
    start, rate = link.base_seconds + link.alpha_seconds, link.bytes_per_second
    found = _protocols_of(link, protocols)
    whole = rate * link.of_links / link.num_links if link.of_links else rate
    few_channels = min(num_bytes, found.p2p_few_bytes)
    return start + max(num_bytes / rate, few_channels / (found.p2p_few_share * whole))


def _protocols_of(link: Link, protocols: Mapping[str, Protocols] | None) -> Protocols:
    known = link_protocols() if protocols is None else protocols
    return known.get(link.name, PLAIN)


def collective_seconds(
    kind: CollectiveKind,
    num_bytes: float,
    group: Group,
    *,
    protocols: Mapping[str, Protocols] | None = None,
) -> float:
    """Return the seconds of a collective by its cheapest algorithm; 0 for a single rank or no
    bytes. ``num_bytes`` is the full tensor: the input of an all-reduce, a reduce-scatter or a
    broadcast, the gathered result of an all-gather, one rank's local input of an all-to-all.
    ``protocols``: NCCL's figures by name of link; None for those in ``links.toml``.

    >>> link = Link("wire", alpha_seconds=0.0, bytes_per_second=1e9)
    >>> collective_seconds("all_gather", 4e9, Group(4, 4, 1, link, link))
    3.0
    """
    if group.num_ranks <= 1 or num_bytes <= 0:
        return 0.0
    return min(algorithm_seconds(kind, num_bytes, group, protocols=protocols).values())


def algorithm_seconds(
    kind: CollectiveKind,
    num_bytes: float,
    group: Group,
    *,
    protocols: Mapping[str, Protocols] | None = None,
) -> dict[str, float]:
    """Return the seconds of a collective by the name of each algorithm that ``group`` (≥ 2 ranks)
    can run; arguments as in ``collective_seconds``."""
    intra, inter = group.intra, group.inter
    first, second = PLAIN, PLAIN
    if group.library == "nccl":
        first, second = _protocols_of(intra, protocols), _protocols_of(inter, protocols)
    alpha1, beta1 = intra.alpha_seconds, intra.bytes_per_second
    alpha2, beta2 = inter.alpha_seconds, inter.bytes_per_second
    if kind == "all_to_all":
        alpha1 += first.exchange_seconds
        beta1 *= first.exchange_share
    wires = [Wires(alpha1, beta1 * first.short_share, alpha2, beta2 * second.short_share)]
    if first is not PLAIN or second is not PLAIN:
        first_alpha, second_alpha = first.long_alpha_seconds, second.long_alpha_seconds
        wires.append(Wires(alpha1 + first_alpha, beta1, alpha2 + second_alpha, beta2))
    shape = Shape(group.num_ranks, group.ranks_per_host, group.num_hosts)
    base = _base_seconds(group)
    seconds = {
        name: base + min(_seconds(counts, num_bytes, each) for each in wires)
        for name, counts in _offered(kind, shape, group.library)
    }
    rate, fill = intra.reduction_bytes_per_second, first.switch_fill_seconds
    if kind == "all_reduce" and rate and group.library != "gloo" and shape.p >= SMALLEST_IN_SWITCH:
        seconds["in_switch"] = base + min(
            _in_switch_seconds(num_bytes, shape, each, rate=rate, fill_seconds=fill)
            for each in wires
        )
    return seconds


LIBRARY_ALGORITHMS: Mapping[Library, Mapping[CollectiveKind, tuple[str, ...]]] = {
    "nccl": {
        "all_reduce": ("ring", "tree"),
        "all_gather": ("ring", "recursive_doubling"),
        "reduce_scatter": ("ring", "recursive_doubling"),
        "all_to_all": ("direct",),
        "broadcast": ("pipelined_ring",),
    },
    "gloo": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("pairwise",),
        "all_to_all": ("pairwise",),
        "broadcast": ("binomial_tree",),
    },
    "any": {kind: tuple(algorithms) for kind, algorithms in ALGORITHMS.items()},
}
"""Names of the algorithms that each library has for a collective. gloo's reduce-scatter is an
all-to-all, see ``Group``."""


@lru_cache(maxsize=4096)
def _offered(
    kind: CollectiveKind, shape: Shape, library: Library
) -> tuple[tuple[str, Counts], ...]:
    """Return (name, counts of messages and bytes) of each algorithm of a library that a group of
    this layout can run. NCCL has trees only between hosts, and recursive doubling only with one
    rank per host."""
    offered = []
    known = ALGORITHMS["all_to_all" if (kind, library) == ("reduce_scatter", "gloo") else kind]
    for name in LIBRARY_ALGORITHMS[library][kind]:
        counts = known[name].count(shape)
        is_left_out = (name == "tree" and shape.h == 1) or (
            name == "recursive_doubling" and shape.p > 1
        )
        if counts is not None and not (library == "nccl" and is_left_out):
            offered.append((name, counts))
    return tuple(offered)


def _seconds(counts: Counts, num_bytes: float, wires: Wires) -> float:
    """Return the seconds of an algorithm on a tensor of ``num_bytes``, from its ``counts``: the
    latency of its successive messages plus the time for its bytes over links ``wires``."""
    alpha1, beta1, alpha2, beta2 = wires
    messages, tensors, at_once, num_posts, num_hops = counts
    latency = messages.intra * alpha1 + messages.inter * alpha2 + num_posts * POST_SECONDS
    within, between = tensors.intra / beta1, tensors.inter / beta2
    transfer = num_bytes * (max(within, between) if at_once else within + between)
    if messages.slowest or tensors.slowest:
        latency += messages.slowest * max(alpha1, alpha2)
        transfer += num_bytes * tensors.slowest / min(beta1, beta2)
    return _pipeline_seconds(latency, transfer, num_hops) if num_hops else latency + transfer


def _pipeline_seconds(latency: float, transfer: float, num_hops: int) -> float:
    """Return the seconds to send a tensor along a chain of hops in k equal parts, for the best k ≥
    1. ``latency`` is that of all hops in seconds, ``transfer`` the seconds of the whole tensor over
    one hop. k parts take (hops − 1 + k)·(α + transfer/k), α being the mean latency of a hop; for
    the best k > 1 this is (√((hops − 1)·α) + √transfer)²."""
    hop = latency / num_hops
    if (num_hops - 1) * transfer <= hop:
        return num_hops * (hop + transfer)
    return (sqrt((num_hops - 1) * hop) + sqrt(transfer)) ** 2


def _in_switch_seconds(
    num_bytes: float, shape: Shape, wires: Wires, *, rate: float, fill_seconds: float
) -> float:
    """Return the seconds of an all-reduce of S bytes in which each host's switch sums and two trees
    join h hosts of p ranks: 2·α1 + 2·⌈log2 h⌉·α2 + max(S/ρ, min(2, h/2)·S/(p·β2)) + min(S/ρ, fill).
    α is the latency, β the rate of links within (1) and between hosts (2), ρ the switch's ``rate``,
    fill is ``fill_seconds``: a switch sends a sum when a whole chunk has arrived, so a tensor
    smaller than a chunk first passes in, then out. Source: NCCL's NVLS and NVLSTree."""
    alpha1, _, alpha2, beta2 = wires
    summed = num_bytes / rate
    latency, transfer = 2 * alpha1, summed
    if shape.h > 1:
        latency += 2 * log2_ceil(shape.h) * alpha2
        transfer = max(summed, min(2, shape.h / 2) * num_bytes / (shape.p * beta2))
    return latency + transfer + min(summed, fill_seconds)


def _base_seconds(group: Group) -> float:
    if group.num_hosts == 1:
        return group.intra.base_seconds
    if group.ranks_per_host == 1:
        return group.inter.base_seconds
    return max(group.intra.base_seconds, group.inter.base_seconds)
