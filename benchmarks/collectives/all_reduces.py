"""Does each all-reduce take what it is priced at, and is the one that is chosen the fastest?

``python benchmarks/collectives/all_reduces.py [--json FILE]`` (needs root and ``iproute2``). Four
ranks are processes in network namespaces with shaped links: on one switch, and on two hosts with
slow uplinks. Every algorithm that the runtime executes sums buckets of several sizes. Of each
network two things are measured first, as a profile would: the latency of a link within a host and
between hosts, by the library's all-reduce of eight bytes on two ranks; all else is predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "regret"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import links
import torch
import torch.distributed as dist
from clusters import CLUSTERS, NUM_RANKS, Emulated
from ranks import on_ranks

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.collectives.all_reduce import (
    LEAST_GAIN,
    LIBRARY,
    algorithms_of,
    all_reduce_seconds,
    hosts_of,
)
from autoparallel.cost_model.collectives.collectives import group_of
from autoparallel.runtime.messages.all_reduces import AllReduces

NETWORKS = ("flat slow", "two islands")
SIZES = (4_000, 64_000, 1_000_000, 8_000_000)
SECONDS = 1.5
"""How long an algorithm is repeated at a size."""
LEAST_CALLS, MOST_CALLS = 5, 100
FRAME = 8948 / 9014
"""The part of a link's rate that data has: the rest are headers of packets of 9,000 bytes."""
CLEAR = 0.05
"""Two algorithms are in the right order or not if their prices differ by so much."""


@dataclass(frozen=True)
class Row:
    """Seconds of an all-reduce of so many bytes."""

    network: str
    num_bytes: int
    algorithm: str
    predicted: float
    measured: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for emulated in CLUSTERS:
        if emulated.name in options.networks.split(","):
            with links.network(NUM_RANKS, emulated.mbit, emulated.uplinks) as places:
                rows += measured(emulated, places)
    for line in table(rows):
        print(line)
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    return 0


def measured(emulated: Emulated, places: Any) -> list[Row]:
    """Every algorithm at every size on a network."""
    latency = on_ranks(places, measure_latency)
    cluster = with_links(emulated.cluster(), *latency)
    print(
        f"{emulated.name}: a message takes {latency[0]:.2g} s within and {latency[1]:.2g} s "
        "between hosts",
        flush=True,
    )
    ranks = range(NUM_RANKS)
    group, hosts = group_of(cluster, ranks), hosts_of(cluster, ranks)
    names = algorithms_of(group, hosts)
    seconds = on_ranks(places, measure_all, cluster, names)
    return [
        Row(emulated.name, size, name, all_reduce_seconds(name, size, group, hosts), taken)
        for (size, name), taken in seconds.items()
    ]


def with_links(cluster: Cluster, within: float, between: float) -> Cluster:
    """The cluster with measured latencies, and the rates that data has."""
    hosts = tuple(
        replace(
            host,
            link=replace(
                host.link,
                alpha_seconds=within,
                bytes_per_second=FRAME * host.link.bytes_per_second,
            ),
        )
        for host in cluster.hosts
    )
    inter = cluster.inter_link
    # An uplink is its host's; the cluster has a share of it per device.
    rate = FRAME * inter.bytes_per_second / (cluster.num_devices / len(cluster.hosts))
    return replace(
        cluster,
        hosts=hosts,
        inter_link=replace(inter, alpha_seconds=between, bytes_per_second=rate),
    )


def measure_latency(rank: int) -> tuple[float, float]:
    """Half of the library's all-reduce of eight bytes on pairs of ranks, both pairs at once: of one
    host each, and of two."""
    found = []
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        groups = [dist.new_group(list(pair)) for pair in pairs]
        own = next(group for group, pair in zip(groups, pairs, strict=True) if rank in pair)
        tensor, seconds = torch.ones(1, dtype=torch.float64), []
        for _ in range(100):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor, group=own)
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds) / 2)
    return found[0], found[1]


def measure_all(
    rank: int, cluster: Cluster, names: Sequence[str]
) -> Mapping[tuple[int, str], float]:
    """The median seconds of each algorithm at each size, the slowest rank's."""
    assert dist.group.WORLD is not None
    reduces = AllReduces([dist.group.WORLD], cluster)
    return {
        (size, name): measure(reduces, name, torch.zeros(size // 4))
        for size in SIZES
        for name in names
    }


def measure(reduces: AllReduces, name: str, tensor: torch.Tensor) -> float:
    """The median of calls one after the other, of each the slowest rank's seconds."""
    seconds: list[float] = []
    spent = torch.zeros((), dtype=torch.float64)
    while len(seconds) < LEAST_CALLS or (sum(seconds) < SECONDS and len(seconds) < MOST_CALLS):
        dist.barrier()
        start = time.perf_counter()
        reduces.start(name, tensor, [dist.group.WORLD]).wait()
        spent.fill_(time.perf_counter() - start)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        seconds.append(float(spent))
    return statistics.median(seconds[1:])


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as a table of Markdown, with the rank correlation of each network and size."""
    lines = [
        "| network | bytes | algorithm | predicted | measured |",
        "|---|---|---|---|---|",
    ]
    summary = []
    for network, size in dict.fromkeys((row.network, row.num_bytes) for row in rows):
        own = [row for row in rows if (row.network, row.num_bytes) == (network, size)]
        for row in sorted(own, key=lambda row: row.predicted):
            lines.append(
                f"| {network} | {size:,} | {row.algorithm} | {1e3 * row.predicted:.2f} ms "
                f"| {1e3 * row.measured:.2f} ms |"
            )
        fastest = min(own, key=lambda row: row.measured)
        library = next(row for row in own if row.algorithm == LIBRARY)
        first = min(own, key=lambda row: row.predicted)
        chosen = first if first.predicted < (1 - LEAST_GAIN) * library.predicted else library
        summary.append(
            f"{network}, {size:,}: tau {kendall(own):.2f}; chosen {chosen.algorithm} "
            f"({1e3 * chosen.measured:.2f} ms), fastest {fastest.algorithm} "
            f"({1e3 * fastest.measured:.2f} ms), library {1e3 * library.measured:.2f} ms"
        )
    return [*lines, "", *summary]


def kendall(rows: Sequence[Row]) -> float:
    """Of the pairs of clearly different prices the share in the order measured, less the others."""
    pairs = [
        (cheap, dear)
        for pair in combinations(rows, 2)
        for cheap, dear in [sorted(pair, key=lambda row: row.predicted)]
        if cheap.predicted < (1 - CLEAR) * dear.predicted
    ]
    agree = sum(cheap.measured < dear.measured for cheap, dear in pairs)
    return 2 * agree / len(pairs) - 1 if pairs else 1.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
