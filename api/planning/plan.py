"""From a target to its plan: capture, cluster, search.

Everything that commands and the Python API ask of the planner goes through ``make_plan``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.cost_model.cluster.tf32 import FAMILIES, Tf32
from autoparallel.cost_model.ops.memory import GradientDtype
from autoparallel.options.progress import Observe, ignore
from autoparallel.planner.errors import UsageError
from autoparallel.planner.intra_op.pulp_solver import find_solver
from autoparallel.planner.plan import Float32Ops, Plan, Precision
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.goal import Goal
from autoparallel.planner.requests.pins import Pin
from autoparallel.planner.requests.request import Forced, Request, check_allowed, check_tolerance
from autoparallel.planning.collection import rare_collections
from autoparallel.planning.served_planning import can_be_served, without_servers
from autoparallel.profiling.database import MODES, database_path, find_profile
from autoparallel.target.load import (
    Change,
    LossFn,
    Target,
    building,
    changed_target,
    example_batches,
    unchanged,
)

if TYPE_CHECKING:
    from torch import nn

    from autoparallel.cost_model.cluster.cluster import Cluster
    from autoparallel.passes.initialization.deferred_init import Deferred, Init
    from autoparallel.passes.programs.batch import Example
    from autoparallel.passes.programs.program import Program
    from autoparallel.planner.graph import Graph
    from autoparallel.planner.pricing.basis import Basis, Mode

DTYPES: dict[Precision, Literal["float32", "bfloat16", "float16", "float64"]] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "bfloat16",
    "fp64": "float64",
}
MOST_REPEATS = 4
"""So often the search is repeated for a plan whose final memory keeps the limit."""

HALF_PRECISIONS = ("bf16", "fp16", "fp8")

OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")

SEARCHES = ("dp", "rl")
"""How pipelines are found: by dynamic programming, or by learned placers (``placers``)."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user asks of a plan. ``seq`` None leaves the length to ``example_batch``.

    ``tf32``: which float32 products compute in TF32; None is as torch is set in this process.
    ``compiled``: blocks run compiled; None is no, and of a plan that is there what it says.
    ``database`` is the file of measured times, None the user's own. So many ``measure_seconds``
    are spent at most on measuring what a plan for this machine asks for.
    """

    global_batch: int = 32
    seq: int | None = None
    micro_batch: int | None = None
    precision: Precision = "fp32"
    float32_ops: Float32Ops = "autocast"
    gradient_dtype: GradientDtype = "master"
    tf32: Tf32 | None = None
    compiled: bool | None = None
    optimizer: str = "adamw"
    memory_limit_bytes: int | None = None
    forced: Forced = field(default_factory=Forced)
    pins: tuple[Pin, ...] = ()
    stage_at: tuple[str, ...] = ()
    max_tp: int | None = None
    features: Features = field(default_factory=Features)
    goal: Goal = field(default_factory=Goal)
    gap: float = 0.01
    tolerance: float = 0.02
    time_limit_seconds: float = 60.0
    num_candidates: int = 5
    search: str = "dp"
    solver: str = "highs"
    processes: int = 1
    profile: Mode = "auto"
    database: str | None = None
    measure_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise UsageError(
                "AP113", f"precision {self.precision!r} is not one of {', '.join(DTYPES)}"
            )
        if self.float32_ops not in get_args(Float32Ops):
            raise UsageError(
                "AP113",
                f"float32_ops {self.float32_ops!r} is not one of {', '.join(get_args(Float32Ops))}",
            )
        if self.gradient_dtype not in get_args(GradientDtype):
            raise UsageError(
                "AP113",
                f"gradient_dtype {self.gradient_dtype!r} is not one of "
                f"{', '.join(get_args(GradientDtype))}",
            )
        if self.tf32 is not None and self.tf32 not in FAMILIES:
            raise UsageError("AP113", f"tf32 {self.tf32!r} is not one of {', '.join(FAMILIES)}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(
                "AP114", f"optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}"
            )
        if self.search not in SEARCHES:
            raise UsageError("AP330", f"search={self.search} is not one of {', '.join(SEARCHES)}")
        if self.profile not in MODES:
            raise UsageError("AP173", f"profile {self.profile!r} is not one of {', '.join(MODES)}")
        if self.measure_seconds < 0:
            raise UsageError(
                "AP840",
                f"cannot measure for {self.measure_seconds:g} seconds",
                where="--measure-seconds",
                fix="0 turns measuring before planning off; the default is 10",
            )
        check_allowed(self.forced, self.features, max_tp=self.max_tp, gap=self.gap)
        check_tolerance(self.tolerance)
        find_solver(self.solver)

    @property
    def autocasts(self) -> bool:
        """Whether ops of autocast's float32 list compute in float32 in a half-precision model."""
        return self.precision in HALF_PRECISIONS and self.float32_ops == "autocast"


