"""What ``doctor`` says of a cluster, by measured times; and of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from processes import run_processes

from autoparallel.__main__ import run_command
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.doctor.cluster import check_cluster
from autoparallel.runtime.profile import pairs as profile_pairs
from autoparallel.runtime.profile.pairs import (
    PairTime,
    RankFacts,
    all_pair_times,
    rank_facts,
    rounds_of,
)

CLUSTER = parse_cluster("3x2xH100")
SIZES = (1 << 14, 1 << 20, 1 << 26)


def ranks_of(cluster: Cluster) -> list[RankFacts]:
    return [
        RankFacts(f"node{host}", "NVIDIA H100 80GB HBM3", "2.13.0", 1e-3)
        for host in cluster.host_of
    ]


def times_of(cluster: Cluster, slower: dict[Any, float] | None = None) -> list[PairTime]:
    """Times as described; those of a pair, a rank or a link by name are longer by a factor."""
    found = []
    for pair in (pair for pairs in rounds_of(cluster) for pair in pairs):
        link = cluster.link(*pair)
        factor = 1.0
        for key, own in (slower or {}).items():
            if key in (pair, link.name) or key in pair:
                factor = own
        found += [
            PairTime(pair, size, link.alpha_seconds + factor * size / link.bytes_per_second)
            for size in SIZES
        ]
    return found


def named(
    ranks: Sequence[RankFacts] | None = None, times: Sequence[PairTime] | None = None
) -> list[tuple[str, str]]:
    found = check_cluster(CLUSTER, ranks or ranks_of(CLUSTER), times or times_of(CLUSTER))
    assert all(each.fix for each in found if each.level != "OK")
    return [(each.level, each.what) for each in found if each.level != "OK"]


@pytest.mark.parametrize("text", ["8xH100", "1xcpu+1xcpu", "2x2xcpu", "5x1xcpu", "4x8xH100"])
def test_rounds_cover_every_host_and_rank(text: str) -> None:
    cluster = parse_cluster(text)
    rounds = rounds_of(cluster)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(
        range(cluster.num_devices)
    )
    crossing = {
        frozenset(cluster.host_of[rank] for rank in pair) for pairs in rounds for pair in pairs
    }
    count = len(cluster.hosts)
    expected = (
        {frozenset((host, (host + 1) % count)) for host in range(count)}
        if count > 1
        else {frozenset((0,))}
    )
    assert expected <= crossing


def test_a_cluster_as_described_has_nothing_to_mend() -> None:
    assert named() == []


def test_a_slow_level_is_compared_with_its_description() -> None:
    inter = CLUSTER.inter_link.name
    ((level, what),) = named(times=times_of(CLUSTER, {inter: 1.5}))
    assert level == "WARN"
    assert "(67%)" in what
    ((level, what),) = named(times=times_of(CLUSTER, {inter: 2.5}))
    assert level == "FAIL"
    assert "between hosts" in what


def test_a_slow_rank_and_a_slow_pair_are_named() -> None:
    """A rank in three pairs, all of them slow, is the cause; of one pair neither rank is."""
    found = named(times=times_of(CLUSTER, {3: 4.0}))
    assert ("WARN", "rank 3 on node1 is slow to every rank that it was measured with") in found
    found = named(times=times_of(CLUSTER, {(1, 3): 4.0}))
    assert found == [("WARN", "ranks 1 and 3 take 4.0 times as long as others (node0, node1)")]


@pytest.mark.parametrize("num_hosts", [3, 4, 5])
def test_a_slow_host_is_named_and_its_neighbours_are_not(num_hosts: int) -> None:
    """Of three hosts on a ring, a slow one makes two of three pairs slow, of four it makes half."""
    cluster = parse_cluster(f"{num_hosts}x2xH100")
    ranks = ranks_of(cluster)
    inter = cluster.inter_link
    times = [
        replace(each, seconds=6 * each.seconds)
        if cluster.link(*each.pair) == inter and {4, 5} & set(each.pair)
        else each
        for each in times_of(cluster)
    ]
    found = [each.what for each in check_cluster(cluster, ranks, times) if each.level == "WARN"]
    assert found[-1:] == ["host node2 (ranks 4–5) is slow to every host that it was measured with"]
    assert not any("node0" in what or "node1" in what for what in found)


def test_of_two_hosts_none_is_blamed_for_the_way_between_them() -> None:
    cluster = parse_cluster("2x2xH100")
    times = times_of(cluster, {cluster.inter_link.name: 4.0})
    found = [each.what for each in check_cluster(cluster, ranks_of(cluster), times)]
    assert not any("slow to every" in what for what in found)


def test_ranks_elsewhere_than_described_are_named() -> None:
    ranks = ranks_of(CLUSTER)
    swapped = [*ranks[:1], ranks[2], ranks[1], *ranks[3:]]
    assert [level for level, _ in named(swapped)] == ["FAIL", "FAIL"]
    other = [replace(each, device="NVIDIA A100-SXM4-80GB") for each in ranks[:2]]
    ((level, what),) = named([*other, *ranks[2:]])
    assert level == "FAIL"
    assert "node0 has NVIDIA A100-SXM4-80GB, described is H100" in what
    assert named([replace(each, host="one") for each in ranks])[0][0] == "WARN"


def test_other_versions_and_slow_devices_are_named() -> None:
    ranks = ranks_of(CLUSTER)
    ((level, what),) = named([replace(ranks[0], torch="2.12.0"), *ranks[1:]])
    assert level == "FAIL"
    assert "2.12.0 on ranks 0" in what
    ((level, what),) = named([*ranks[:5], replace(ranks[5], product_seconds=2e-3)])
    assert "rank 5 on node2 takes 2.0 times" in what


def measured() -> tuple[int, list[PairTime]]:
    import torch

    profile_pairs.CALLS, profile_pairs.ROUND_SECONDS = 2, 0.0  # in this process
    cluster = parse_cluster("1xcpu+2xcpu")
    device = torch.device("cpu")
    return len(rank_facts(device)), all_pair_times(rounds_of(cluster), device)


def test_real_ranks_measure_every_pair_at_every_size() -> None:
    found = run_processes(3, measured)
    assert found[0] == found[1] == found[2]
    num_ranks, times = found[0]
    assert num_ranks == 3
    assert {each.pair for each in times} == {(0, 1), (1, 2)}
    assert len(times) == 6
    assert all(each.seconds > 0 for each in times)


def test_the_command_checks_this_machine_and_its_processes() -> None:
    done = run_python("-m", "autoparallel", "doctor", "--cluster", "cpu:2", "--json")
    found = json.loads(done.stdout)["result"]
    names = {each["name"] for each in found}
    assert {"torch", "kernel", "open files", "hosts", "compute", "link loopback"} <= names
    failed = any(each["level"] == "FAIL" for each in found)
    assert done.returncode == (5 if failed else 0)


def test_a_fault_is_an_error_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert run_command(["doctor"]) == 5
    said = capsys.readouterr()
    assert "error[AP421]: not fit to train: GLOO_SOCKET_IFNAME" in said.err
    assert "FAIL  GLOO_SOCKET_IFNAME" in said.out
    assert run_command(["doctor", "--plan", "p.json", "--cluster", "cpu:2"]) == 2
    assert "AP380" in capsys.readouterr().err


DESCRIBED = """
[[hosts]]
num_devices = 2
count = 2
device = "cpu"
link = {{ name = "switch", alpha_seconds = 2e-4, bytes_per_second = {within} }}

