"""Job for Slurm: one task per host, which runs the host's script.

Slurm orders the hosts of a job by name. If the plan's hosts differ, their names must be given
(``--hosts``), and each host finds its number in this list. Source:
https://slurm.schedmd.com/sbatch.html and srun.html.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autoparallel.planner.errors import UsageError

from .job import HOST_SCRIPT, LaunchJob, host_script

BATCH_SCRIPT = "job.sbatch"


def slurm_files(
    job: LaunchJob, *, partition: str | None, account: str | None, time: str | None
) -> Mapping[str, str]:
    """Return files for sbatch by name. Raises UsageError AP374 if Slurm cannot start the job."""
    if job.common_devices is None:
        raise UsageError(
            "AP374",
            f"hosts of {_numbers(job)} devices cannot be one job of Slurm",
            why="--gpus-per-node is the same number for all hosts of a job",
            fix="start it with --ssh, or plan for hosts of equal size",
        )
    if job.is_ordered and not job.hosts:
        raise UsageError(
            "AP374",
            "the plan's hosts are not alike, and Slurm would choose their order",
            why="each host must get the ranks that were planned for its devices and links",
            fix="name the hosts in the plan's order: --hosts node1,node2,…",
        )
    return {
        BATCH_SCRIPT: _batch_script(job, partition, account, time),
        HOST_SCRIPT: host_script(job),
    }


def _numbers(job: LaunchJob) -> str:
    sizes = sorted(set(job.num_devices))
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def _batch_script(
    job: LaunchJob, partition: str | None, account: str | None, time: str | None
) -> str:
    options = {
        "job-name": job.name,
        "nodes": str(job.num_hosts),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.common_devices) if job.uses_gpus else None,
        "cpus-per-task": None if job.uses_gpus else str(job.common_devices),
        "nodelist": ",".join(job.hosts) or None,
        "partition": partition,
        "account": account,
        "time": time,
        "output": f"{job.folder.replace('%', '%%')}/slurm-%j.out",
    }
    lines = [
        f"#SBATCH --{name}={shlex.quote(value)}"
        for name, value in options.items()
        if value is not None
    ]
    script = shlex.quote(f"{job.folder}/{HOST_SCRIPT}")
    names = f"hosts=({' '.join(map(shlex.quote, job.hosts))})" if job.hosts else _LISTED
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *lines,
            "set -euo pipefail",
            "",
            names,
            "export FIRST_HOST=${hosts[0]}",
            'export HOSTS="${hosts[*]}"',
            "",
            "# One task on each host: its number is its place in the list of hosts.",
            "# shellcheck disable=SC2016  # expanded on the host",
            "srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '",
            _NUMBERED,
            "' host " + script,
            "",
        ]
    )


_LISTED = """mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [[ ${#hosts[@]} -ne $SLURM_JOB_NUM_NODES ]]; then
  echo "scontrol names ${#hosts[@]} of $SLURM_JOB_NUM_NODES hosts" >&2
  exit 1
fi"""

_NUMBERED = """  set -euo pipefail
  number=0
  for host in $HOSTS; do
    [[ $host == "$SLURMD_NODENAME" ]] && exec bash "$1" "$number" "$FIRST_HOST"
    number=$((number + 1))
  done
  echo "$SLURMD_NODENAME is not among the hosts of the plan: $HOSTS" >&2
  exit 1"""
