"""Start of a run's processes: arguments for the launcher, and handling of the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autoparallel.analysis.facts import configuration_text
from autoparallel.cache.verified import mark_verified
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.detect import threads_per_device
from autoparallel.options.hosts import ranks_per_host
from autoparallel.options.results import say, say_json
from autoparallel.options.run_options import RunOptions, Sources, absolute, checked_init
from autoparallel.planner.errors import UsageError, VerificationError
from autoparallel.planner.plan import Plan
from autoparallel.planner.variants.asynchronous import is_asynchronous
from autoparallel.planning.plan_files import load_plan
from autoparallel.runtime.checkpoint.weight_files import open_weights
from autoparallel.runtime.launch.agent import launch_on_hosts
from autoparallel.runtime.launch.launch import is_launched, launch
from autoparallel.runtime.launch.membership import check_gpu
from autoparallel.runtime.launch.process import Job
from autoparallel.runtime.launch.rendezvous import Hosts
from autoparallel.training.run_setup import check_run_options
from autoparallel.training.steps import Saving

VERIFY_DTYPES = ("fp64", "fp32")
TIMEOUT_SECONDS = 600.0
"""Default seconds without progress of a rank after which the run ends."""


@dataclass(frozen=True, slots=True)
class Start:
    """Way to start a run's ranks without torchrun: all ranks on this machine, or with ``hosts``
    this host's ranks, which join the ranks of the other hosts.

    A rank that makes no progress for ``timeout_seconds`` ends the run with a HangError. After a
    failure that a restart can repair all ranks restart from the last checkpoint, ``max_restarts``
    times at most.
    """

    timeout_seconds: float = TIMEOUT_SECONDS
    max_restarts: int = 0
    hosts: Hosts | None = None


def start_training(
    path: Path,
    *,
    steps: int,
    seed: int,
    saving: Saving | None = None,
    resume: str | None = None,
    sources: Sources = Sources(),
    options: RunOptions | None = None,
    start: Start = Start(),
) -> dict[str, Any]:
    """Train by the plan at ``path``, on ranks started as ``start`` says.

    Checkpoints are written as ``saving`` says; ``resume`` is a checkpoint, or a folder with
    checkpoints, to continue from. ``sources`` names initial weights and data. Returns measured and
    predicted figures by name. Raises the errors of ``check_run_options``, UsageError AP850 for an
    unknown ``sources.init``, and AP863 if both weights and ``resume`` are given.
    """
    asked = options or RunOptions()
    check_run_options(asked)
    checked_init(sources.init)
    if sources.weights is not None:
        check_weights(sources.weights, resume)
    if saving is not None:
        saving = replace(saving, folder=str(Path(saving.folder).resolve()))
    return _start(
        "train",
        path,
        start,
        steps=steps,
        seed=seed,
        saving=None if saving is None else asdict(saving),
        resume=absolute(resume),
        sources=asdict(sources.resolved()),
        options=asdict(asked.resolved()),
    )


def check_weights(weights: str, resume: str | None) -> None:
    """Raise UsageError if ``weights`` cannot be read, or AP863 if ``resume`` is given as well."""
    if resume is not None:
        raise UsageError(
            "AP863",
            "--weights and --resume are both given",
            why="a checkpoint already contains the weights",
            fix="remove one: --resume continues a run, --weights starts one",
        )
    open_weights(weights)


def check_devices_here(cluster: Cluster) -> None:
    """Raise MachineError AP411 if this machine lacks a GPU of the (one-machine) cluster."""
    if cluster.hosts[0].device.kind == "cuda":
        check_gpu(cluster.num_devices - 1)


def start_verification(
    path: Path,
    *,
    dtype: str,
    json_output: bool,
    seed: int = 0,
    compiled: bool | None = None,
    start: Start = Start(),
) -> None:
    """Verify the plan at ``path`` and print the result.

    ``compiled`` says if blocks run compiled; None leaves it to the plan. Raises UsageError AP119
    for an unknown dtype and VerificationError AP601 if the plan's run differs from the reference.
    """
    if dtype not in VERIFY_DTYPES:
        raise UsageError("AP119", f"--dtype {dtype!r} is not one of {', '.join(VERIFY_DTYPES)}")
    found = _start("verify", path, start, dtype=dtype, seed=seed, compiled=compiled)
    report_verification(
        load_plan(path), found, json_output=json_output, prints=os.environ.get("RANK", "0") == "0"
    )


def report_verification(
    plan: Plan, found: dict[str, Any], *, json_output: bool = False, prints: bool = True
) -> None:
    """Print the result of a plan's verification, and mark the plan as verified if it passed.

    Nothing is printed unless ``prints``. Raises VerificationError AP601 if the plan's run differs.
    """
    if prints:
        if json_output:
            say_json("verify", found)
        else:
            say(f"{configuration_text(plan)}\n{verdict(found, truth_of(plan))}")
        if found["passed"]:
            mark_verified(plan)
    if not found["passed"]:
        first = found["failures"][0]
        raise VerificationError(
            "AP601",
            f"the {first['quantity']} of {first['name']} differs from {truth_of(plan)}",
            why=f"by {first['relative']:.1e} of its magnitude; {found['tolerance']:.0e} is allowed",
            where=f"block {first['block']}" if first["block"] else "",
            fix=f"{len(found['failures'])} of {found['num_compared']} tensors differ: "
            "please report the model and the plan",
        )


def truth_of(plan: Plan) -> str:
    """Name the reference that a plan's run is verified against.

    An asynchronous schedule is compared with one process that makes the same delayed updates.
    """
    if is_asynchronous(plan.schedule):
        return f"one process that makes the updates of {plan.schedule}"
    return "one device"


def verdict(found: dict[str, Any], truth: str = "one device") -> str:
    """Describe the result of a verification in text; ``truth`` names its reference."""
    worst = ", ".join(f"{name} {value:.1e}" for name, value in found["worst"].items())
    word = "verified" if found["passed"] else "NOT verified"
    return (
        f"{word}: {found['num_compared']} tensors compared with {truth} in {found['dtype']}\n"
        f"largest difference relative to magnitude: {worst} (allowed {found['tolerance']:.0e})"
    )


def _start(name: str, path: Path, start: Start, **arguments: Any) -> dict[str, Any]:
    plan = load_plan(path)
    num_processes = plan.cluster.num_devices
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    if start.hosts is not None:
        return _start_on_host(name, path, start, start.hosts, arguments)
    check_devices_here(plan.cluster)
    result: dict[str, Any] = launch(
        f"autoparallel.training.worker:{name}",
        {"plan_path": str(path.resolve()), **arguments},
        num_processes=num_processes,
        timeout_seconds=start.timeout_seconds,
        max_restarts=start.max_restarts,
        finishes=arguments.get("saving") is not None,
        survives=plan.servers is not None,
    )
    return result


def _start_on_host(
    name: str, path: Path, start: Start, hosts: Hosts, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Start the ranks of this host, in a run over several hosts, with the worker function ``name``;
    return its result. ``arguments`` are passed to it."""
    if is_launched(os.environ):
        raise UsageError(
            "AP156",
            "--nnodes under torchrun",
            why="torchrun has started the ranks already",
            fix="leave out --nnodes, or start autoparallel itself on every host",
        )
    plan = load_plan(path)
    num_local = ranks_per_host(plan, hosts)
    job = Job(
        f"autoparallel.training.worker:{name}",
        {"plan_path": str(path.resolve()), **arguments},
        "",
        start.timeout_seconds,
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads_per_device(num_local))}
    found: dict[str, Any] = launch_on_hosts(
        job,
        hosts,
        num_local=num_local,
        environment=environment,
        max_restarts=start.max_restarts,
        finishes=arguments.get("saving") is not None and not hosts.is_elastic,
    )
    return found
