"""``autoparallel doctor``: checks whether this machine, or a cluster, is fit to train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import join, quote
from typing import Any

from rich.table import Table
from rich.text import Text

from autoparallel.actions.terminal import stdout_console
from autoparallel.cost_model.cluster.cluster_file import to_dict
from autoparallel.doctor.checks import DoctorRequest, Finding, check_machine
from autoparallel.doctor.facts import machine_facts
from autoparallel.launching.job import PORT, check_lines, job_of, read_hosts
from autoparallel.launching.ssh import doctor_commands, examine_hosts
from autoparallel.options.results import say_json
from autoparallel.planner.errors import MachineError, UsageError
from autoparallel.planning.plan import find_cluster
from autoparallel.planning.plan_files import load_plan
from autoparallel.runtime.launch.launch import is_launched, launch


def doctor(
    *,
    plan: str | None,
    cluster: str | None,
    hosts: str | None,
    setup: str,
    timeout: float,
    json: bool,
) -> None:
    """Check this machine, or all hosts of a cluster, and print the results; raise if a check
    failed. ``plan`` (a plan file) or ``cluster`` give the cluster, ``hosts`` the machines to check
    over ssh after the commands of ``setup``; ``timeout`` is in seconds."""
    wanted = _wanted(plan, cluster)
    is_joined = is_launched(os.environ)
    hint = ""
    if hosts is not None:
        options = [f"--timeout={timeout}"]
        if plan is not None or cluster is not None:
            given = str(plan or cluster)
            path = str(Path(given).resolve()) if Path(given).is_file() else given
            options += ["--cluster" if plan is None else "--plan", path]
        findings = _of_hosts(wanted, read_hosts(hosts), setup, options)
    elif wanted.cluster is not None and (is_joined or wanted.num_hosts == 1):
        findings = _examined(wanted, timeout)
    else:
        findings = list(check_machine(machine_facts(), wanted))
        hint = _hint(wanted)
    if os.environ.get("RANK", "0") == "0":
        _show(findings, hint, json=json)
    _raise(findings)


def _wanted(plan: str | None, cluster: str | None) -> DoctorRequest:
    """Return the requirements to check: the plan's cluster and peak bytes, the named cluster, or
    none. Raises UsageError AP380 if both options are given."""
    if plan is not None and cluster is not None:
        raise UsageError(
            "AP380", "--plan and --cluster are both given", fix="give one: a plan has a cluster"
        )
    if plan is not None:
        loaded = load_plan(plan)
        return DoctorRequest(loaded.cluster, loaded.prediction.peak_memory_bytes)
    return DoctorRequest(find_cluster(cluster)) if cluster is not None else DoctorRequest()


def _of_hosts(
    wanted: DoctorRequest, hosts: tuple[str, ...], setup: str, options: Sequence[str]
) -> list[Finding]:
    """Run the checks on hosts over ssh, with a cluster by torchrun, which measures links too."""
    folder, arguments = Path.cwd(), (*options, "--json")
    check_lines({"--setup": setup, "this folder": str(folder), "--plan or --cluster": options[-1]})
    if wanted.cluster is None:
        lines = (f"cd -- {quote(str(folder))}", setup, join(("autoparallel", "doctor", *arguments)))
        command = f"bash -c {quote(chr(10).join(lines))}"
        return examine_hosts(dict.fromkeys(hosts, command), together=False)
    job = job_of(
        wanted.cluster,
        name="doctor",
        hosts=hosts,
        folder=folder,
        setup=setup,
        arguments=arguments,
        port=PORT,
        max_restarts=0,
    )
    return examine_hosts(doctor_commands(job), together=True)


def _examined(wanted: DoctorRequest, timeout: float) -> list[Finding]:
    """Run the checks on every rank, started by torchrun or else here, and return all results.

    ``timeout`` is the number of seconds without progress after which the check ends.
    """
    assert wanted.cluster is not None
    found: list[dict[str, Any]] = launch(
        "autoparallel.doctor.worker:examine",
        {"cluster": to_dict(wanted.cluster), "memory_bytes": wanted.memory_bytes},
        num_processes=wanted.cluster.num_devices,
        timeout_seconds=timeout,
    )
    return [Finding(**each) for each in found]


def _hint(wanted: DoctorRequest) -> str:
    if wanted.cluster is None:
        return "devices and links are measured with --plan or --cluster"
    count = wanted.cluster.host_size or "N"
    return (
        "devices and links are measured with --hosts A,B,… over ssh, or when every\n"
        "host runs this under torchrun:\n"
        f"  torchrun --nnodes {wanted.num_hosts} --nproc-per-node {count} "
        "--rdzv-backend c10d \\\n    --rdzv-endpoint HOST:29400 -m autoparallel doctor …"
    )


def _show(findings: Sequence[Finding], hint: str, *, json: bool) -> None:
    if json:
        say_json("doctor", [asdict(each) for each in findings])
        return
    styles = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column()
    for each in findings:
        what = Text(each.what)
        if each.fix:
            what.append(f"\nfix: {each.fix}", style="dim")
        table.add_row(Text(each.level, styles[each.level]), each.name, what)
    console = stdout_console()
    console.print(table)
    if hint:
        console.print(f"\n{hint}", style="dim", markup=False)


def _raise(findings: Sequence[Finding]) -> None:
    """Raise MachineError AP421 with the first failed check and its fix, if any failed."""
    failed = [each for each in findings if each.level == "FAIL"]
    if failed:
        first, others = failed[0], len(failed) - 1
        more = f" ({others} more failed)" if others else ""
        raise MachineError(
            "AP421", f"not fit to train: {first.name}: {first.what}{more}", fix=first.fix
        )
