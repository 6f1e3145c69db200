"""Context of a search: the request, and all results solved for it so far.

In: a graph, its blocks, a cluster, a request. Out: on demand the solver of any mesh of any submesh
at any micro-batch size (made once for all submeshes of equal cost), the costs of stages, and
planning time by phase. ``GraphTables`` are shared by searches of one model, whatever the cluster,
memory and features: the key of every table has all that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

from ...cost_model.cluster.cluster import Cluster, Link
from ..costs.basis import DEFAULT, Basis
from ..costs.precision import with_precision
from ..costs.price_cache import PriceCache, find
from ..costs.prices import Prices, Rules
from ..errors import AutoparallelError, InfeasibleError, TimeLimitError, UsageError
from ..evaluate.step import KnownSteps
from ..graph.graph import Blocks, Graph
from ..graph.layout import Mesh
from ..inter_op.heterogeneous import inner_size
from ..inter_op.inter_op import Floats, StageChoice, Table
from ..inter_op.submesh import Proposals, meshes, proposals, restriction, submesh_sizes
from ..intra_op.intra_op import IntraOp, Limits
from ..intra_op.pulp_solver import find_solver
from ..plan import Precision
from ..requests.goal import Budget
from ..requests.options import microbatch_rows, stage_numbers
from ..requests.pins import Pins, by_template
from ..requests.request import Request
from ..schedules.held import HalfPairs, half_pairs
from ..stage.range_classes import RunClasses, run_classes, stage_begins, without_inner
from ..stage.stage_model import StageModel
from ..stage.structure import Structure
from .costs import Costs, Runs
from .space import place_key

INTERRUPTED = "Ctrl-C"
"""Text for a search that Ctrl-C ended."""

LONG = 5_000
"""Work (``Budget.work``) below which no part of a search is cut short."""

ONE_DEVICE = Mesh(("dp",), (1,))

Observe = Callable[[str, float, float], None]
"""Callback for progress: (activity, amount done, total amount)."""


def ignore(what: str, done: float, total: float) -> None:
    """Ignore progress: the default ``Observe``."""


GRACE_SECONDS = 2.0
"""Seconds after Ctrl-C to evaluate the best plan so far."""


@dataclass
class SearchContext:
    """State of a plan search for one order of the hosts.

    ``steps`` caches simulated steps. ``shared_bound``: a lower bound of plans with unequal batch
    shares for unlike devices; None until such plans were tried. ``bound_seconds``: the lower bound
    of all plans (``bound``), once computed.
    """

    structure: Structure
    cluster: Cluster
    request: Request
    rules: Rules
    limits: Limits
    budget: Budget
    basis: Basis = DEFAULT
    pins: Pins = field(default_factory=dict)
    cache: PriceCache = field(default_factory=PriceCache)
    graphs: dict[int, Structure] = field(default_factory=dict)
    solvers: dict[object, IntraOp] = field(default_factory=dict)
    steps: KnownSteps = field(default_factory=dict)
    began_work: float = 0.0
    stopped: str = ""
    shared_bound: float | None = None
    bound_seconds: float | None = None
    observe: Observe = ignore
    _costs: dict[int, Costs] = field(default_factory=dict)
    _solver_at: dict[object, IntraOp] = field(default_factory=dict)

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
        limit = request.memory_limit_bytes
        if limit is None:
            limit = cluster.usable_memory_bytes
        if tables is None or basis.asked is not None:  # queries are recorded when tables are made
            tables = GraphTables.of(graph, blocks, request.precision)
        return SearchContext(
            tables.structure,
            cluster,
            request,
            rules,
            Limits(
                float(limit),
                request.zeros,
                request.recompute,
                request.gap,
                request.features.recompute,
                find_solver(request.solver),
                request.intra_op != "ilp",
            ),
            Budget.of(request.time_limit_seconds),
            basis,
            by_template(graph, blocks, request.pins),
            tables.cache,
            tables.graphs,
        )

    def like(self, other: SearchContext) -> SearchContext:
        """Return this context with the results of ``other``, for another order of the hosts."""
        other.budget.deadline = self.budget.deadline
        return replace(
            self,
            structure=other.structure,
            budget=other.budget,
            cache=other.cache,
            graphs=other.graphs,
            solvers=other.solvers,
            steps=other.steps,
        )

    def at(self, rows: int) -> Structure:
        """Return the structure of the graph for micro-batches of ``rows`` rows."""
        if rows not in self.graphs:
            self.graphs[rows] = self.structure.at_batch(rows)
        return self.graphs[rows]

    @cached_property
    def classes(self) -> RunClasses:
        return without_inner(run_classes(self.structure), self._begins)

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """Return the positions of blocks at which the request requires a stage to begin."""
        own = self.structure
        return tuple(stage_begins(own.graph, own.blocks, self.request.stage_at))

    def begins_as_asked(self, stages: Sequence[StageChoice]) -> bool:
        """Return whether stages begin at all blocks at which the request requires it."""
        return {choice.start for choice in stages}.issuperset(self._begins)

    @cached_property
    def mesh_proposals(self) -> Proposals:
        """Return the proposer of meshes with further axes than dp and tp."""
        return proposals(self.structure.graph, self.cluster, self.request, self.rules)

    @cached_property
    def stage_numbers(self) -> tuple[int, ...]:
        """Return the numbers of stages to try. Raises ``UsageError`` if none is possible."""
        blocks, least = self.structure.blocks.blocks, len({0, *self._begins})
        return stage_numbers(self.request, self.cluster, len(blocks), least_stages=least)

    @cached_property
    def microbatch_rows(self) -> tuple[int, ...]:
        """Return the micro-batch sizes to try, the most promising first. Raises ``UsageError``."""
        return microbatch_rows(self.structure.graph, self.request, self.cluster)

    @cached_property
    def place_key(self) -> Callable[[int, int], Hashable]:
        return cache(place_key(self.cluster))

    def num_microbatches(self, rows: int) -> int:
        return self.request.global_batch // rows

    @property
    def in_flight_schedule(self) -> str:
        """Return a proposal's default schedule: "1f1b" (least memory) if allowed."""
        return "1f1b" if "1f1b" in self.request.schedules else self.request.schedules[0]

    def held(self, schedule: str, num_stages: int, rows: int, depth: int) -> HalfPairs:
        """Return a stage's micro-batches in flight; ``depth``: its stages to the end."""
        return half_pairs(schedule, depth, num_stages, self.num_microbatches(rows))

    def costs(self, rows: int) -> Costs:
        """Return the costs of stages at micro-batches of ``rows`` rows."""
        if rows not in self._costs:
            count = self.num_microbatches(rows)
            self._costs[rows] = Costs(
                Runs(self.at(rows), self.classes, count),
                self.place_key,
                lambda first, size: self.solvers_on(rows, first, size),
                lambda left: self._least_held(left, count),
                self.budget,
            )
        return self._costs[rows]

    def _least_held(self, left: int, count: int) -> int:
        """Return the least micro-batches in flight, over schedules, of a stage with ``left`` stages
        to the end."""
        names = self.request.schedules
        if "1f1b" in names:  # the least of all schedules with one stage per rank
            return half_pairs("1f1b", left, 2, count)[0][0]
        return min(half_pairs(name, left, 2, count)[0][0] for name in names)

    def solvers_on(self, rows: int, first: int, size: int) -> list[IntraOp]:
        """Return a solver for each allowed mesh on a submesh of ``size`` devices."""
        found = []
        inner = inner_size(self.cluster, first, size)
        proposed = self.mesh_proposals.meshes(size, inner, rows)
        for mesh in (*meshes(size, inner, self.request.forced), *proposed):
            if not self.request.features.allows_mesh(mesh, self.request.max_tp):
                continue
            has_rows = rows > 1 or bool(self.structure.graph.batch_dims)
            if has_rows and not self._can_split(rows, mesh.row_parts):
                continue
            found.append(self.solver(rows, mesh, first))
        return found

    def _can_split(self, rows: int, parts: int) -> bool:
        """Return whether a micro-batch splits evenly into parts, of the requested size if set."""
        size = self.request.microbatch_size
        return rows % parts == 0 and size in (None, rows // parts)

    def solver(self, rows: int, mesh: Mesh, first: int, *, link: Link | None = None) -> IntraOp:
        """Return the solver of stages on a mesh from device ``first`` on. Its stages receive values
        over ``link``, by default the link from the devices before. Cached."""
        return find(
            self._solver_at,
            (rows, mesh, first, link),
            lambda: self._solver(rows, mesh, first, link),
        )

    def _solver(self, rows: int, mesh: Mesh, first: int, link: Link | None) -> IntraOp:
        """Return the solver, which all meshes with equal prices and limits share."""
        ranks, request = tuple(range(first, first + mesh.size)), self.request
        prices = self._prices(rows, mesh, ranks)
        if link is None:
            link = self.cluster.entry_link(first, mesh.size)
        limits = self.limits_on(ranks)
        key = (rows, mesh, prices.groups, prices.speed, limits, link)
        if key not in self.solvers:
            limited = replace(
                restriction(mesh, request.forced),
                pins=self.pins,
                features=request.features,
            )
            model = StageModel(self.at(rows), prices, limited, link)
            self.solvers[key] = IntraOp(model, limits, self.budget)
        return self.solvers[key]

    def _prices(self, rows: int, mesh: Mesh, ranks: tuple[int, ...]) -> Prices:
        request, asked = self.request, self.basis.asked
        return Prices(
            mesh,
            self.cluster,
            ranks,
            request.precision,
            request.optimizer,
            self.rules,
            self.cache,
            profile=self.basis.used,
            asked=asked.of(self.num_microbatches(rows)) if asked is not None else None,
            assumptions=self.basis.assumptions,
            states=request.states,
        )

    def check_total_bytes(self) -> None:
        """Raise InfeasibleError AP301 if all devices together cannot hold the model."""
        if len({host.device.kind for host in self.cluster.hosts}) > 1:
            return  # these hold a state in different numbers of bytes
        rows, ranks = min(self.microbatch_rows), range(self.cluster.num_devices)
        runs = Runs(self.at(rows), self.classes, self.num_microbatches(rows))
        total = runs.least_bytes.total(self._prices(rows, ONE_DEVICE, (0,)))
        room = sum(self.limits_on((rank,)).memory_bytes for rank in ranks)
        if total > room:
            excess = (total - room) / len(ranks)
            raise does_not_fit(excess, self.limits, self.request, self.cluster)

    def limits_on(self, ranks: Sequence[int]) -> Limits:
        """Return a stage's limits: its devices' memory, unless the request limits the memory."""
        if self.request.memory_limit_bytes is not None:
            return self.limits
        device = self.cluster.slowest_device(ranks)
        return replace(self.limits, memory_bytes=float(device.usable_memory_bytes))

    def table(self, rows: int) -> Table:
        """Return a table of exact costs of every stage, computed on demand, for small clusters."""
        return Table(
            len(self.structure.blocks.blocks),
            self.cluster.num_devices,
            lambda first: submesh_sizes(self.cluster, first),
            _Exact(self.costs(rows)).matrix,
        )

    def is_late(self, share: float = 0.7) -> bool:
        """Return whether the fraction ``share`` of the time limit has passed."""
        return self.budget.left_seconds < (1 - share) * self.request.time_limit_seconds

    def is_long(self, began: float) -> bool:
        """Return whether the work done since ``began`` is much, and over a third of all work before
        ``began``."""
        spent = self.budget.work - began
        return spent > max(0.5 * LONG, (began - self.began_work) / 3)

    def spent(self) -> tuple[int, dict[str, float]]:
        """Return the number of solved problems, and the seconds by phase."""
        seconds = {**self.budget.seconds, "total": self.budget.elapsed_seconds}
        return self.budget.num_problems, seconds

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """End a ``with`` block upon Ctrl-C, record the interrupt, and continue after the block."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupt()

    @property
    def ended_by(self) -> str:
        """Return the cause of an early end of the search; "" if it was not ended early."""
        return self.stopped or ("its time limit" if self.budget.left_seconds <= 0 else "")

    def interrupt(self) -> None:
        """Record Ctrl-C, and leave little time for the remaining work."""
        self.stopped = INTERRUPTED
        self.budget.end_in(GRACE_SECONDS)

    @property
    def excess_bytes(self) -> list[float]:
        """Return, for each stage that did not fit, its bytes over the memory limit."""
        return [over for s in self.solvers.values() for over in s.excess_bytes.values()]

    def failure(self, *, is_proven: bool = False) -> AutoparallelError:
        """Return the error for a missing plan: no time, no memory (with the excess), or no mesh.

        ``is_proven``: bounds alone prove that nothing fits, so more time would not help.
        """
        excess = self.excess_bytes
        if not excess and is_proven and not self.ended_by:
            return UsageError(
                "AP127",
                "the requested dp/tp/pp degrees match no assignment of stages to this cluster",
                fix="other degrees, or fix fewer of them",
            )
        if not excess or (self.budget.left_seconds <= 0 and not is_proven):
            return TimeLimitError(
                "AP701", "no plan was found within the time limit", fix="a longer --time-limit"
            )
        return does_not_fit(min(excess), self.limits, self.request, self.cluster)


@dataclass
class _Exact:
    """Matrices of exact stage costs of a ``Table`` at one micro-batch size, made on demand."""

    costs: Costs
    made: dict[object, Floats] = field(default_factory=dict)

    def matrix(self, left: int, first: int, size: int) -> Floats:
        """Return t[k, i], seconds of a stage of blocks k to i − 1, ``left`` stages from the end."""
        is_first, is_last = first == 0, left == 1
        place = self.costs.place(first, size)
        held = self.costs.in_flight(left, is_first)
        key = (place, is_first, is_last, held)
        if key not in self.made:
            own, runs = self.costs.places[place], self.costs.runs
            numbers = runs.role(is_first, is_last)
            seconds = np.full(len(runs.classes.firsts) + 1, np.inf)
            for number in numbers.tolist():
                own.price(number, held, is_first, is_last)
                seconds[number] = own.exact[held].objective[number]
            size = runs.classes.num_blocks
            rows = slice(0, 1) if is_first else slice(1, size)
            stops = slice(size, size + 1) if is_last else slice(1, size)
            cost = np.full((size + 1, size + 1), np.inf)
            cost[rows, stops] = seconds[runs.classes.numbers[rows, stops]]
            self.made[key] = cost
        return self.made[key]


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


def does_not_fit(
    excess: float, limits: Limits, request: Request, cluster: Cluster
) -> InfeasibleError:
    """Return error AP301: even the plan nearest to fitting needs ``excess`` bytes too many."""
    limit = limits.memory_bytes
    tries = []
    if limits.recompute == "none":
        tries.append("recompute=full")
    if max(limits.zeros) < 3 and cluster.num_devices > 1:
        tries.append("zero=3")
    if request.microbatch_size is not None and request.microbatch_size > 1:
        tries.append("a smaller micro-batch")
    devices = -(-int(cluster.num_devices * (limit + excess)) // int(limit)) + 1
    tries.append(f"about {devices} devices")
    return InfeasibleError(
        "AP301",
        "the model does not fit"
        + (
            f": the nearest plan is about {excess / 2**30:.3g} GiB over the limit"
            if excess > 0
            else ""
        ),
        why=f"each device has {limit / 2**30:.3g} GiB",
        fix=" or ".join(tries),
    )


@dataclass
class GraphTables:
    """Cost tables of a graph in one number format. ``graphs``: structures by micro-batch size."""

    structure: Structure
    graphs: dict[int, Structure] = field(default_factory=dict)
    cache: PriceCache = field(default_factory=PriceCache)

    @staticmethod
    def of(graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        return GraphTables(Structure(with_precision(graph, precision), blocks))


@dataclass
class SharedTables:
    """Cost tables of all graphs searched so far, keyed by the identity of the graphs."""

    _known: dict[tuple[int, int, Precision], tuple[Graph, Blocks, GraphTables]] = field(
        default_factory=dict
    )

    def of(self, graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        key = (id(graph), id(blocks), precision)
        if key not in self._known:  # graph and blocks live as long as their ids are used
            self._known[key] = graph, blocks, GraphTables.of(graph, blocks, precision)
        return self._known[key][2]
