"""``autoparallel doctor`` on hosts over ssh: started on each, their findings as one list."""

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

from .job import LaunchJob, doctor_script

SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR")
PATIENCE_SECONDS = 15.0
"""Seconds for which other hosts go on after one has failed, to say what they miss."""

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
