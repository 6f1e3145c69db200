"""Seconds of collectives and transfers: latency plus bytes over bandwidth, per algorithm.

In: the kind, the bytes of the full tensor, and the group of ranks. Out: seconds of the
cheapest algorithm that is valid for the group and that its library has. The formulas, with
their sources, are in ``formulas``; the algorithms themselves, as messages that
are counted and run, in ``algorithms``.

NCCL carries any of its algorithms by one of several protocols. Those for short messages
(LL, LL128) have little latency and reach a part of a link's rate; the one for long messages
(Simple) reaches all of it and synchronizes at every step. Both are priced and the cheaper
counts, with what ``links.toml`` says of the kind of link. Source: NCCL,
src/graph/tuning.cc; calibrated on measurements, see ``benchmarks/collectives``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..cluster.cluster import Cluster, Link
from ..cluster.presets import Protocols, link_protocols
from .algorithms import CollectiveKind
from .formulas import (
    Shape,
    Wires,
    binomial_broadcast,
    bruck_all_to_all,
    butterfly_all_reduce,
    direct_all_to_all,
    halving_doubling,
    hierarchical_round,
    in_switch_all_reduce,
    is_power_of_two,
    pairwise_all_to_all,
    pipelined_broadcast,
    ring_round,
    scattered_broadcast,
    tree_all_reduce,
)

__all__ = [
    "CollectiveKind",
    "Group",
    "Library",
    "algorithm_seconds",
    "collective_seconds",
    "group_of",
    "p2p_seconds",
]

Library = Literal["nccl", "gloo", "any"]

PLAIN = Protocols()
SMALLEST_IN_SWITCH = 5
"""Ranks of a host from which NCCL has the switch sum: on 8 H200, ring is its default for 4
and NVLS for 5 (stas00/ml-engineering@744d01e network/README.md, NCCL 2.27)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that run a collective together.

    ``num_ranks`` = ``ranks_per_host`` × ``num_hosts`` where the hosts hold equally many of them;
    otherwise ``ranks_per_host`` is the fewest. ``sharing`` is how many such groups talk at the same
    time over the same device's link (1: each rank has its link's bandwidth to itself, which holds
    for the groups of a mesh axis, as links are per device). ``library`` limits the algorithms to
    those it has: NCCL has rings, trees, in-switch reduction and, with one rank per host,
    butterflies; gloo has rings, and reduce-scatters by an all-to-all, after which each rank sums
    (``runtime.messages.communicator``); ``"any"`` has all.
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

    Between hosts it is priced as two levels: where it spans racks, every step between hosts
    counts as one between racks, which is what the slowest step of a ring waits for.

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
    """Seconds of one message from one rank to another: α + S/β (Thakur, section 3).

    NCCL gives a pair of ranks few channels, and so a part of β, up to a size: of all links of a
    device, where the pair has a part of them.
    """
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
    return min(algorithm_seconds(kind, num_bytes, group, protocols=protocols).values())


def algorithm_seconds(
    kind: CollectiveKind,
    num_bytes: float,
    group: Group,
    *,
    protocols: Mapping[str, Protocols] | None = None,
) -> dict[str, float]:
    """For each algorithm that ``group`` can run, its seconds. Needs two ranks or more."""
    intra, inter, sharing = group.intra, group.inter, group.sharing
    first, second = PLAIN, PLAIN
    if group.library == "nccl":
        first, second = _protocols_of(intra, protocols), _protocols_of(inter, protocols)
    fill = first.switch_fill_seconds
    alpha1, beta1 = intra.alpha_seconds, intra.bytes_per_second / sharing
    alpha2, beta2 = inter.alpha_seconds, inter.bytes_per_second / sharing
    if kind == "all_to_all":
        alpha1 += first.exchange_seconds
        beta1 *= first.exchange_share
    short = Wires(alpha1, beta1 * first.short_share, alpha2, beta2 * second.short_share)
    seconds = _by_algorithm(kind, num_bytes, group, short, fill)
    if first is not PLAIN or second is not PLAIN:
        first_alpha, second_alpha = first.long_alpha_seconds, second.long_alpha_seconds
        long = Wires(alpha1 + first_alpha, beta1, alpha2 + second_alpha, beta2)
        for name, other in _by_algorithm(kind, num_bytes, group, long, fill).items():
            if other < seconds[name]:
                seconds[name] = other
    base = _base_seconds(group)
    if base:
        for name in seconds:
            seconds[name] += base
    return seconds