@rare_collections()
def make_plan(
    target: Target,
    cluster_text: str,
    options: PlanOptions,
    observe: Observe = ignore,
    cache: Cache = NO_CACHE,
) -> Plan:
    """The best plan found for ``target`` on the cluster that ``cluster_text`` names.

    Its memory is found action by action, see ``passes.memory.stage_memory``.
    """
    from autoparallel.planning.tf32 import with_choice

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
    """``make_plan`` for a cluster as a value."""
    started = time.perf_counter()
    program = capture_target(target, options, observe, cache)
    capture_seconds = time.perf_counter() - started
    found = _plan_measured(program, target, cluster, options, observe, cache)
    started = time.perf_counter()

    def again(limit_bytes: int) -> Plan:
        lower = replace(options, memory_limit_bytes=limit_bytes)
        return plan_program(program, target, cluster, lower, observe, cache)

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


def within_limit(
    found: Plan, program: Program, limit_bytes: int, search: Callable[[int], Plan], cache: Cache
) -> Plan:
    """A found plan with its final memory, or, where that exceeds the limit, another one.

    The search counts no messages, inputs and communicators between stages. Where a plan exceeds
    the limit by them, ``search`` runs again, with a limit that is lower by the most that any plan
    so far had of them. If no plan keeps the limit so, that which exceeds it least is returned; its
    report says so.
    """
    from autoparallel.cache.captures import with_kept_memory
    from autoparallel.passes.memory.stage_memory import check_host_memory
    from autoparallel.planner.errors import InfeasibleError

    check_host_memory(found, program.graph, program.blocks)
    tried: list[Plan] = []
    uncounted = 0
    for left in reversed(range(1 + MOST_REPEATS)):
        plan = with_kept_memory(found, program, cache)
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


def _plan_measured(
    program: Program,
    target: Target,
    cluster: Cluster,
    options: PlanOptions,
    observe: Observe,
    cache: Cache,
) -> Plan:
    """The best plan found, once what it asks for was measured where that is wanted.

    Under torchrun, and of a target that other processes cannot load, only what is known counts.
    """
    from autoparallel.runtime.launch.launch import is_launched

    if options.profile != "auto" or options.measure_seconds <= 0 or not target.is_named:
        return plan_program(program, target, cluster, options, observe, cache)
    from autoparallel.profiling.first_worker import start_measuring
    from autoparallel.profiling.work_list import Leader, is_wanted

    if not is_wanted(options, cluster) or is_launched(os.environ):
        return plan_program(program, target, cluster, options, observe, cache)
    leader = Leader(program, target, cluster, options)
    if leader.known()[0].num_ops:
        found = plan_program(program, target, cluster, options, observe, cache)
        if not leader.is_worth_starting(found):
            return found
    start_measuring(target, cluster, options, observe)
    return plan_program(program, target, cluster, options, observe, cache)


@rare_collections()
def plan_program(
    program: Program,
    target: Target,
    cluster: Cluster,
    options: PlanOptions,
    observe: Observe = ignore,
    cache: Cache = NO_CACHE,
) -> Plan:
    """The best plan found for a captured program."""
    from autoparallel.cache.cached_plan import kept_plan
    from autoparallel.planning.objectives import plan_for

    graph, basis = priced(program, target, cluster, options)
    if not can_be_served(program, target, cluster):
        options = without_servers(options)
    request = request_of(program, target, options)

    def search() -> Plan:
        return plan_for(
            graph,
            program.blocks,
            cluster,
            request,
            processes=options.processes,
            observe=lambda what, done, total: observe("search", done, total),
            basis=basis,
        )

    found = kept_plan(
        cache, graph, program.blocks, cluster, request, basis=basis, search=search
    )  # fmt: skip
    return replace(stamped(found), compiled=bool(options.compiled))


def priced(
    program: Program, target: Target, cluster: Cluster, options: PlanOptions
) -> tuple[Graph, Basis]:
    """A program's graph as it is priced, and what was measured for it."""
    from autoparallel.planner.pricing.whole_block import whole_blocks

    graph = priced_graph(program, compiled=options.compiled)
    basis = basis_for(cluster, options, target)
    if not options.compiled:  # whole blocks are measured as they run eagerly
        basis = whole_blocks(graph, program.blocks, cluster, basis, precision=options.precision)
    return graph, basis


def priced_graph(program: Program, *, compiled: bool | None) -> Graph:
    """A program's graph as it is priced: where blocks are compiled, with what that fuses."""
    from autoparallel.planner.kernels.fusion import with_fusion

    return with_fusion(program.graph, program.blocks) if compiled else program.graph


def basis_for(cluster: Cluster, options: PlanOptions, target: Target) -> Basis:
    """What was measured for the cluster, as the options want it used.

    Raises UsageError AP170 where times must be measured and nothing is.
    """
    from autoparallel.planner.pricing.basis import Basis

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
    """The name of the target's own optimizer in a profile; "" where it has none."""
    if target.build_optimizer is None:
        return ""
    from autoparallel.runtime.profile.ops import own_name

    return own_name(target.build_optimizer)


