"""Context of a search: its problem, its budget of time, and all results found so far.

In: a graph, its blocks, a cluster, a request. Out: the state that proposers and bounds share, and
the errors of a search that finds no plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from ...cost_model.cluster.cluster import Cluster
from ..costs.basis import Basis
from ..costs.prices import Rules
from ..errors import AutoparallelError, InfeasibleError, TimeLimitError, UsageError
from ..evaluate.step import KnownSteps
from ..graph.graph import Blocks, Graph
from ..graph.layout import Mesh
from ..intra_op.intra_op import IntraOp
from ..requests.goal import Budget
from ..requests.request import Request
from .least_bytes import LeastBytes
from .problem import GraphTables, SearchProblem
from .solvers import StageSolvers

ONE_DEVICE = Mesh(("dp",), (1,))


@dataclass
class KnownResults:
    """Results that a search keeps for reuse.

    ``solvers``: solvers of stages, by their prices and limits; ``steps``: simulated steps;
    ``shared_bound``: a lower bound of plans with unequal batch shares for unlike devices; None
    until such plans were tried. ``bound_seconds``: the lower bound of all plans (``bound``).
    """

    solvers: dict[object, IntraOp] = field(default_factory=dict)
    steps: KnownSteps = field(default_factory=dict)
    shared_bound: float | None = None
    bound_seconds: float | None = None


@dataclass(frozen=True)
class SearchContext(SearchProblem):
    """State of a plan search for one order of the hosts: its problem, its budget, its results."""

    budget: Budget
    known: KnownResults

    @staticmethod
    def of(
        graph: Graph,
        blocks: Blocks,
        cluster: Cluster,
        request: Request,
        *,
        rules: Rules,
        basis: Basis,
        tables: GraphTables | None = None,
    ) -> SearchContext:
        """Build a context. ``tables``, if given, come from searches of the same graph and rules."""
        if tables is None or basis.asked is not None:  # queries are recorded when tables are made
            tables = GraphTables.of(graph, blocks, request.precision)
        budget = Budget.of(request.time_limit_seconds)
        return SearchContext(tables, cluster, request, rules, basis, budget, KnownResults())

    def like(self, other: SearchContext) -> SearchContext:
        """Return this context with the results of ``other``, for another order of the hosts."""
        other.budget.extend(self.budget)
        known = KnownResults(other.known.solvers, other.known.steps)
        return replace(self, tables=other.tables, budget=other.budget, known=known)

    @cached_property
    def solvers(self) -> StageSolvers:
        return StageSolvers(self, self.budget, self.known.solvers)


def check_total_bytes(problem: SearchProblem) -> None:
    """Raise InfeasibleError AP301 if all devices together cannot hold the model."""
    if len({host.device.kind for host in problem.cluster.hosts}) > 1:
        return  # these hold a state in different numbers of bytes
    rows, ranks = min(problem.microbatch_rows), range(problem.cluster.num_devices)
    least = LeastBytes(problem.tables.at(rows), problem.classes)
    total = least.total(problem.prices(rows, ONE_DEVICE, (0,)))
    room = sum(problem.limits_on((rank,)).memory_bytes for rank in ranks)
    if total > room:
        raise does_not_fit(problem, (total - room) / len(ranks))


def missing_plan_error(context: SearchContext, *, is_proven: bool) -> AutoparallelError:
    """Return the error for a missing plan: no time, no memory (with the excess), or no mesh.

    ``is_proven``: bounds alone prove that nothing fits, so more time would not help.
    """
    excess, budget = context.solvers.excess_bytes, context.budget
    if not excess and is_proven and not budget.ended_by:
        return UsageError(
            "AP127",
            "the requested dp/tp/pp degrees match no assignment of stages to this cluster",
            fix="other degrees, or fix fewer of them",
        )
    if not excess or (budget.left_seconds <= 0 and not is_proven):
        return TimeLimitError(
            "AP701", "no plan was found within the time limit", fix="a longer --time-limit"
        )
    return does_not_fit(context, min(excess))


def check_measured(basis: Basis, request: Request) -> None:
    """Raise UsageError AP170 if the search queried a time that is not measured."""
    missing = basis.asked.unmeasured if basis.asked is not None else []
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        raise UsageError(
            "AP170",
            f"--profile measured: {len(missing)} kinds of op or transfer have not been measured",
            why=shown,
            fix=f"autoparallel profile {request.target or 'TARGET'} with the same options and a "
            "larger --budget, or plan with --profile auto",
        )


def does_not_fit(problem: SearchProblem, excess: float) -> InfeasibleError:
    """Return error AP301: even the plan nearest to fitting needs ``excess`` bytes too many."""
    limits, size, cluster = problem.limits, problem.request.microbatch_size, problem.cluster
    limit = limits.memory_bytes
    tries = []
    if limits.recompute == "none":
        tries.append("recompute=full")
    if max(limits.zeros) < 3 and cluster.num_devices > 1:
        tries.append("zero=3")
    if size is not None and size > 1:
        tries.append("a smaller micro-batch")
    devices = -(-int(cluster.num_devices * (limit + excess)) // int(limit)) + 1
    tries.append(f"about {devices} devices")
    nearest = f": the nearest plan is about {excess / 2**30:.3g} GiB over the limit"
    return InfeasibleError(
        "AP301",
        "the model does not fit" + (nearest if excess > 0 else ""),
        why=f"each device has {limit / 2**30:.3g} GiB",
        fix=" or ".join(tries),
    )
