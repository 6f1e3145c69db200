"""Common job of all launchers: each host checks the cluster, then runs the plan by torchrun.

In: a plan and the user's options. Out: a ``LaunchJob``, from which launchers make their files, and
the script that each host runs (``host_script``). Hosts are numbered from 0 in the plan's order;
host 0 has the rendezvous.

torchrun's c10d rendezvous orders hosts by their addresses. The order does not matter if hosts are
equal. Unequal hosts must get their own ranks of the plan, so their rendezvous is static, with the
order of ``--node-rank``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.errors import UsageError

PORT = 29400
"""Default port for torchrun's rendezvous."""
HOST_SCRIPT, PLAN_FILE = "host.sh", "plan.json"


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """Training run to launch. ``num_devices`` are the devices of each host, in the plan's order.

    ``hosts`` are the hosts' names, () if a scheduler chooses them. ``is_ordered`` says that hosts
    differ, so each must get its own ranks. ``folder`` has the files, ``logs`` gets the logs, and
    the run starts in ``workdir``: paths on the hosts. ``setup`` is a shell line that each host runs
    first, and ``arguments`` are passed to ``autoparallel run``.
    """

    name: str
    num_devices: tuple[int, ...]
    uses_gpus: bool
    is_ordered: bool
    hosts: tuple[str, ...]
    folder: str
    logs: str
    workdir: str
    setup: str
    arguments: tuple[str, ...]
    port: int
    max_restarts: int

    @property
    def num_hosts(self) -> int:
        return len(self.num_devices)

    @property
    def common_devices(self) -> int | None:
        """Number of devices of every host; None if hosts have different numbers."""
        sizes = set(self.num_devices)
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def rendezvous(self) -> Literal["c10d", "static"]:
        return "static" if self.is_ordered else "c10d"


def job_of(
    cluster: Cluster,
    *,
    name: str,
    hosts: Sequence[str],
    folder: Path,
    setup: str,
    arguments: Sequence[str],
    port: int,
    max_restarts: int,
) -> LaunchJob:
    """Return the job that trains on ``cluster``, with the current folder as working folder.

    Raises UsageError AP372 if the number of ``hosts`` differs from the cluster's.
    """
    if hosts and len(hosts) != len(cluster.hosts):
        raise UsageError(
            "AP372",
            f"--hosts has {len(hosts)} hosts, and the cluster has {len(cluster.hosts)}",
            why=f"it is {cluster.name}, with {cluster.num_devices} devices",
            fix="name one host for each of the cluster's, in its order, or plan for these hosts",
        )
    return LaunchJob(
        name=name,
        num_devices=tuple(host.num_devices for host in cluster.hosts),
        uses_gpus=any(host.device.kind == "cuda" for host in cluster.hosts),
        is_ordered=not are_alike(cluster),
        hosts=tuple(hosts),
        folder=str(folder.resolve()),
        logs=str(folder.resolve() / "logs"),
        workdir=str(Path.cwd()),
        setup=setup,
        arguments=tuple(arguments),
        port=port,
        max_restarts=max_restarts,
    )


def check_lines(texts: Mapping[str, str | None]) -> None:
    """Raise UsageError AP382 for a text that is not one printable line; keys are option names."""
    for option, text in texts.items():
        if text is not None and not text.isprintable():
            raise UsageError(
                "AP382",
                f"{option} {text!r} contains a line break or another control character",
                why="the files of launchers have one line for it",
                where=option,
                fix="use a text of one line; a folder's name belongs to it too",
            )


def are_alike(cluster: Cluster) -> bool:
    """Return whether all hosts have equal devices and links, and none are in different racks.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> are_alike(parse_cluster("4x8xH100")), are_alike(parse_cluster("8xA100+8xH100"))
    (True, False)
    """
    racks = {host.rack for host in cluster.hosts} if cluster.rack_link is not None else {""}
    return len({repr(replace(host, rack="")) for host in cluster.hosts}) == 1 and len(racks) == 1


def read_hosts(text: str | None) -> tuple[str, ...]:
    """Return the host names in ``--hosts``: separated by commas, or the lines of a file.

    In a file, comments and text after the name are ignored, as in an MPI hosts file. Raises
    UsageError AP373 for invalid and repeated names.

    >>> read_hosts("node1, node2")
    ('node1', 'node2')
    """
    if text is None:
        return ()
    lines = text.split(",")
    if Path(text).is_file():
        lines = [line.partition("#")[0] for line in Path(text).read_text().splitlines()]
    names = tuple(line.split()[0] for line in lines if line.split())
    wrong = [name for name in names if not set(name) <= _NAME_LETTERS or name.startswith("-")]
    if wrong or not names or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), "")
        what = f"{wrong[0]!r} is no host" if wrong else f"names {twice} twice" if twice else "empty"
        raise UsageError(
            "AP373",
            f"--hosts {text}: {what}",
            fix="host names separated by commas, or a file with one in each line",
        )
    return names


_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:@[]")


def host_script(job: LaunchJob) -> str:
    """Return the script that every host runs as ``host.sh NUMBER FIRST_HOST``, numbered from 0."""
    plan = shlex.quote(f"{job.folder}/{PLAN_FILE}")
    arguments = "".join(f" {shlex.quote(each)}" for each in job.arguments)
    logs = f"""logs={shlex.quote(job.logs)}/host$number
mkdir -p -- "$logs"
"""
    tee = """\\
    --log-dir "$logs/$1" --tee 3 --local-ranks-filter 0 """
    return f"""#!/usr/bin/env bash
# What one of the {job.num_hosts} hosts runs: host.sh NUMBER FIRST_HOST, where NUMBER is its place
# in the plan, from 0 on. It checks the cluster, then trains.
{_start(job, logs, tee)}
start check {job.port} 0 -m autoparallel doctor --plan {plan}
start train {job.port + 1} {job.max_restarts} -m autoparallel run {plan}{arguments}
"""


def doctor_script(job: LaunchJob) -> str:
    """Return a script as ``host_script``, which runs ``autoparallel doctor`` with ``arguments``."""
    command = shlex.join(("-m", "autoparallel", "doctor", *job.arguments))
    return f"{_start(job)}\nstart doctor {job.port} 0 {command}\n"


def _start(job: LaunchJob, logs: str = "", tee: str = "") -> str:
    """Return the lines that define ``start``, for commands on all devices."""
    counts = " ".join(map(str, job.num_devices))
    setup = f"{job.setup}\n" if job.setup else ""
    place = '--node-rank "$number"' if job.is_ordered else '--rdzv-conf "is_host=$is_first"'
    is_first = "" if job.is_ordered else _IS_FIRST
    return f"""set -euo pipefail
number=$1
first_host=$2
devices=({counts})

cd -- {shlex.quote(job.workdir)}
{setup}{logs}{is_first}
# start PURPOSE PORT RESTARTS COMMAND...: the command on every device of this host, one rank each.
start() {{
  torchrun --nnodes {job.num_hosts} --nproc-per-node "${{devices[$number]}}" {place} \\
    --rdzv-backend {job.rendezvous} --rdzv-endpoint "$first_host:$2" \\
    --rdzv-id {shlex.quote(job.name)}-"$1" --max-restarts "$3" {tee}"${{@:4}}"
}}
"""


_IS_FIRST = """if [[ $number -eq 0 ]]; then is_first=true; else is_first=false; fi
"""