def request_of(program: Program, target: Target, options: PlanOptions) -> Request:
    """The options as the planner takes them."""
    from autoparallel.placers.placement import learned_pipelines

    return Request(
        global_batch=options.global_batch,
        seq=options.seq if options.seq is not None else captured_seq(program),
        precision=options.precision,
        float32_ops="autocast" if options.autocasts else "none",
        gradient_dtype=options.gradient_dtype,
        optimizer=options.optimizer,
        offload=options.forced.offload or "none",
        memory_limit_bytes=options.memory_limit_bytes,
        microbatch_size=options.micro_batch,
        forced=options.forced,
        pins=options.pins,
        stage_at=options.stage_at,
        max_tp=options.max_tp,
        features=options.features,
        goal=options.goal,
        gap=options.gap,
        tolerance=options.tolerance,
        time_limit_seconds=options.time_limit_seconds,
        top=options.num_candidates,
        target=target.name,
        settings=target.settings,
        placer=learned_pipelines if options.search == "rl" else None,
        solver=options.solver,
    )


def stamped(plan: Plan) -> Plan:
    """``plan`` with the versions that made it."""
    import torch

    from autoparallel import __version__

    return replace(plan, version=__version__, torch_version=torch.__version__)


def capture_target(
    target: Target, options: PlanOptions, observe: Observe = ignore, cache: Cache = NO_CACHE
) -> Program:
    """The target's model and loss as a graph; no weights are allocated."""
    from autoparallel.cache.captures import kept_program

    observe("capture", 0, 1)
    deferred = record_target(target)
    program = kept_program(cache, target, deferred.model, options, lambda: capture_program(
        target,
        deferred,
        global_batch=options.global_batch,
        seq=options.seq,
        precision=options.precision,
        autocast=options.autocasts,
    ))  # fmt: skip
    observe("capture", 1, 1)
    return program


def capture_program(
    target: Target, deferred: Deferred, *, global_batch: int, seq: int | None,
    precision: Precision, autocast: bool = False,
) -> Program:  # fmt: skip
    """A recorded target as a graph (``capture_rows``), which can be captured again."""

    def captured(rows: int, change: Change = unchanged) -> Program:
        return capture_rows(
            changed_target(target, change), deferred.model, global_batch=rows, seq=seq,
            precision=precision, autocast=autocast,
        )  # fmt: skip

    return replace(captured(global_batch), recapture=captured)


def capture_rows(
    target: Target, model: nn.Module, *, global_batch: int, seq: int | None,
    precision: Precision, autocast: bool = False,
) -> Program:  # fmt: skip
    """A target's model as a graph, of few rows where it can be rescaled to any number.

    Numbers that the model makes of the rows are those of the global batch. Where it cannot be
    rescaled (rows meet before the loss, as in a contrastive loss; it takes another path for few
    rows), it is captured with all rows of the global batch, which then is one micro-batch.
    """
    batch, all_rows = example_batches(target, global_batch, seq)
    return capture_model(
        model, batch, target.loss_fn, precision, all_rows=all_rows, autocast=autocast
    )


def record_target(target: Target, seed: int = 0, init: Init = "exact") -> Deferred:
    """The target's model without its weights, and how to make them from ``seed``.

    ``init``: see ``deferred_init``.

    Raises UsageError AP106 where the user's code fails.
    """
    from autoparallel.passes.initialization.deferred_init import record_build

    with building(target):
        return record_build(target.build_model, seed, init)


def capture_model(
    model: nn.Module, batch: Example, loss_fn: LossFn | None, precision: Precision,
    *, all_rows: Example | None = None, autocast: bool = False,
) -> Program:  # fmt: skip
    """A model on ``meta`` as a graph, in the dtype that ``precision`` computes in.

    With ``autocast`` losses and the other ops of its float32 list are in float32.
    """
    from autoparallel.passes.capture.capture_model import capture
    from autoparallel.target.register_op import registered_rules

    rules = registered_rules()
    return capture(
        model, batch, all_rows=all_rows, loss_fn=loss_fn, dtype=DTYPES[precision], rules=rules,
        autocast=autocast,
    )  # fmt: skip


def captured_seq(program: Program) -> int | None:
    """The length of the program's token input: the second dimension of its first integers."""
    for node in program.graph.inputs:
        if node.spec.dtype == "int64" and len(node.spec.shape) > 1:
            return node.spec.shape[1]
    return None


def find_cluster(text: str) -> Cluster:
    """The cluster that ``--cluster`` names: ``local``, a shorthand or a TOML file.

    Raises UsageError AP115 where there is none.
    """
    from autoparallel.cost_model.cluster.cluster import ClusterError
    from autoparallel.cost_model.cluster.resolve import resolve_cluster

    try:
        return resolve_cluster(text)
    except ClusterError as error:
        raise UsageError(
            "AP115", f"--cluster: {error.what}", where=error.where, fix=error.fix
        ) from error
