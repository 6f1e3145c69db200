"""Script that starts the run over ssh, on hosts that share a file system.

Each host has a connection in the background; if one fails or the script is interrupted, the others
are closed.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autoparallel.planner.errors import UsageError

from .job import HOST_SCRIPT, LaunchJob, host_script

START_SCRIPT = "start.sh"


def ssh_files(job: LaunchJob) -> Mapping[str, str]:
    """Return the files for ssh by name. Raises UsageError AP371 for one host, AP375 without host
    names."""
    if job.num_hosts == 1:
        raise UsageError(
            "AP371",
            "the plan is for one host, which needs no launcher",
            fix="autoparallel run plan.json, on that host",
        )
    if not job.hosts:
        raise UsageError(
            "AP375",
            "--ssh needs the names of the hosts",
            fix=f"--hosts node1,node2,…: {job.num_hosts} of them, in the plan's order",
        )
    return {START_SCRIPT: _start_script(job), HOST_SCRIPT: host_script(job)}


def _start_script(job: LaunchJob) -> str:
    # Quoted twice: ssh gives its words to a shell of the host, which reads them again.
    script = shlex.quote(shlex.quote(f"{job.folder}/{HOST_SCRIPT}"))
    return f"""#!/usr/bin/env bash
# Starts the run on each host, in the plan's order. Each must reach {HOST_SCRIPT} at the same path.
set -euo pipefail
hosts=({" ".join(map(shlex.quote, job.hosts))})
first_host=${{hosts[0]#*@}}
ssh=(ssh -tt -o BatchMode=yes)

pids=()
trap 'kill "${{pids[@]}}" 2> /dev/null || true' EXIT
for number in "${{!hosts[@]}}"; do
  # -tt: what runs there is ended with its connection
  "${{ssh[@]}}" "${{hosts[$number]}}" bash {script} "$number" "$first_host" \\
    < /dev/null > >(sed -u "s/^/[${{hosts[$number]}}] /") 2>&1 &
  pids+=($!)
done

code=0
for _ in "${{pids[@]}}"; do
  wait -n || {{ code=$?; break; }}
done
if [[ $code -ne 0 ]]; then
  sleep 15  # the other hosts then say themselves what they miss
fi
exit "$code"
"""
