"""Plan for the hosts that are present, after hosts have left or come back.

In: the plan that the run was started with, for all hosts, and the number of ranks. Out: the same
plan, or a plan that rank 0 makes for the present hosts and shares with all ranks. Model and global
batch stay, so the run continues from a checkpoint and differs only by rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoparallel.options.plan_options import PlanOptions, without_servers
from autoparallel.options.progress import Observe
from autoparallel.planner.errors import AutoparallelError, WorkerError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.objectives import first_hosts
from autoparallel.planning.plan_files import load_plan, save_plan
from autoparallel.profiling.measured_plan import plan_on
from autoparallel.runtime.launch.membership import num_processes
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import Pulse
from autoparallel.target.target import Target


def plan_for_ranks(
    plan: Plan, target: Target, worker: Worker, limits: Mapping[str, Any], folder: str | None
) -> Plan:
    """Return the plan for the present number of ranks. Collective over all ranks.

    ``limits`` are options of planning by name. A new plan is saved in ``folder`` for later attempts
    on as many hosts. Raises WorkerError AP824 on every rank if there is no plan.
    """
    if worker.world_size == plan.cluster.num_devices:
        return plan
    pulse = Pulse(worker.watchdog.progress)

    def observe(phase: str, done: float, total: float) -> None:
        pulse.tell(f"planning for {worker.world_size} ranks")

    def on_rank_0() -> tuple[str, AutoparallelError | None]:
        try:
            return dumps(_replan(plan, target, worker.world_size, limits, folder, observe)), None
        except AutoparallelError as error:
            return "", _no_plan(plan, worker.world_size, error)

    text, error = pulse.value(on_rank_0)
    if error is not None:
        raise error
    return loads(text)


def _replan(
    plan: Plan,
    target: Target,
    num_ranks: int,
    limits: Mapping[str, Any],
    folder: str | None,
    observe: Observe,
) -> Plan:
    cluster = first_hosts(plan.cluster, num_ranks // plan.cluster.hosts[0].num_devices)
    path = None if folder is None else Path(folder) / f"plan-{num_ranks}.json"
    if path is not None and path.exists():
        kept = load_plan(path)
        if (kept.model, kept.cluster) == (plan.model, cluster):
            return kept
    model = plan.model
    options = PlanOptions(
        global_batch=model.global_batch,
        seq=model.seq if target.takes_seq else None,
        precision=model.precision,
        float32_ops=model.float32_ops,
        optimizer=model.optimizer,
        compiled=plan.compiled,
        gradient_dtype=model.gradient_dtype,
        **limits,
    )
    sys.stderr.write(f"autoparallel: planning for the hosts that are there: {cluster.name}\n")
    found = plan_on(target, cluster, without_servers(options), observe)
    if num_processes(found) != num_ranks:
        raise WorkerError("AP824", f"the plan uses only {num_processes(found)} of them")
    found = replace(found, model=model)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(found, path)
    return found


def _no_plan(plan: Plan, num_ranks: int, error: AutoparallelError) -> WorkerError:
    return WorkerError(
        "AP824",
        f"there is no plan for the {num_ranks} ranks that are left",
        why=f"{error.what}; the global batch of {plan.model.global_batch} samples stays",
        fix="raise the least number of hosts in --nnodes, or take a global batch that more "
        "numbers of ranks divide",
    )
