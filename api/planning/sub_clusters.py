"""Parts of a cluster that one could rent or reserve instead of all of it.

In: a cluster. Out: the clusters made of some of its hosts, whole, and of some devices of one
host. Hosts that are alike count once; of many like hosts not every number is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, product

from autoparallel.cost_model.cluster.cluster import Cluster, Host

MOST_COUNTED = 8
"""Of up to so many like hosts, or devices of a host, every number is tried; then doublings."""

MOST_PARTS = 256
"""Parts of a cluster of many kinds of hosts, the smallest first."""


def sub_clusters(cluster: Cluster) -> tuple[Cluster, ...]:
    """The parts of a cluster by number of devices, the whole cluster last.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> [part.num_devices for part in sub_clusters(parse_cluster("2x4xH100"))]
    [1, 2, 3, 4, 8]
    >>> [part.name for part in sub_clusters(parse_cluster("1xV100+2x1xH100"))][:4]
    ['1xH100', '1xV100-16GB', '2x1xH100', '1xV100-16GB+1xH100']
    """
    kinds = _kinds(cluster)
    whole = [
        tuple(chain.from_iterable(own[:count] for own, count in zip(kinds, counts, strict=True)))
        for counts in product(*((0, *counted(len(own))) for own in kinds))
        if any(counts)
    ]
    cut = [
        (cluster.hosts[own[0]].part(count),)
        for own in kinds
        for count in counted(cluster.hosts[own[0]].num_devices)[:-1]
    ]
    parts = [_part(cluster, hosts) for hosts in cut]
    for numbers in whole:
        if len(numbers) < len(cluster.hosts):
            parts.append(_part(cluster, tuple(cluster.hosts[n] for n in sorted(numbers))))
    ordered = sorted(parts, key=lambda part: part.num_devices)
    return (*ordered[:MOST_PARTS], cluster)


def first_hosts(cluster: Cluster, number: int) -> Cluster:
    """The part of a cluster that its first hosts are.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> first_hosts(parse_cluster("4x8xH100"), 3).name
    '3x8xH100'
    """
    if number == len(cluster.hosts):
        return cluster
    return _part(cluster, cluster.hosts[:number])


def counted(number: int) -> tuple[int, ...]:
    """The numbers of ``number`` like things to try.

    >>> counted(3), counted(48)
    ((1, 2, 3), (1, 2, 4, 8, 16, 32, 48))
    """
    if number <= MOST_COUNTED:
        return tuple(range(1, number + 1))
    return (*(1 << bit for bit in range(number.bit_length()) if 1 << bit < number), number)


def _kinds(cluster: Cluster) -> list[list[int]]:
    """Group the hosts that are alike, in the cluster's order."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, host in enumerate(cluster.hosts):
        device = host.device
        key = (
            device.speed,
            device.usable_memory_bytes,
            device.dollars_per_hour,
            host.num_devices,
            host.link,
            host.wires,
            host.detour,
        )
        found.setdefault(key, []).append(index)
    return list(found.values())


def _part(cluster: Cluster, hosts: tuple[Host, ...]) -> Cluster:
    racks = {host.rack for host in hosts}
    return Cluster(
        _name(hosts), hosts, cluster.inter_link, cluster.rack_link if len(racks) > 1 else None
    )


def _name(hosts: Sequence[Host]) -> str:
    parts = []
    for name, run in groupby(hosts, key=lambda host: f"{host.num_devices}x{host.device.name}"):
        count = len(list(run))
        parts.append(f"{count}x{name}" if count > 1 else name)
    return "+".join(parts)
