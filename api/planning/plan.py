"""Planning of a captured program: prices, request, search.

``profiling.measured_plan.make_plan`` plans a target: it captures, measures, and then uses this
file. If parameter servers cannot run a target or its options, plans have none, or an error says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from autoparallel import __version__
from autoparallel.cache.cached_plan import reuse_or_search
from autoparallel.cache.captures import with_cached_memory
from autoparallel.cache.database import database_path, find_profile
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError
from autoparallel.cost_model.cluster.shorthand import resolve_cluster
from autoparallel.options.collection import rare_collections
from autoparallel.options.plan_options import PlanOptions, without_servers
from autoparallel.options.progress import Observe, ignore
from autoparallel.options.run_options import RunOptions
from autoparallel.passes.memory.stage_memory import check_host_memory
from autoparallel.passes.programs.program import Program
from autoparallel.placers.placement import learned_pipelines
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.costs.whole_block import whole_blocks
from autoparallel.planner.errors import AutoparallelError, InfeasibleError, UsageError
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.kernels.fusion import with_fusion
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.problem import SharedTables
from autoparallel.planning.capture import captured_seq
from autoparallel.planning.document_lengths import with_lengths
from autoparallel.planning.objectives import plan_for
from autoparallel.planning.routing import loads_of
from autoparallel.runtime.profile.ops import own_name
from autoparallel.runtime.servers.server import served_optimizer
from autoparallel.target.target import Target

MOST_REPEATS = 4
"""Maximum number of repeated searches for a plan whose final memory keeps the limit."""


def within_limit(
    found: Plan, program: Program, limit_bytes: int, search: Callable[[int], Plan], cache: Cache
) -> Plan:
    """Return a plan with its final memory: ``found``, or another plan if it exceeds the limit.

    The search does not count messages, inputs and communicators between stages. If a plan exceeds
    the limit because of them, ``search`` runs again with a limit lowered by the largest such excess
    of any plan so far. If no plan keeps the limit, the plan with the least memory is returned; its
    report says that it does not fit.
    """
    check_host_memory(found, program.graph, program.blocks)
    tried: list[Plan] = []
    uncounted = 0
    for left in reversed(range(1 + MOST_REPEATS)):
        plan = with_cached_memory(found, program, cache)
        tried.append(plan)
        if plan.prediction.peak_memory_bytes <= limit_bytes:
            return plan
        if not left:
            break
        more = plan.prediction.peak_memory_bytes - found.prediction.peak_memory_bytes
        uncounted = max(uncounted, more)
        try:
            found = search(max(1, limit_bytes - uncounted))
        except InfeasibleError:
            break
    return min(tried, key=lambda plan: plan.prediction.peak_memory_bytes)


@rare_collections()
def plan_program(
    program: Program,
    target: Target,
    cluster: Cluster,
    options: PlanOptions,
    observe: Observe = ignore,
    cache: Cache = NO_CACHE,
    tables: SharedTables | None = None,
) -> Plan:
    """Return the best plan found for a captured program; other searches of it may share
    ``tables``."""
    graph, basis = priced(program, target, cluster, options)
    if not can_be_served(program, target, cluster):
        options = without_servers(options)
    request = request_of(program, target, options)

    def plan_by(basis: Basis) -> Plan:
        def search() -> Plan:
            own = tables if basis.assumptions.loads is None else None
            return plan_for(
                graph, program.blocks, cluster, request, observe=observe, tables=own, basis=basis
            )

        return reuse_or_search(
            cache, graph, program.blocks, cluster, request, basis=basis, search=search
        )

    found = plan_by(basis)
    if places_experts(found):
        found = min((plan_by(without_copies(basis)), found), key=step_seconds)
    return replace(stamped(found), compiled=bool(options.compiled))


def places_experts(plan: Plan) -> bool:
    """Return whether a plan has experts that other ranks than their owners compute."""
    return any(each.experts for stage in plan.stages for each in stage.placements)


def without_copies(basis: Basis) -> Basis:
    """Return the same source of prices for plans in which each expert is computed by its owner."""
    loads = basis.assumptions.loads
    alone = None if loads is None else loads.without_copies()
    return replace(basis, assumptions=replace(basis.assumptions, loads=alone))


def step_seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


def priced(
    program: Program, target: Target, cluster: Cluster, options: PlanOptions
) -> tuple[Graph, Basis]:
    """Return a program's graph as pricing uses it, and the source of op times (measurements, if
    wanted, else specifications)."""
    graph = priced_graph(with_lengths(program, options.lengths), compiled=options.compiled)
    basis = basis_for(cluster, options, target)
    if options.routing is not None:
        loads = loads_of(program, options.routing)
        basis = replace(basis, assumptions=replace(basis.assumptions, loads=loads))
    if options.compiled:
        basis = basis.without_tiles
    else:  # whole blocks are measured as they run eagerly
        basis = whole_blocks(graph, program.blocks, cluster, basis, precision=options.precision)
    return graph, basis


def priced_graph(program: Program, *, compiled: bool | None) -> Graph:
    """Return a program's graph as pricing uses it: with fused ops if blocks are compiled."""
    return with_fusion(program.graph, program.blocks) if compiled else program.graph


