"""Hosts over ssh: the script that starts a run on each, and ``autoparallel doctor`` run on each.

If a host fails, the others go on for ``PATIENCE_SECONDS``, to say what they miss.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen

from autoparallel.doctor.checks import Finding
from autoparallel.doctor.worker import join_findings
from autoparallel.planner.errors import UsageError

from .job import HOST_SCRIPT, LaunchJob, doctor_script, host_script

SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR")
PATIENCE_SECONDS = 15
"""Seconds for which other hosts go on after one has failed."""

START_SCRIPT = "start.sh"
"""Name of the script that starts a run on all hosts."""

_DOCUMENT = re.compile(r'^\{\s+"schema": "autoparallel.doctor/1"', re.MULTILINE)


def doctor_commands(job: LaunchJob) -> dict[str, str]:
    """Return the shell command of each host that checks the cluster of ``job`` together."""
    script, first = shlex.quote(doctor_script(job)), job.hosts[0].rpartition("@")[2]
    return {
        host: f"bash -c {script} doctor {number} {first}" for number, host in enumerate(job.hosts)
    }


def examine_hosts(commands: Mapping[str, str], *, together: bool) -> list[Finding]:
    """Run each host's command over ssh; return the findings that they print as JSON, and one for
    each host that fails. ``together``: one host prints those of all."""
    started = {
        host: Popen(
            [*SSH, host, command],
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        for host, command in commands.items()
    }
    with ThreadPoolExecutor(len(started)) as pool:
        reading = {pool.submit(each.communicate): host for host, each in started.items()}
        try:
            for done in as_completed(reading):
                if together and started[reading[done]].returncode:
                    wait(reading, PATIENCE_SECONDS)
                    break
        finally:
            waiting = [host for host, each in started.items() if each.poll() is None]
            for host in waiting:
                with suppress(ProcessLookupError):
                    os.killpg(started[host].pid, signal.SIGTERM)
    texts = {host: done.result()[0] for done, host in reading.items()}
    found = {host: own for host in commands if (own := _findings(texts[host]))}
    if together and found:
        return list(next(iter(found.values())))
    failed = [host for host in commands if host not in found and host not in waiting]
    return [
        *(_failure(host, started[host].returncode, texts[host]) for host in failed),
        *join_findings(found),
    ]


def _findings(text: str) -> tuple[Finding, ...]:
    begin = _DOCUMENT.search(text)
    if begin is None:
        return ()
    document, _ = json.JSONDecoder().raw_decode(text, begin.start())
    return tuple(Finding(**each) for each in document["result"])


def _failure(host: str, code: int, text: str) -> Finding:
    """Return the finding of a host whose command ended without findings."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"]
    what = next((line for line in lines if "error[" in line), lines[-1])
    fix = next((line.partition("fix: ")[2] for line in lines if line.startswith("fix: ")), "")
    if code == 255:
        fix = f"ssh-copy-id {host}, until ssh {host} works without a password"
    elif code == 127 or "No module named" in text:
        fix = "--setup 'source venv/bin/activate', or what else makes torchrun and autoparallel run"
    return Finding("FAIL", "host", f"{host}: {what}", fix or f"ssh {host}, and look there")


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
  sleep {PATIENCE_SECONDS}  # the other hosts then say themselves what they miss
fi
exit "$code"
"""