def _by_algorithm(
    kind: CollectiveKind, num_bytes: float, group: Group, wires: Wires, fill_seconds: float
) -> dict[str, float]:
    if kind == "all_reduce":
        return _all_reduce(num_bytes, group, wires, fill_seconds)
    if kind == "reduce_scatter" and group.library == "gloo":
        return _all_to_all(num_bytes, group, wires)
    if kind == "all_gather" or kind == "reduce_scatter":
        return _gather_or_scatter(num_bytes, group, wires)
    if kind == "all_to_all":
        return _all_to_all(num_bytes, group, wires)
    return _broadcast(num_bytes, group, wires)


def _base_seconds(group: Group) -> float:
    if group.num_hosts == 1:
        return group.intra.base_seconds
    if group.ranks_per_host == 1:
        return group.inter.base_seconds
    return max(group.intra.base_seconds, group.inter.base_seconds)


def _shape(group: Group) -> Shape:
    return Shape(group.num_ranks, group.ranks_per_host, group.num_hosts)


def _all_reduce(
    num_bytes: float, group: Group, wires: Wires, fill_seconds: float
) -> dict[str, float]:
    shape = _shape(group)
    latency, transfer = ring_round(num_bytes, shape, wires)
    seconds = {"ring": 2 * (latency + transfer)}
    if group.library == "gloo":
        return seconds
    if group.library == "any" or group.num_hosts > 1:
        seconds["tree"] = tree_all_reduce(num_bytes, shape, wires)
    reduction = group.intra.reduction_bytes_per_second
    if reduction and shape.p >= SMALLEST_IN_SWITCH:
        rate = reduction / group.sharing
        seconds["in_switch"] = in_switch_all_reduce(
            num_bytes, shape, wires, rate=rate, fill_seconds=fill_seconds
        )
    if group.library != "any":
        return seconds
    if shape.is_flat and shape.is_even:
        alpha, beta = wires.flat(shape)
        seconds["recursive_doubling"] = butterfly_all_reduce(num_bytes, shape.n, alpha, beta)
        seconds["halving_doubling"] = halving_doubling(num_bytes, shape.n, alpha, beta)
    seconds |= {name: 2 * half for name, half in _hierarchical(num_bytes, shape, wires).items()}
    return seconds


def _hierarchical(num_bytes: float, shape: Shape, wires: Wires) -> dict[str, float]:
    if shape.is_flat or not shape.is_even:
        return {}
    seconds = {"hierarchical": sum(hierarchical_round(num_bytes, shape, wires, doubling=False))}
    if is_power_of_two(shape.h):
        doubling = sum(hierarchical_round(num_bytes, shape, wires, doubling=True))
        seconds["hierarchical_doubling"] = doubling
    return seconds


def _gather_or_scatter(num_bytes: float, group: Group, wires: Wires) -> dict[str, float]:
    """All-gather, or the reduce-scatter that is its mirror image.

    recursive_doubling (halving for reduce-scatter): log2 n·α + (n − 1)/n·S/β, n a power of
    two (Thakur, section 4.1; NCCL 2.23's PAT, with one rank per host).
    """
    shape = _shape(group)
    latency, transfer = ring_round(num_bytes, shape, wires)
    seconds = {"ring": latency + transfer}
    if group.library == "gloo":
        return seconds
    has_butterfly = group.library == "any" or shape.p == 1
    if shape.is_flat and shape.is_even and has_butterfly and is_power_of_two(shape.n):
        alpha, _ = wires.flat(shape)
        seconds["recursive_doubling"] = (shape.n.bit_length() - 1) * alpha + transfer
    if group.library == "any":
        seconds |= _hierarchical(num_bytes, shape, wires)
    return seconds


def _all_to_all(num_bytes: float, group: Group, wires: Wires) -> dict[str, float]:
    shape = _shape(group)
    if group.library == "gloo":
        return {"pairwise": pairwise_all_to_all(num_bytes, shape, wires)}
    seconds = {"direct": direct_all_to_all(num_bytes, shape, wires)}
    if group.library == "any":
        seconds["pairwise"] = pairwise_all_to_all(num_bytes, shape, wires)
        alpha, beta = wires.flat(shape)
        seconds["bruck"] = bruck_all_to_all(num_bytes, shape.n, alpha, beta)
    return seconds


def _broadcast(num_bytes: float, group: Group, wires: Wires) -> dict[str, float]:
    shape = _shape(group)
    alpha, beta = wires.flat(shape)
    seconds: dict[str, float] = {}
    if group.library != "nccl":
        seconds["binomial_tree"] = binomial_broadcast(num_bytes, shape.n, alpha, beta)
    if group.library == "any":
        seconds["scatter_all_gather"] = scattered_broadcast(num_bytes, shape.n, alpha, beta)
    if group.library != "gloo":
        seconds["pipelined_ring"] = pipelined_broadcast(num_bytes, shape, wires)
    return seconds
