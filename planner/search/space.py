"""Search space of stages: tilings of the devices, and submeshes that cost the same.

In: a cluster, a number of stages. Out: tilings of its devices for ``inter_op``. A *uniform* tiling
has stages of one size; there is one for every number of stages that divides the devices. The
*mixed* tiling has stages of any sizes: neighbouring devices within a host, and whole hosts; on more
than ``MOST_POSITIONS`` devices only whole hosts, and on more hosts than that groups of hosts, so
that there are at most ``MOST_POSITIONS`` positions. So with thousands of devices unequal stages
differ by at least a 64th of the cluster, while equal stages may be as small as a device.

The cost of a stage depends on the devices of its submesh, their links and the link to the stage
before, not on its first rank: submeshes that agree in these facts are one place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby

from ...cost_model.cluster.cluster import Cluster
from ..inter_op.heterogeneous import is_mixed
from ..inter_op.submesh import submesh_sizes
from ..inter_op.sweep import Move, Tiling

MOST_POSITIONS = 64
"""Maximum number of devices at which stages of mixed sizes may begin."""

PlaceOf = Callable[[int, int], int]
"""Function (first device, number of devices) → number of the group of equally costly submeshes."""


def uniform_tiling(cluster: Cluster, num_stages: int, place: PlaceOf) -> Tiling | None:
    """Return the division of the devices into ``num_stages`` stages of equal size; None if it is
    impossible."""
    size, rest = divmod(cluster.num_devices, num_stages)
    if rest or not _is_tiled(cluster, num_stages, size):
        return None
    moves = tuple(
        Move(stage, stage + 1, place(stage * size, size), stage * size, size)
        for stage in range(num_stages)
    )
    return Tiling(num_stages, moves, num_stages, fixed=True)


def _is_tiled(cluster: Cluster, num_stages: int, size: int) -> bool:
    sizes = {host.num_devices for host in cluster.hosts}
    if len(sizes) == 1:
        (own,) = sizes
        return own % size == 0 or size % own == 0
    return all(size in submesh_sizes(cluster, stage * size) for stage in range(num_stages))


def mixed_tiling(cluster: Cluster, most_stages: int, place: PlaceOf) -> Tiling:
    """Return the tiling with all possible divisions of the devices into up to ``most_stages``
    stages of any sizes, in device order."""
    devices = [*_positions(cluster), cluster.num_devices]
    number = {device: position for position, device in enumerate(devices)}
    moves = []
    for first in devices[:-1]:
        for size in submesh_sizes(cluster, first):
            stop = number.get(first + size)
            if stop is not None:
                moves.append(Move(number[first], stop, place(first, size), first, size))
    end = len(devices) - 1
    return Tiling(end, tuple(moves), min(most_stages, end))


def tilings(
    cluster: Cluster, numbers: Sequence[int], place: PlaceOf, *, mixed: bool
) -> Iterator[tuple[Tiling, int]]:
    """Yield (tiling, number of stages) for all tilings of the devices and numbers of stages."""
    for number in numbers:
        tiling = uniform_tiling(cluster, number, place)
        if tiling is not None:
            yield tiling, number
    several = [number for number in numbers if number > 1]
    if several and mixed:
        tiling = mixed_tiling(cluster, several[-1], place)
        yield from ((tiling, number) for number in several if number <= tiling.most)


def _positions(cluster: Cluster) -> Iterator[int]:
    """Yield the devices at which a stage may begin if stages have any sizes."""
    if cluster.num_devices <= MOST_POSITIONS:
        yield from range(cluster.num_devices)
        return
    num_hosts = len(cluster.hosts)
    at_once = -(-num_hosts // MOST_POSITIONS)
    while num_hosts % at_once:
        at_once += 1
    first = 0
    for index, host in enumerate(cluster.hosts):
        if index % at_once == 0:
            yield first
        first += host.num_devices


def place_key(cluster: Cluster) -> Callable[[int, int], Hashable]:
    """Return a function (first device, size) → key that is equal for equally costly submeshes."""
    mixed = is_mixed(cluster)

    def key(first: int, size: int) -> Hashable:
        link = cluster.entry_link(first, size) if first else None
        wires = cluster.wires_of(first, size)
        return (link, wires, _hosts(cluster, first, size) if mixed else size)

    return key


def _hosts(cluster: Cluster, first: int, size: int) -> Hashable:
    """Return a key of a submesh's hosts: devices, links, and which hosts share a rack."""
    racks: dict[str, int] = {}
    hosts = []
    for index, members in groupby(range(first, first + size), key=cluster.host_of.__getitem__):
        host = cluster.hosts[index]
        rack = racks.setdefault(host.rack, len(racks))
        memory = host.device.usable_memory_bytes
        wired = (host.link, host.wires, host.detour)
        hosts.append((host.device.speed, memory, wired, rack, len(tuple(members))))
    return tuple((each, len(tuple(same))) for each, same in groupby(hosts))
