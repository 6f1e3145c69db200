"""Options of a run on several hosts, each of which starts its own ranks.

In: ``--nnodes``, ``--rdzv-endpoint``, ``--elastic`` and a plan. Out: the hosts to wait for, and the
number of ranks per host, if the plan suits the hosts.
"""

from __future__ import annotations

import re

from autoparallel.options.run_options import HostOptions
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.launch.rendezvous import Hosts, parse_endpoint


def asked_hosts(options: HostOptions, source: str) -> Hosts | None:
    """Return the number and address of the hosts to use, None for this host alone.

    Raises UsageError AP156 for bad options, or if ``source`` is a target, not a plan for all hosts.
    """
    hosts = parse_hosts(
        options.nnodes,
        options.rdzv_endpoint,
        join_seconds=options.join_timeout,
        elastic=options.elastic,
    )
    if hosts is not None and (not source.endswith(".json") or source.startswith("hf:")):
        raise UsageError(
            "AP156",
            "a target cannot be planned on several hosts at once",
            why="every host would plan separately",
            fix=f"autoparallel plan {source} -o plan.json, then run plan.json on every host",
        )
    return hosts


def parse_hosts(
    nnodes: str | None, endpoint: str | None, *, join_seconds: float = 600.0, elastic: bool = False
) -> Hosts | None:
    """Return the hosts to use, None without ``nnodes``. Raises UsageError AP156 for bad options.

    >>> parse_hosts("2", "10.0.0.1:29400").most
    2
    >>> parse_hosts("3:4", "10.0.0.1:29400", elastic=True).least
    3
    """
    if nnodes is None:
        if endpoint is not None or elastic:
            name = "--rdzv-endpoint" if endpoint is not None else "--elastic"
            raise UsageError("AP156", f"{name} needs --nnodes", fix="add --nnodes 2")
        return None
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    least = int(found[1]) if found else 0
    most = int(found[2] or found[1]) if found else 0
    if not 1 <= least <= most:
        raise UsageError("AP156", f"--nnodes {nnodes!r} is neither N nor MIN:MAX, with 1 or more")
    if endpoint is None:
        raise UsageError(
            "AP156",
            "--nnodes needs --rdzv-endpoint",
            fix="add --rdzv-endpoint HOST:PORT, with the address of one of the hosts",
        )
    if elastic != (least < most):
        raise UsageError(
            "AP156",
            f"--nnodes {nnodes} {'with' if elastic else 'without'} --elastic",
            why="with fewer hosts the run goes on by another plan",
            fix="--nnodes MIN:MAX --elastic, or --nnodes N",
        )
    parse_endpoint(endpoint)
    return Hosts(least, most, endpoint, join_seconds)


def ranks_per_host(plan: Plan, hosts: Hosts) -> int:
    """Return the number of ranks per host. Raises UsageError AP156 if the plan is for another
    number of hosts, or if its hosts differ."""
    planned = plan.cluster.hosts
    if len(planned) != hosts.most:
        raise UsageError(
            "AP156",
            f"the plan is for {_counted(len(planned), 'host')} with "
            f"{_counted(plan.cluster.num_devices, 'device')}, and --nnodes says {hosts.most}",
            where=plan.cluster.name,
            fix="plan for a cluster of as many hosts, for example --cluster 2x8xA100",
        )
    kinds = {(host.num_devices, host.device.name) for host in planned}
    if len(kinds) > 1:
        raise UsageError(
            "AP156",
            "the hosts of the plan differ",
            why=", ".join(sorted(f"{count}x{name}" for count, name in kinds)),
            fix="start such a plan by torchrun with --node-rank, in the order of the plan's hosts",
        )
    return planned[0].num_devices


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
