"""Plans for targets, made after the times that they need are measured on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autoparallel.cache.database import database_path
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.detect import busy_text
from autoparallel.options.collection import rare_collections
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import Observe, ignore
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import check_schedule_name
from autoparallel.planner.search.problem import SharedTables
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, plan_program, within_limit
from autoparallel.planning.tf32 import with_choice
from autoparallel.profiling.first_worker import start_measuring
from autoparallel.profiling.work_list import PlanWork, is_wanted
from autoparallel.runtime.launch.launch import is_launched
from autoparallel.target.target import Target


@rare_collections()
def make_plan(
    target: Target,
    cluster_text: str,
    options: PlanOptions,
    observe: Observe = ignore,
    cache: Cache = NO_CACHE,
) -> Plan:
    """Return the best plan found for ``target`` on the cluster that ``cluster_text`` names.

    The plan's memory is simulated action by action (``passes.memory.stage_memory``).
    """
    observe("cluster", 0, 1)
    cluster = with_choice(find_cluster(cluster_text), options.tf32)
    observe("cluster", 1, 1)
    return plan_on(target, cluster, options, observe, cache)


def plan_on(
    target: Target,
    cluster: Cluster,
    options: PlanOptions,
    observe: Observe = ignore,
    cache: Cache = NO_CACHE,
) -> Plan:
    """Return the best plan found for ``target`` on ``cluster``, with simulated memory."""
    check_schedule_name(options.forced.schedule)
    started = time.perf_counter()
    program = capture_target(target, options, observe, cache)
    capture_seconds = time.perf_counter() - started
    search = partial(plan_program, program, target, cluster, cache=cache, tables=SharedTables())
    found = _plan_measured(program, target, cluster, options, observe, search)
    started = time.perf_counter()

    def again(limit_bytes: int) -> Plan:
        lower = replace(options, memory_limit_bytes=limit_bytes)
        return search(lower, again_observed)

    def again_observed(phase: str, done: float, total: float) -> None:
        observe(f"{phase} within memory", done, total)

    limit = options.memory_limit_bytes or cluster.usable_memory_bytes
    found = within_limit(found, program, limit, again, cache)
    spent = {
        "capture": capture_seconds,
        **found.solver.seconds,
        "memory": time.perf_counter() - started,
    }
    if "total" in spent:
        spent["total"] += capture_seconds + spent["memory"]
    return replace(found, solver=replace(found.solver, seconds=spent))


def _plan_measured(
    program: Program,
    target: Target,
    cluster: Cluster,
    options: PlanOptions,
    observe: Observe,
    search: Callable[[PlanOptions, Observe], Plan],
) -> Plan:
    """Return the plan that ``search`` finds; before, measure the times it needs if so requested.

    Nothing is measured under torchrun, or for a target that other processes cannot load.
    """
    if options.profile != "auto" or options.measure_seconds <= 0 or not target.is_named:
        return search(options, observe)

    if not is_wanted(options, cluster) or is_launched(os.environ):
        return search(options, observe)
    if busy := busy_text():
        print(f"autoparallel: {busy}", file=sys.stderr, flush=True)
    work = PlanWork(program, target, cluster, options, database_path(options.database))
    if work.known()[0].ops:
        found = search(options, observe)
        if not work.is_worth_starting(found):
            return found
    start_measuring(target, cluster, options, observe)
    return search(options, observe)
