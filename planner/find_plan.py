"""Search for the best plan of a graph on a cluster under a request: the entry of the planner.

The search runs a tuple of proposers in order. A proposer takes the search context and the pool of
candidates so far, and yields new candidates; the pool keeps all that fit, and knows the fastest.
The winner becomes a plan, which ``evaluate`` prices again, node by node: both must agree. The time
limit, or Ctrl-C, ends the search early with the best plan so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from ..cost_model.cluster.cluster import Cluster
from ..cost_model.ops.memory import Offload
from . import ops as default_rules
from .costs.basis import DEFAULT, Basis, CostQueries, uses_of
from .costs.prices import Rules
from .errors import AutoparallelError, InfeasibleError, InternalError, TimeLimitError, UsageError
from .evaluate.evaluate import evaluate, with_sources
from .evaluate.gradient_choice import with_sums
from .evaluate.server_offers import repriced, with_offered_servers
from .graph.graph import Blocks, Graph
from .inter_op.heterogeneous import HostOrder, in_given_ranks, over_orders
from .inter_op.submesh import LONG_POSITIONS, longest_attention
from .plan import Plan, Recompute, SolverInfo, StagePlan, StagePrediction
from .proposers.interleaved import interleaved, is_alike
from .proposers.local_search import local_search
from .proposers.pipelines import dynamic_program, parallel_branches, placed_pipelines
from .proposers.replicated import replicated
from .proposers.sliced import sliced
from .proposers.uneven_shares import uneven_shares
from .requests.features import OFFERED_MODES
from .requests.goal import INTERRUPTED, Observe, ignore
from .requests.options import check_degrees, check_forced_schedule, refused
from .requests.pins import check_kept, in_given_kinds, pinned_blocks
from .requests.request import Request, offloading
from .schedules.schedules import registered_schedule
from .search.bound import lower_bound
from .search.candidates import Candidate
from .search.context import SearchContext, check_measured, check_total_bytes, missing_plan_error
from .search.layout_gap import tighten_gap
from .search.pool import CandidatePool
from .search.problem import SharedTables
from .search.report_plan import make_plan
from .search.simplest import simplest_of, tolerance_of
from .variants.asynchronous import (
    check_asynchronous,
    check_forced,
    is_asynchronous,
    with_limits_of_schedule,
)
from .variants.parameter_servers import (
    check_forced_servers,
    check_served_memory,
    check_served_model,
    one_device,
    split_request,
)

Proposer = Callable[[SearchContext, CandidatePool], Iterator[Candidate]]

PROPOSERS: tuple[Proposer, ...] = (
    dynamic_program,  # pipelines of one stage per rank: stages of one size, then of any
    parallel_branches,  # branches of the model on devices of their own
    local_search,  # cuts next to the cuts of the fastest candidates
    uneven_shares,  # unlike devices take unequal shares of the batch
    interleaved,  # several stages per rank
    replicated,  # Chimera
    sliced,  # TeraPipe
)
"""All proposers of the search, in the order in which they run."""

ONE_STAGE_PER_RANK = PROPOSERS[:4]
OTHER_SCHEDULES = PROPOSERS[4:]


@dataclass(frozen=True, slots=True)
class SearchMethod:
    """Options of a search: its proposers, whether to bound the result, and shared cost tables.

    ``proposers``: functions that yield candidate plans, run in order. ``is_bounded``: also compute
    a lower bound on the step time, an eighth to a fifth of the search time. ``tables``: cost tables
    of earlier searches of the same graphs with the same rules.
    """

    proposers: tuple[Proposer, ...] = PROPOSERS
    is_bounded: bool = True
    tables: SharedTables | None = None


COARSE = SearchMethod((partial(dynamic_program, num_groups=1),), is_bounded=False)
"""Method of a quick first search: one stage per rank only, no lower bound. All micro-batch sizes
are one group, so that a good result for one size ends the search of others sooner."""


DEFAULT_METHOD = SearchMethod()

SAME = 1e-6
"""Maximum relative difference of the search's prices and ``evaluate``'s: rounding explains it."""


def plan(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe = ignore,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
    method: SearchMethod = DEFAULT_METHOD,
) -> Plan:
    """Find the fastest plan that fits in memory. ``rules``: sharding rules of ops; ``basis``:
    measured prices; ``observe`` is told of progress.

    Raises UsageError for a request that cannot be met (AP170 if times must be measured but are not,
    AP546 and AP158 for a forced schedule that an option excludes, AP196 and AP197 for gradient sums
    that the plan cannot run), InfeasibleError AP301 if nothing fits in memory, TimeLimitError AP701
    if nothing was found in time, InternalError AP999 if the two prices of the plan differ.
    """
    check_forced(request.forced)
    check_forced_servers(request.forced, cluster)
    check_forced_schedule(request, len(blocks.blocks))
    request = with_offers(with_limits_of_schedule(request), graph, cluster)
    basis = basis if request.features.allows("tiles") else basis.without_tiles
    if request.forced.shard is not None or not request.features.allows("hsdp"):
        basis = basis.with_shard_degree(request.shard_degree)
    method = replace(method, tables=method.tables or SharedTables())
    served = partial(_served, graph, blocks, cluster, rules=rules, basis=basis, method=method)
    if request.forced.servers is not None:
        return served(request, observe=observe)
    searched = partial(
        search, graph, blocks, cluster, observe=observe, rules=rules, basis=basis, method=method
    )
    try:
        found = searched(request)
    except InfeasibleError as failure:
        found = _offloaded(cluster, request, failure, searched)
    best = found.best_plan()
    best = check_prediction(best, graph, blocks, rules=rules, basis=replace(basis, asked=None))
    best = with_sums(best, graph, blocks, request.forced, rules=rules, basis=basis)
    best = with_sources(best, graph, blocks, basis=basis, rules=rules)
    check_asynchronous(best, graph, blocks)
    return with_offered_servers(best, graph, request, served)


def _served(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe = ignore,
    rules: Rules,
    basis: Basis,
    method: SearchMethod,
) -> Plan:
    """Plan a single worker, and return its plan on all workers with the forced servers."""
    check_served_model(graph, request.precision)
    servers, own = split_request(request, cluster)
    on = one_device(cluster)
    alone = plan(graph, blocks, on, own, observe=observe, rules=rules, basis=basis, method=method)
    whole = replace(alone, cluster=cluster, servers=servers, alternatives=())
    priced = evaluate(graph, blocks, whole, cluster, rules=rules, basis=basis)
    check_served_memory(whole, priced.peak_memory_bytes, request.memory_limit_bytes)
    return repriced(whole, priced)


def _offloaded(
    cluster: Cluster,
    request: Request,
    failure: InfeasibleError,
    searched: Callable[[Request], SearchResult],
) -> SearchResult:
    """Search again after no plan fitted: with every mode of recomputation and offloading that is
    not denied, and then also with states in host memory: optimizer states first, then gradients and
    parameters too.

    Raises ``failure`` if neither is allowed or helps; only GPUs can offload.
    """
    is_searched = request.goal.objective != "memory" and _are_gpus(cluster)
    offering = _offering(request, OFFERED_MODES)
    if is_searched and offering.recomputations != request.recomputations:
        request = offering
        with suppress(InfeasibleError):
            return searched(request)
    may_offload = (
        is_searched
        and request.forced.offload is None
        and request.features.allows("offload")
        and not is_asynchronous(request.forced.schedule)
    )
    if not may_offload:
        raise failure
    for states in get_args(Offload)[1:]:
        with suppress(InfeasibleError, UsageError):  # the request may exclude some
            return searched(offloading(request, states))
    raise failure


def with_offers(request: Request, graph: Graph, cluster: Cluster) -> Request:
    """Return a request that also offers ``OFFERED_MODES`` of recomputation, on GPUs, if the
    attention of the graph has ``LONG_POSITIONS``: attention is then most of the compute, so
    rerunning it makes recomputation slow, and kept values can be copied beside it."""
    is_long = longest_attention(graph) >= LONG_POSITIONS
    return _offering(request, OFFERED_MODES if is_long and _are_gpus(cluster) else ())


def _offering(request: Request, modes: Sequence[Recompute]) -> Request:
    features = request.features
    return replace(request, features=replace(features, changes=features.changes | {*modes}))


def _are_gpus(cluster: Cluster) -> bool:
    return all(host.device.kind == "cuda" for host in cluster.hosts)


def search(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe = ignore,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
    method: SearchMethod = DEFAULT_METHOD,
) -> SearchResult:
    """Search every order of the hosts and return the result of the order with the fastest
    candidate. Raises the errors of ``plan``."""
    own_blocks = pinned_blocks(graph, blocks, request.pins)
    tables = (method.tables or SharedTables()).of(graph, own_blocks, request.precision)
    if basis.mode == "measured":
        basis = replace(basis, asked=CostQueries(uses_of(own_blocks)))
    contexts: list[SearchContext] = []

    def attempt(order: HostOrder, limited: Request) -> tuple[SearchContext, CandidatePool]:
        if contexts and contexts[0].budget.stopped:
            raise _ended_early(contexts[0].budget.stopped)
        check_degrees(limited.forced, order.cluster, graph)
        context = SearchContext.of(
            graph, own_blocks, order.cluster, limited, rules=rules, basis=basis, tables=tables
        )
        if contexts:  # equal except for the order of the hosts
            context = context.like(contexts[0])
        context.budget.observe = observe
        try:
            pool = run_proposers(context, method.proposers)
        except KeyboardInterrupt:
            if not contexts:
                raise
            context.budget.stopped = INTERRUPTED
            raise _ended_early(INTERRUPTED) from None
        contexts.append(context)
        return context, pool

    done = over_orders(cluster, request, attempt)
    order, (context, pool) = min(done, key=lambda each: each[1][1].bar)
    if basis.mode == "measured":
        check_measured(basis, request)
    others = [each for _, (_, other) in done if other is not pool for each in other.known]
    is_known = method.is_bounded and (not context.budget.stopped or len(contexts) == 1)
    bounded = tuple(contexts) if is_known else ()
    return SearchResult(graph, blocks, cluster, request, order, context, pool, others, bounded)


def run_proposers(
    context: SearchContext, proposers: Sequence[Proposer] = PROPOSERS
) -> CandidatePool:
    """Run the proposers (functions that yield candidate plans) and return the pool of candidates,
    even after Ctrl-C. Raises the errors of ``plan``."""
    check_total_bytes(context)
    pool, left = CandidatePool(context), list(_for_request(context.request, proposers))
    try:
        while left:
            pool.add_all(left[0](context, pool))
            left.pop(0)
        pool.settle()
    except KeyboardInterrupt:
        if pool.best is None:
            raise
        context.budget.interrupt()
        for propose in left:
            if not pool.allowed and propose in OTHER_SCHEDULES:
                pool.add_all(propose(context, pool))
    if not pool.allowed:
        raise _nothing_found(context, pool)
    return pool


def _for_request(request: Request, proposers: Sequence[Proposer]) -> Sequence[Proposer]:
    """Return the proposers to run; the request's placer, if any, replaces the dynamic program."""
    if request.placer is None:
        return proposers
    of_placer = (placed_pipelines, *OTHER_SCHEDULES)
    return [each for each in of_placer if each is placed_pipelines or each in proposers]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search over orders of the hosts.

    ``pool`` has the candidates of the best order, ``others`` the candidates of all other orders.
    ``contexts``: search state of every order, () if no lower bound can be computed.
    """

    graph: Graph
    blocks: Blocks
    cluster: Cluster
    request: Request
    order: HostOrder
    context: SearchContext
    pool: CandidatePool
    others: list[Candidate]
    contexts: tuple[SearchContext, ...]

    def best_plan(self) -> Plan:
        """Return the simplest plan within the tolerance of the fastest, with a lower bound of the
        step time, the other candidates, and the most that better layouts can gain."""
        context, pool = self.context, self.pool
        pinned = pinned_blocks(self.graph, self.blocks, self.request.pins)
        tolerance = self.request.tolerance
        if context.basis.used is not None:
            tolerance = tolerance_of(
                tolerance,
                lambda: self._plan(pool.ranked()[0], ()),
                lambda plan: with_sources(
                    plan, self.graph, pinned, basis=context.basis, rules=context.rules
                ),
            )
        winner, why = simplest_of(context, pool, tolerance)
        best = tighten_gap(context, winner)
        losers = [
            each
            for each in (*pool.known, *pool.rejected, *self.others)
            if each is not winner and pool.is_allowed(each)
        ]
        found = self._plan(best, losers)
        return replace(found, solver=replace(self._solver_info(found), simplest=why))

    def _plan(self, best: Candidate, losers: Sequence[Candidate]) -> Plan:
        """Return a candidate as a plan on the caller's ranks and blocks, which the search may have
        reordered and split into other kinds."""
        order, request, structure = self.order, self.request, self.context.structure
        spent = self.context.budget.spent()
        found = make_plan(structure, order.cluster, request, best, losers, spent)
        found = in_given_ranks(found, order, self.cluster)
        pinned = pinned_blocks(self.graph, self.blocks, request.pins)
        found = check_kept(found, self.graph, pinned, request.pins)
        return in_given_kinds(found, pinned, self.blocks)

    def _solver_info(self, plan: Plan) -> SolverInfo:
        """Return the plan's gap to the lower bound, the search's effort, and why it ended early, if
        it did.

        There is no lower bound for plans with sequence slices, which skip masked pairs of attention
        that the bound counts, nor for asynchronous schedules, which update more often.
        """
        step_seconds, layouts_gap = plan.prediction.step_seconds, plan.solver.layouts_gap
        bound = 0.0
        if not plan.slices and not is_asynchronous(plan.schedule):
            bound = min((lower_bound(context) for context in self.contexts), default=0.0)
        bound = min(bound, step_seconds)
        gap = max(0.0, 1 - bound / step_seconds)
        if layouts_gap is not None and plan.num_chunks == 1:
            layouts_gap = min(layouts_gap, gap)
        num_problems, seconds = self.context.budget.spent()
        return SolverInfo(
            gap,
            num_problems,
            dict(seconds),
            bound,
            self.context.budget.ended_by,
            layouts_gap,
            solver=plan.solver.solver,
        )


def check_prediction(
    plan: Plan, graph: Graph, blocks: Blocks, *, rules: Rules, basis: Basis
) -> Plan:
    """Return the plan with the seconds of its exchanges beside compute, which the search does not
    tell apart. Raise InternalError AP999 if ``evaluate`` does not reproduce the plan's seconds and
    bytes."""
    found = evaluate(graph, blocks, plan, plan.cluster, rules=rules, basis=basis)
    pairs = {
        "seconds of a step": (plan.prediction.step_seconds, found.step_seconds),
        "bytes of memory": (plan.prediction.peak_memory_bytes, found.peak_memory_bytes),
    }
    for what, (searched, evaluated) in pairs.items():
        if abs(searched - evaluated) > SAME * evaluated:
            raise InternalError(
                "AP999",
                f"the search and evaluate disagree on the {what} of the plan: {searched:.9g} and "
                f"{evaluated:.9g}",
                why="this is a defect of the planner; the plan is not returned, as one of its "
                "prices is wrong",
                fix="report it with the model, the cluster and the options",
            )
    return replace(plan, stages=tuple(map(_with_hidden, plan.stages, found.stages)))


def _with_hidden(stage: StagePlan, evaluated: StagePrediction) -> StagePlan:
    hidden = evaluated.seconds.get("hidden_exchanges")
    if hidden is None:
        return stage
    seconds = {**stage.prediction.seconds, "hidden_exchanges": hidden}
    return replace(stage, prediction=replace(stage.prediction, seconds=seconds))


def _ended_early(by: str) -> TimeLimitError:
    return TimeLimitError(
        "AP701",
        f"the search was ended by {by} before a plan was found",
        fix="run again without interrupting",
    )


def _nothing_found(context: SearchContext, pool: CandidatePool) -> AutoparallelError:
    """Return the error that explains why the search found no plan."""
    request = context.request
    if not pool.known and not pool.rejected:
        name, is_late = request.forced.schedule, context.budget.ended_by
        if registered_schedule(name) and not (is_late or context.solvers.excess_bytes):
            fix = "pp= and microbatches= that its function takes, for stages that form a chain"
            return refused(f"no pipeline of these devices can run under schedule={name}", fix)
        failure = missing_plan_error(context, is_proven=not pool.is_open)
        if is_asynchronous(request.forced.schedule) and isinstance(failure, InfeasibleError):
            failure.why += "; stages keep older versions of their weights in memory"
        return failure
    if pool.rejected:
        excess = min(
            each.peak_bytes
            - min(context.limits_on(own.devices).memory_bytes for own in each.stages)
            for each in pool.rejected
        )
        together = {"chimera": "the two stages of a rank", "terapipe": "the stages"}
        what = together.get(request.forced.schedule or "", "the chunks of a rank")
        return InfeasibleError(
            "AP301",
            f"{what} do not fit: they need {excess / 2**30:.3g} GiB more",
            fix="fewer chunks, recompute=full, or zero=1 or more",
        )
    if request.stage_at:
        return UsageError(
            "AP183",
            f"--stage-at {request.stage_at[0]}: no stage starts there",
            why="with several stages per rank, stage boundaries follow FLOPs alone",
            fix="a schedule of one stage per rank, or remove --stage-at",
        )
    if not any(is_alike(context, each) for each in pool.known):
        return refused("the ranks of the pipeline have different meshes", "dp= and tp=")
    forced, asked = request.forced, "the schedules that are allowed"
    if forced.schedule is not None:
        names = {
            "schedule": forced.schedule,
            "chunks": forced.chunks,
            "microbatches": forced.num_microbatches,
        }
        asked = ",".join(f"{name}={value}" for name, value in names.items() if value is not None)
    return refused(
        f"no pipeline that was found can run under {asked}",
        "another number of chunks or micro-batches, or a schedule of one stage per rank",
    )
