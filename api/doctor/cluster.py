"""Checks of a running cluster: measured links and devices against its description.

In: the described cluster, the facts of each rank, and the times of each pair of ranks. Out:
findings. The rate of a level of links is the median of its pairs; much slower pairs are named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from statistics import median

from autoparallel.cost_model.cluster.cluster import Cluster, Link
from autoparallel.cost_model.profile.environment import Environment, is_same_device
from autoparallel.cost_model.profile.transfers import LinkPoint, fit_link
from autoparallel.doctor.checks import Finding, Level
from autoparallel.options.words import ranks_text, rate_text, seconds_text
from autoparallel.runtime.profile.pairs import Pair, PairTime, RankFacts

WARN_SHARE, FAIL_SHARE = 0.8, 0.5
"""Measured over described rate of a kind of link below which the check warns, and fails."""
SLOW_PAIR, SLOW_DEVICE = 1.5, 1.3
"""Multiples of the median above which a pair's message and a rank's matrix product are slow."""


def check_cluster(
    cluster: Cluster, ranks: Sequence[RankFacts], times: Sequence[PairTime]
) -> tuple[Finding, ...]:
    """Return the results of all checks of a running cluster against its description ``cluster``.
    ``ranks`` has the place, versions and speed of each rank; ``times`` are of messages."""
    return (
        *_places(cluster, ranks),
        *_versions(ranks),
        *_devices(cluster, ranks),
        *_links(cluster, ranks, times),
    )


Findings = Iterator[Finding]


def _places(cluster: Cluster, ranks: Sequence[RankFacts]) -> Findings:
    """Check that each rank runs on the host and device that the cluster's description gives it."""
    names: list[str] = []
    for index, host in enumerate(cluster.hosts):
        start = cluster.first_ranks[index]
        own = ranks[start : start + host.num_devices]
        found = sorted({each.host for each in own})
        if len(found) > 1:
            yield Finding(
                "FAIL",
                f"host {index}",
                f"its ranks {ranks_text(range(start, start + len(own)))} are on {', '.join(found)}",
                "start --nproc-per-node ranks on each host as the "
                "plan has devices: autoparallel launch writes such files",
            )
        if len(found) == 1:
            names.append(found[0])
        devices = sorted({each.device for each in own})
        wrong = [name for name in devices if not _is_same(host.device.name, name)]
        if wrong and host.device.kind == "cuda":
            yield Finding(
                "FAIL",
                f"host {index}",
                f"{found[0]} has {wrong[0]}, described is {host.device.name}",
                "start the hosts in the described order, or plan again for these devices",
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield Finding(
            "WARN",
            "hosts",
            f"{twice[0]} is several of the described hosts",
            "start one torchrun on each host",
        )
    else:
        yield Finding("OK", "hosts", f"{len(ranks)} ranks on {', '.join(names)}")


def _is_same(described: str, found: str) -> bool:
    return is_same_device(Environment(found, "", "", 0), Environment(described, "", "", 0))


def _versions(ranks: Sequence[RankFacts]) -> Findings:
    by_version: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(ranks):
        by_version[each.torch].append(rank)
    if len(by_version) > 1:
        words = "; ".join(
            f"{version} on ranks {ranks_text(own)}" for version, own in by_version.items()
        )
        yield Finding("FAIL", "versions", f"torch differs: {words}", "install one version on all")


def _devices(cluster: Cluster, ranks: Sequence[RankFacts]) -> Findings:
    """Check for ranks that compute more slowly than others with the same device."""
    for name in dict.fromkeys(host.device.name for host in cluster.hosts):
        own = {
            rank: facts.product_seconds
            for rank, facts in enumerate(ranks)
            if cluster.device(rank).name == name
        }
        usual = median(own.values())
        slow = {
            rank: seconds / usual for rank, seconds in own.items() if seconds > SLOW_DEVICE * usual
        }
        for rank, ratio in slow.items():
            yield Finding(
                "WARN",
                "compute",
                f"rank {rank} on {ranks[rank].host} takes {ratio:.1f} times as "
                f"long as the median {name}",
                "look for other processes, heat and low clocks there, or leave it out",
            )
        if not slow:
            yield Finding(
                "OK",
                "compute",
                f"{len(own)} × {name} alike: {seconds_text(usual)} for a product of matrices",
            )


def _links(cluster: Cluster, ranks: Sequence[RankFacts], times: Sequence[PairTime]) -> Findings:
    levels: dict[Link, dict[Pair, list[PairTime]]] = {}
    for time in times:
        pairs = levels.setdefault(cluster.link(*time.pair), {})
        pairs.setdefault(time.pair, []).append(time)
    for link, pairs in levels.items():
        yield from _level(cluster, link, pairs)
        yield from _slow_pairs(cluster, ranks, link, pairs)


def _level(cluster: Cluster, link: Link, pairs: Mapping[Pair, Sequence[PairTime]]) -> Findings:
    """Compare the measured rate of a kind of link (in hosts or between) with its description."""
    fits = {
        pair: fit_link([LinkPoint(1, each.num_bytes, each.seconds) for each in own])
        for pair, own in pairs.items()
    }
    rate = median(each[1] for each in fits.values())
    alpha = median(each[0] for each in fits.values())
    where = "between hosts" if cluster.joins_hosts(link) else "within a host"
    share = rate / link.bytes_per_second
    level: Level = "OK" if share >= WARN_SHARE else "WARN" if share >= FAIL_SHARE else "FAIL"
    what = (
        f"{rate_text(rate, 'B/s')} {where} with all pairs at once, described "
        f"{rate_text(link.bytes_per_second, 'B/s')} ({share:.0%}); latency {seconds_text(alpha)}, "
        f"described {seconds_text(link.alpha_seconds)}"
    )
    fix = (
        "check the interface that is used (NCCL_DEBUG=INFO), or describe the links as they are "
        "and plan again: autoparallel profile"
    )
    yield Finding(level, f"link {link.name}", what, "" if level == "OK" else fix)


def _slow_pairs(
    cluster: Cluster,
    ranks: Sequence[RankFacts],
    link: Link,
    pairs: Mapping[Pair, Sequence[PairTime]],
) -> Findings:
    """Report hosts whose measured transfers with all other hosts are slow; then ranks that are slow
    with all other ranks; then the remaining slow pairs of ranks."""
    largest = {pair: max(own, key=lambda each: each.num_bytes) for pair, own in pairs.items()}
    between = cluster.joins_hosts(link)
    ordered = sorted(each.seconds for each in largest.values())
    # a slow host of three makes two thirds of all pairs slow
    usual = ordered[len(ordered) // 4] if between else median(ordered)
    slow = {pair for pair, each in largest.items() if each.seconds > SLOW_PAIR * usual}
    blamed: set[int] = set()
    if between:
        for host in _always_in(largest, slow, cluster.host_of):
            first = cluster.first_ranks[host]
            own = range(first, first + cluster.hosts[host].num_devices)
            blamed |= set(own)
            yield Finding(
                "WARN",
                f"link {link.name}",
                f"host {ranks[first].host} (ranks "
                f"{ranks_text(own)}) is slow to every host that it was measured with",
                "check its cable, card and switch port, or leave it out",
            )
    for rank in _always_in(largest, slow, range(len(ranks))):
        if rank not in blamed:
            blamed.add(rank)
            yield Finding(
                "WARN",
                f"link {link.name}",
                f"rank {rank} on {ranks[rank].host} is slow to every "
                "rank that it was measured with",
                "check its cable, card and switch port, or leave its host out",
            )
    for pair in sorted(slow):
        if not set(pair) & blamed:
            ratio = largest[pair].seconds / usual
            yield Finding(
                "WARN",
                f"link {link.name}",
                f"ranks {pair[0]} and {pair[1]} take {ratio:.1f} "
                f"times as long as others ({ranks[pair[0]].host}, {ranks[pair[1]].host})",
                "check the way between them",
            )


def _always_in(pairs: Iterable[Pair], slow: Set[Pair], owner: Sequence[int]) -> list[int]:
    """Return the members all of whose ``pairs`` are in ``slow``, if they have pairs with 2 or more
    other members. A member is the host ``owner[rank]``, or the rank itself."""
    members: dict[int, dict[Pair, int]] = defaultdict(dict)
    for one, two in pairs:
        members[owner[one]][one, two] = owner[two]
        members[owner[two]][one, two] = owner[one]
    return [
        each
        for each, own in sorted(members.items())
        if len(set(own.values()) - {each}) > 1 and set(own) <= slow
    ]