[inter_link]
name = "uplink"
alpha_seconds = 2e-4
bytes_per_second = {between}
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize(("described", "levels"), [(6.0e6, ("OK", "OK")), (24e6, ("OK", "FAIL"))])
def test_links_of_a_known_rate_are_measured(
    tmp_path: Path, described: float, levels: tuple[str, str]
) -> None:
    """Four namespaces in two hosts: 400 Mbit/s within, and an uplink of 100 Mbit/s that the two
    ranks of a host share, so 6.25 MB/s each."""
    from benchmarks.pipelines.links import network

    path = tmp_path / "cluster.toml"
    path.write_text(DESCRIBED.format(within=48e6, between=described))
    with network(4, 400, uplinks=(100, 100)) as places:
        processes = []
        for rank, place in enumerate(places):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": "29610",
                "GLOO_SOCKET_IFNAME": place.interface,
                "OMP_NUM_THREADS": "1",
            }
            command = [*place.prefix, sys.executable, "-m", "autoparallel", "doctor"]
            command += ["--cluster", str(path), "--json"]
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            said = [process.communicate(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
    found = {each["name"]: each for each in json.loads(said[0][0])["result"]}
    assert (found["link switch"]["level"], found["link uplink"]["level"]) == levels, found
    code = 5 if "FAIL" in {each["level"] for each in found.values()} else 0
    assert [process.returncode for process in processes] == [code] * 4
