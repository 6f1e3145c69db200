"""The search: from a graph and a cluster to a plan.

In: the graph, its blocks, a cluster, a request. Out: the plan, with the candidates that
lost. A micro-batch size with a way to lay stages over the devices is a quest; first come those
with stages of one size (so that there soon is a plan), then those that mix sizes. Quests are
followed the most promising first, and the costs of their stages are priced no further than
needed to know the best pipelines (``quests``, ``costs``, ``inter_op``). Those are simulated
under every schedule that is allowed, and with them others that the recurrence holds for no
better (``nearby``); the fastest are solved again with every ZeRO stage and recompute level for
themselves, and the fastest simulated one wins.

The time limit, or Ctrl-C, ends the search early with the best plan so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...cost_model.cluster import Cluster
from .. import rules as default_rules
from ..errors import TimeLimitError
from ..graph import Blocks, Graph
from ..inter_op.heterogeneous import HostOrder, in_given_ranks, is_mixed, over_orders
from ..plan import Plan, SolverInfo
from ..price_sources import with_sources
from ..pricing.basis import DEFAULT, Asked, Basis, uses_of
from ..pricing.prices import Rules
from ..requests.options import check_degrees
from ..requests.pins import check_kept, in_given_kinds, pinned_blocks
from ..requests.request import Request
from .bound import lower_bound
from .job import INTERRUPTED, Job
from .narrowing import narrowed
from .ranking import Observe as Observe
from .ranking import Ranking, ignore
from .refusals import check_measured
from .report_plan import Candidate, make_plan


@dataclass(frozen=True)
class Searched:
    """What a search found: the candidates, the winner first, on the hosts in an order.

    ``blocks`` are those that pins tell apart; ``job`` is the best order's, ``jobs`` are all of
    which that can be bounded.
    """

    graph: Graph
    blocks: Blocks
    cluster: Cluster
    request: Request
    order: HostOrder
    job: Job
    ranking: list[Candidate]
    jobs: tuple[Job, ...]

    @property
    def bound_seconds(self) -> float:
        """No plan of ``request`` takes less; 0 where that is not known."""
        return min((lower_bound(each) for each in self.jobs), default=0.0)

    @property
    def spent(self) -> tuple[int, Mapping[str, float]]:
        """How many problems were solved so far, and seconds by phase."""
        return self.job.spent()

    def judged(self, plan: Plan) -> Plan:
        """A plan with how good it is.

        Slices skip masked pairs of attention, which the bound counts: there is none for them.
        """
        bound_seconds = 0.0 if plan.slices else self.bound_seconds
        return replace(plan, solver=_solver_info(plan, self, bound_seconds))

    def winner(self) -> Plan:
        """The plan of the winner, its layouts proven, not yet ``judged``."""
        return self.plan(narrowed(self.job, self.ranking[0]))

    def plan(self, best: Candidate, *, with_others: bool = True) -> Plan:
        """The plan of a candidate, its ranks and kinds as they were given, not yet ``judged``.

        ``with_others``: it says why all but the winner lost.
        """
        others = self.ranking[1:] if with_others else []
        order, request = self.order, self.request
        found = make_plan(self.job.structure, order.cluster, request, best, others, self.spent)
        found = in_given_ranks(found, order, self.cluster)
        blocks = pinned_blocks(self.graph, self.blocks, request.pins)
        found = check_kept(found, self.graph, blocks, request.pins)
        return in_given_kinds(found, blocks, self.blocks)


def plan(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe | None = None,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Plan:
    """The fastest plan found that fits, of one stage per rank.

    Raises ``UsageError`` for a request that cannot be met (AP170 where times must be measured
    and are not), ``InfeasibleError`` (AP301) if nothing fits in memory, ``TimeLimitError``
    (AP701) if nothing was found in time.
    """
    found = searched(graph, blocks, cluster, request, observe=observe, rules=rules, basis=basis)
    best = found.judged(found.winner())
    found.job.end()
    return with_sources(best, graph, blocks, basis=basis, rules=rules)


def searched(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe | None = None,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Searched:
    """All that was found. Raises as ``plan``."""
    given, blocks = blocks, pinned_blocks(graph, blocks, request.pins)
    if basis.mode == "measured":
        basis = replace(basis, asked=Asked(uses_of(blocks)))
    if is_mixed(cluster):  # the orders of its hosts share what one process has solved
        request = replace(request, processes=1)
    known: list[Job] = []
    stopped = ""

    def attempt(order: HostOrder, limited: Request) -> tuple[Job, list[Candidate]]:
        nonlocal stopped
        if stopped:
            raise TimeLimitError(
                "AP701",
                f"the search was ended by {stopped} before a plan was found",
                fix="run again without interrupting",
            )
        try:
            check_degrees(limited.forced, order.cluster)
            job = Job.of(graph, blocks, order.cluster, limited, rules=rules, basis=basis)
            if known:  # the same but for the order of the hosts
                job = job.like(known[0])
            job, found = _ranked(job, observe or ignore)
        except KeyboardInterrupt:
            if not known:
                raise
            stopped = INTERRUPTED
            raise TimeLimitError(
                "AP701", "the search was interrupted", fix="run again without interrupting"
            ) from None
        known.append(job)
        stopped = job.stopped
        return job, found

    order, job, ranking = over_orders(cluster, request, attempt)
    if basis.mode == "measured":
        check_measured(basis, request)
    jobs = tuple(known) if not stopped or len(known) == 1 else ()
    return Searched(graph, given, cluster, request, order, job, ranking, jobs)


def _solver_info(plan: Plan, found: Searched, bound_seconds: float) -> SolverInfo:
    """How good a plan is, by a bound of all, what it took to find, and what ended it early."""
    step_seconds, layouts_gap = plan.prediction.step_seconds, plan.solver.layouts_gap
    bound = min(bound_seconds, step_seconds)
    gap = max(0.0, 1 - bound / step_seconds)
    if layouts_gap is not None and plan.num_chunks == 1:
        layouts_gap = min(layouts_gap, gap)
    return SolverInfo(
        gap, found.spent[0], dict(found.spent[1]), bound, found.job.ended_by, layouts_gap,
        solver=plan.solver.solver,
    )  # fmt: skip


def ranked(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe | None = None,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> tuple[Job, list[Candidate]]:
    """The job and what was found for it: the winner, then those that lost. Raises as ``plan``."""
    check_degrees(request.forced, cluster)
    job = Job.of(graph, blocks, cluster, request, rules=rules, basis=basis)
    return _ranked(job, observe or ignore)


def _ranked(job: Job, observe: Observe) -> tuple[Job, list[Candidate]]:
    """What is found for a job."""
    ranking = Ranking(job, observe)
    try:
        found = _found(ranking)
    except BaseException:
        job.end()
        raise
    return job, found


def _found(ranking: Ranking) -> list[Candidate]:
    """What a ranking comes to, also where Ctrl-C ends it."""
    job = ranking.job
    try:
        ranking.run()
        if ranking.found.best:
            return ranking.found.ranked()
    except KeyboardInterrupt:
        if not ranking.found.best:
            raise
        job.interrupt()
        ranking.observe = ignore
        return ranking.found.ranked()
    raise job.failure(is_proven=not ranking.is_open)
