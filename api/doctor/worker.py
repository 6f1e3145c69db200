"""Part of ``autoparallel doctor`` that runs on every rank of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from autoparallel.cost_model.cluster.cluster_file import from_dict
from autoparallel.doctor.checks import DoctorRequest, Finding, check_machine
from autoparallel.doctor.cluster import check_cluster
from autoparallel.doctor.facts import machine_facts
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import gather_values
from autoparallel.runtime.profile.pairs import all_pair_times, rank_facts, rounds_of


def examine(
    worker: Worker, *, cluster: Mapping[str, Any], memory_bytes: int
) -> list[dict[str, Any]]:
    """Check the hosts, devices and links of ``cluster``; return the results on every rank.

    ``memory_bytes`` is the plan's predicted peak of a device. Collective over all ranks.
    """
    described = from_dict(dict(cluster))
    own: tuple[Finding, ...] = ()
    if worker.local_rank == 0:  # before this process takes memory of its device
        own = check_machine(machine_facts(), DoctorRequest(described, memory_bytes))
    device = join_as(worker, described)
    worker.watchdog.progress("gathering what each host found")
    by_rank = gather_values(own)
    worker.watchdog.progress("measuring every device")
    ranks = rank_facts(device)
    worker.watchdog.progress("measuring every link")
    times = all_pair_times(rounds_of(described), device)
    hosts = {ranks[rank].host: found for rank, found in enumerate(by_rank) if found}
    findings = [*join_findings(hosts), *check_cluster(described, ranks, times)]
    return [asdict(each) for each in findings]


def join_findings(hosts: Mapping[str, tuple[Finding, ...]]) -> list[Finding]:
    """Merge check results of several hosts; a result not shared by all hosts names its hosts.

    >>> fine, bad = Finding("OK", "torch", "2.13.0"), Finding("WARN", "network", "eth1 is slow")
    >>> [each.what for each in join_findings({"a": (fine,), "b": (fine, bad)})]
    ['2.13.0', 'b: eth1 is slow']
    """
    where: dict[Finding, list[str]] = {}
    for host, findings in hosts.items():
        for each in findings:
            where.setdefault(each, []).append(host)
    return [
        each if len(own) == len(hosts) else replace(each, what=f"{', '.join(own)}: {each.what}")
        for each, own in where.items()
    ]