def basis_for(cluster: Cluster, options: PlanOptions, target: Target) -> Basis:
    """Return the source of op times for pricing: measurements on the cluster's devices if wanted.

    Raises UsageError AP170 if measured times are required and there are none.
    """
    profile = find_profile(cluster, options.profile, options.database)
    if options.profile == "measured" and profile is None:
        raise UsageError(
            "AP170",
            "--profile measured: nothing has been measured for this cluster's devices",
            where=str(database_path(options.database)),
            fix=f"autoparallel profile {target.name} --cluster {cluster.name}"
            + ("" if options.database is None else f" --database {options.database}")
            + ", with the same other options",
        )
    if profile is not None:
        profile = replace(profile, update=own_update(target))
    return Basis(profile, options.profile)


def own_update(target: Target) -> str:
    """Return the name of the target's own optimizer in measurements, "" if it defines none."""
    if target.build_optimizer is None:
        return ""

    return own_name(target.build_optimizer)


def request_of(program: Program, target: Target, options: PlanOptions) -> Request:
    """Convert the options of planning to the planner's ``Request`` for a program."""
    asked = {each.name for each in fields(Request)} & {each.name for each in fields(PlanOptions)}
    given: dict[str, Any] = {name: getattr(options, name) for name in asked} | {
        "seq": options.seq if options.seq is not None else captured_seq(program),
        "float32_ops": "autocast" if options.autocasts else "none",
    }
    return Request(
        **given,
        offload=options.forced.offload or "none",
        microbatch_size=options.micro_batch,
        top=options.num_candidates,
        target=target.name,
        settings=target.settings,
        placer=learned_pipelines if options.search == "rl" else None,
    )


def stamped(plan: Plan) -> Plan:
    """Return ``plan`` with the versions of this package and torch that made it."""
    return replace(plan, version=__version__, torch_version=torch.__version__)


def find_cluster(text: str) -> Cluster:
    """Return the cluster that ``--cluster`` names: ``local``, a shorthand or a TOML file.

    Raises UsageError AP115 if there is none.
    """
    try:
        return resolve_cluster(text)
    except ClusterError as error:
        raise UsageError(
            "AP115", f"--cluster: {error.what}", where=error.where, fix=error.fix
        ) from error


def can_be_served(program: Program, target: Target, cluster: Cluster) -> bool:
    """Return whether parameter servers can run the target: on CPUs, without a scheduler, and with
    an optimizer that updates each element by itself.

    ``build_optimizer`` is called with parameters without memory.
    """
    if target.build_scheduler is not None or any(h.device.kind != "cpu" for h in cluster.hosts):
        return False
    if target.build_optimizer is None:
        return True

    trained = [node for node in program.graph.parameters if node.spec.requires_grad]
    shapes = {node.name: torch.Size(node.spec.shape) for node in trained}
    slices = {name: [torch.nn.Parameter(torch.zeros(0))] for name in shapes}
    try:
        served_optimizer(slices, shapes, target.build_optimizer, name="")
    except AutoparallelError:
        return False
    return True


def what_servers_lack(options: RunOptions, asked: Mapping[str, Any]) -> list[str]:
    """Return the names of the run's requested features that parameter servers do not support.
    ``asked`` has the values of ``saving`` and ``resume``."""
    wrong = {
        "clipping by norm or value": options.clip_norm or options.clip_value,
        "accumulation": options.accumulate > 1,
        "a loss scale": options.loss_scale is not None,
        "--count-routing": options.count_routing is not None,
        "--on-nan": options.on_nan != "ignore",
        "--save": asked.get("saving") is not None,
        "--resume": asked.get("resume") is not None,
        "hosts that come and go": options.elastic is not None,
    }
    return [name for name, is_asked in wrong.items() if is_asked]


def check_served_run(
    plan: Plan, options: RunOptions, asked: Mapping[str, Any], target: Target
) -> None:
    """Raise UsageError AP959 for an option that the parameter servers of ``plan`` do not support;
    ``asked`` has the values of ``saving`` and ``resume``. A plan without servers passes."""
    if plan.servers is None:
        return
    wrong = what_servers_lack(options, asked)
    wrong += ["build_scheduler"] if target.build_scheduler is not None else []
    if wrong:
        raise UsageError(
            "AP959",
            f"a run with parameter servers cannot have {wrong[0]}",
            why="updates are made by the servers, each of its own part of the weights",
            fix="remove it, or plan without servers",
        )
