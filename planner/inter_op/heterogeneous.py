"""Clusters with unlike hosts: orders of hosts for stages, and runs of ranks that meshes tile.

In: a cluster. Out: the orders of its hosts that a search tries, each with the cluster renumbered so
that stages take its ranks in order, and the conversion of a plan back to the cluster's own ranks.

Stages take hosts one after the other, so the order of two unlike hosts decides which blocks run on
each. Equal hosts are interchangeable: only orders with different sequences of *kinds* of host are
tried, and hosts of one rack stay together, so that few stages communicate between racks. Up to
``MOST_ORDERS`` such sequences are all tried, and the best is exact; of more, only the sequences
that keep each kind's hosts together, and one that alternates the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, permutations, product, zip_longest
from math import factorial, gcd, prod
from typing import TypeVar

from ...cost_model.cluster.cluster import Cluster, Host
from ..errors import AutoparallelError, InfeasibleError, TimeLimitError, UsageError
from ..plan import Plan, StagePlan
from ..requests.goal import Budget
from ..requests.request import Request

MOST_ORDERS = 6
"""Maximum orders of hosts in a search: enough for two hosts each of two kinds, or three kinds."""


Found = TypeVar("Found")


@dataclass(frozen=True)
class HostOrder:
    """Order in which stages take the hosts of a given cluster. ``cluster`` has the hosts in the
    order ``hosts``, which are indices of hosts of the given cluster.

    ``ranks[i]`` is the rank in the given cluster of rank ``i`` of ``cluster``.
    """

    hosts: tuple[int, ...]
    cluster: Cluster
    ranks: tuple[int, ...]


def host_orders(cluster: Cluster, most: int = MOST_ORDERS) -> tuple[HostOrder, ...]:
    """Return the orders of hosts to try, at most ``most``, the given order first; only this order
    if all hosts are equal.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> [order.hosts for order in host_orders(parse_cluster("4x8xH100"))]
    [(0, 1, 2, 3)]
    >>> [order.hosts for order in host_orders(parse_cluster("2x8xA100+8xH100"))]
    [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
    """
    racks = _racks(cluster)
    within = [list(islice(_arrangements(cluster, rack, most), most)) for rack in racks]
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    given = tuple(range(len(cluster.hosts)))
    found[_signature(cluster, given)] = given
    numbers = range(len(racks))
    rack_orders = permutations(numbers) if len(racks) <= 4 else (numbers, reversed(numbers))
    for rack_order in rack_orders:
        for chosen in islice(product(*(within[rack] for rack in rack_order)), most):
            order = tuple(chain.from_iterable(chosen))
            found.setdefault(_signature(cluster, order), order)
    return tuple(_ordered(cluster, order) for order in islice(found.values(), most))


def over_orders(
    cluster: Cluster, request: Request, attempt: Callable[[HostOrder, Request], Found]
) -> list[tuple[HostOrder, Found]]:
    """Run ``attempt`` for each order of the hosts; return (order, result) of each order that
    succeeded.

    Each order has an equal share of the remaining time limit. Raises the first order's error if all
    failed.
    """
    orders = host_orders(cluster)
    budget = Budget.of(request.time_limit_seconds)
    done: list[tuple[HostOrder, Found]] = []
    failure: AutoparallelError | None = None
    for index, order in enumerate(orders):
        share = max(budget.left_seconds, 0.0) / (len(orders) - index)
        try:
            done.append((order, attempt(order, replace(request, time_limit_seconds=share))))
        except (InfeasibleError, TimeLimitError, UsageError) as error:
            failure = failure or error
    if not done:
        assert failure is not None, "every order was tried"
        raise failure
    return done


def is_mixed(cluster: Cluster) -> bool:
    """Return whether a cluster has hosts of different kinds, or several racks."""
    return len({_kind(host) for host in cluster.hosts}) > 1 or cluster.rack_link is not None


def in_given_ranks(plan: Plan, order: HostOrder, cluster: Cluster) -> Plan:
    """Convert a plan for ``order.cluster`` to the ranks of ``cluster``."""
    stages = tuple(_renumbered(stage, order.ranks) for stage in plan.stages)
    return replace(plan, cluster=cluster, stages=stages)


def _renumbered(stage: StagePlan, ranks: Sequence[int]) -> StagePlan:
    return replace(stage, devices=tuple(ranks[device] for device in stage.devices))


def pieces(cluster: Cluster, first: int, size: int) -> tuple[int, ...]:
    """Return the numbers of ranks on each host among the ``size`` ranks from rank ``first`` on.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> pieces(parse_cluster("2x8xH100+4xH100"), 4, 16)
    (4, 8, 4)
    """
    found: list[int] = []
    starts = cluster.first_ranks
    start = first
    while start < first + size:
        host = cluster.host_of[start]
        end = starts[host] + cluster.hosts[host].num_devices
        found.append(min(end, first + size) - start)
        start = end
    return tuple(found)


def inner_size(cluster: Cluster, first: int, size: int) -> int:
    """Return the largest group size for which the ``size`` ranks from ``first`` on divide into
    equal groups of neighbours that never cross hosts.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> inner_size(parse_cluster("2x8xH100+4xH100"), 0, 20)
    4
    >>> inner_size(parse_cluster("2048x8xH100"), 4, 16000)
    4
    """
    own = cluster.host_size
    if own is None:
        return gcd(*pieces(cluster, first, size))
    head = min(size, own - first % own)
    return gcd(head, size - head, own) if size - head >= own else gcd(head, size - head)


def run_sizes(cluster: Cluster, first: int) -> tuple[int, ...]:
    """Return the possible numbers of ranks of a stage that begins at rank ``first``, if hosts are
    unequal.

    Within a host: divisors of any host's size, or all its remaining ranks; beyond it: whole hosts.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> cluster = parse_cluster("8xH100+4xH100")
    >>> run_sizes(cluster, 0), run_sizes(cluster, 3), run_sizes(cluster, 8)
    ((1, 2, 4, 8, 12), (1, 2, 4, 5, 9), (1, 2, 4))
    """
    host = cluster.host_of[first]
    left = cluster.first_ranks[host] + cluster.hosts[host].num_devices - first
    sizes = {each.num_devices for each in cluster.hosts}
    found = {n for n in range(1, left + 1) if any(size % n == 0 for size in sizes)} | {left}
    total = left
    for other in cluster.hosts[host + 1 :]:
        total += other.num_devices
        found.add(total)
    return tuple(sorted(found))


def _kind(host: Host) -> tuple[object, ...]:
    """Return a key that is equal for interchangeable hosts: all facts about a host but its rack."""
    device = host.device
    return (
        device.speed,
        device.usable_memory_bytes,
        host.num_devices,
        host.link,
        host.wires,
        host.detour,
    )


def _racks(cluster: Cluster) -> list[list[int]]:
    """Return the hosts by rack; all in one group if the cluster has no link between racks."""
    found: dict[str, list[int]] = {}
    for index, host in enumerate(cluster.hosts):
        found.setdefault(host.rack if cluster.rack_link is not None else "", []).append(index)
    return list(found.values())


def _arrangements(cluster: Cluster, hosts: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of the hosts of one rack with different sequences of host kinds: all if there
    are at most ``most``, else some."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for host in hosts:
        groups.setdefault(_kind(cluster.hosts[host]), []).append(host)
    if len(groups) == 1:
        yield tuple(hosts)
        return
    number = factorial(len(hosts)) // prod(factorial(len(each)) for each in groups.values())
    if number <= most:
        yield from _sequences(list(groups.values()))
        return
    if len(groups) <= 4:
        for order in permutations(groups.values()):
            yield tuple(chain.from_iterable(order))
    turns = zip_longest(*groups.values())
    yield tuple(host for turn in turns for host in turn if host is not None)


def _sequences(groups: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield an order of the hosts for every sequence of host kinds. ``groups``: hosts by kind."""
    if not any(groups):
        yield ()
        return
    for index, group in enumerate(groups):
        if group:
            rest = [*groups[:index], group[1:], *groups[index + 1 :]]
            for later in _sequences(rest):
                yield (group[0], *later)


def _signature(cluster: Cluster, order: Sequence[int]) -> tuple[object, ...]:
    """Return a key that is equal for orders that differ only by swaps of equal hosts or racks."""
    names: dict[str, int] = {}
    return tuple(
        (
            _kind(cluster.hosts[host]),
            names.setdefault(cluster.hosts[host].rack, len(names)),
        )
        for host in order
    )


def _ordered(cluster: Cluster, order: tuple[int, ...]) -> HostOrder:
    sizes = [host.num_devices for host in cluster.hosts]
    starts = list(accumulate(sizes[:-1], initial=0))
    ranks = tuple(
        starts[host] + offset for host in order for offset in range(cluster.hosts[host].num_devices)
    )
    hosts = tuple(cluster.hosts[host] for host in order)
    return HostOrder(order, replace(cluster, hosts=hosts), ranks)
