"""The search: from a graph and a cluster to a plan.

In: the graph, its blocks, a cluster, a request. Out: the plan, with the candidates that
lost. Micro-batch sizes are the outer loop; for each, stage costs come from the integer
programs (``intra_op``), pipelines from the dynamic program (``inter_op``). Of the best
``4 top`` of those, the ``top`` that simulate fastest are solved again with every ZeRO stage
and recompute level for themselves and simulated under every schedule that is allowed; the
fastest simulated one wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..cost_model.cluster import Cluster
from . import rules as default_rules
from .asked import Asked, uses_of
from .basis import DEFAULT, Basis
from .errors import TimeLimitError
from .graph import Blocks, Graph
from .inter_op import Floats, Pipeline, StageChoice, Table, pipelines
from .intra_op import Effort, IntraOp, Limits, StageAnswer
from .layout import Mesh
from .options import check_degrees, microbatch_rows, stage_numbers
from .plan import Plan
from .prices import Prices, Rules, with_precision
from .refusals import check_measured, does_not_fit
from .report_plan import Candidate, make_plan
from .request import Request
from .schedules import SCHEDULES
from .sources import with_sources
from .stage_model import StageModel
from .step import simulate_stages
from .structure import Run, Structure
from .submesh import meshes, restriction, submesh_sizes

Observe = Callable[[str, float, float], None]
"""(what is being done, how much is done, of how much)."""

BOUND_TOLERANCE = 1e-3
"""Stage-cost bounds of the dynamic program closer than this factor count as one."""

WORTH_IT = 0.005
"""The least gain for which a plan may use the axis "dp" for more than the batch."""


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
    """The fastest plan found that fits.

    Raises ``UsageError`` for a request that cannot be met (AP170 where times must be measured
    and are not), ``InfeasibleError`` (AP301) if nothing fits in memory, ``TimeLimitError``
    (AP701) if nothing was found in time.
    """
    if basis.mode == "measured":
        basis = replace(basis, asked=Asked(uses_of(blocks)))
    search, candidates = ranked(
        graph, blocks, cluster, request, observe=observe, rules=rules, basis=basis
    )
    if basis.mode == "measured":
        check_measured(basis, request)
    found = make_plan(
        search.structure, cluster, request, candidates[0], candidates[1:], search.spent()
    )
    return with_sources(found, graph, blocks, basis=basis, rules=rules)


def ranked(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe | None = None,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> tuple[_Search, list[Candidate]]:
    """The search and what it found: the winner, then those that lost. Raises as ``plan``."""
    check_degrees(request.forced, cluster)
    search = _Search.of(graph, blocks, cluster, request, rules=rules, basis=basis)
    rows = microbatch_rows(graph, request, cluster)
    numbers = stage_numbers(request, cluster, len(blocks.blocks))
    drafts: list[_Draft] = []
    for index, each in enumerate(rows):
        if drafts and search.effort.left_seconds < 0.4 * request.time_limit_seconds:
            break
        if observe is not None:
            observe(f"micro-batches of {each} rows", index, len(rows))
        drafts += search.drafts(each, numbers)
    if not drafts:
        raise search.failure()
    drafts.sort(key=lambda draft: draft.seconds)
    if observe is not None:
        observe("refining the best", len(rows), len(rows))
    drawn = [(search.candidate(draft), draft) for draft in drafts[: 4 * request.top]]
    drawn.sort(key=lambda pair: pair[0].step_seconds)
    candidates = [c for _, draft in drawn[: request.top] for c in search.refined(draft)]
    candidates.sort(key=lambda each: (float(f"{each.step_seconds:.6g}"), each.peak_bytes))
    best = search.freed(candidates[0])
    losers = [c for c in candidates if c is not candidates[0]]
    losers += [candidate for candidate, _ in drawn[request.top :]]
    return search, [best, *losers]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A pipeline of the dynamic program for one micro-batch size, and T."""

    rows: int
    pipeline: Pipeline

    @property
    def seconds(self) -> float:
        return self.pipeline.seconds


@dataclass
class _Search:
    structure: Structure
    cluster: Cluster
    request: Request
    rules: Rules
    limits: Limits
    effort: Effort
    began: float
    basis: Basis = DEFAULT
    cache: dict[Any, Any] = field(default_factory=dict)
    graphs: dict[int, Structure] = field(default_factory=dict)
    solvers: dict[object, IntraOp] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(
        graph: Graph,
        blocks: Blocks,
        cluster: Cluster,
        request: Request,
        *,
        rules: Rules,
        basis: Basis,
    ) -> _Search:
        limit = request.memory_limit_bytes
        if limit is None:
            limit = min(host.device.usable_memory_bytes for host in cluster.hosts)
        now = time.perf_counter()
        forced = request.forced
        return _Search(
            Structure(with_precision(graph, request.precision), blocks),
            cluster,
            request,
            rules,
            Limits(float(limit), forced.zero, forced.recompute),
            Effort(now + request.time_limit_seconds),
            now,
            basis,
        )

    def at(self, rows: int) -> Structure:
        """The graph for micro-batches of so many rows."""
        if rows not in self.graphs:
            graph = self.structure.graph.with_batch_size(rows)
            self.graphs[rows] = replace(self.structure, graph=graph)
        return self.graphs[rows]

    def num_microbatches(self, rows: int) -> int:
        return self.request.global_batch // rows

    @property
    def in_flight_schedule(self) -> str:
        """The schedule whose memory the dynamic program counts with: the thriftiest allowed."""
        return self.request.forced.schedule or "1f1b"

    def drafts(self, rows: int, numbers: tuple[int, ...]) -> list[_Draft]:
        """The best pipeline of each number of stages at one micro-batch size."""
        began, solving = time.perf_counter(), self.effort.seconds + self.effort.table_seconds
        table = Table(
            len(self.structure.blocks.blocks),
            self.cluster.num_devices,
            lambda first: submesh_sizes(self.cluster, first),
            _Costs(self, rows).matrix,
        )
        count = self.num_microbatches(rows)
        found = [
            _Draft(rows, pipeline)
            for pipeline in pipelines(table, count, numbers, tolerance=BOUND_TOLERANCE)
        ]
        solved = self.effort.seconds + self.effort.table_seconds - solving
        self._took("dp", time.perf_counter() - began - solved)
        return found

    def _took(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def solvers_on(self, rows: int, first: int, size: int, *, free: bool = False) -> list[IntraOp]:
        """A solver for each mesh on the submesh."""
        host_size = min(host.num_devices for host in self.cluster.hosts)
        forced = self.request.forced
        found = []
        for mesh in meshes(size, host_size, forced):
            if mesh.axes[0] == "dp" and self.structure.graph.batch_dims and rows % mesh.shape[0]:
                continue
            found.append(self._solver(rows, mesh, first, free=free))
        return found

    def _solver(self, rows: int, mesh: Mesh, first: int, *, free: bool) -> IntraOp:
        ranks = tuple(range(first, first + mesh.size))
        request = self.request
        asked = self.basis.asked
        prices = Prices(
            mesh, self.cluster, ranks, request.precision, request.optimizer, self.rules, self.cache,
            profile=self.basis.used,
            asked=asked.of(self.num_microbatches(rows)) if asked is not None else None,
        )  # fmt: skip
        link = self.cluster.link(max(first - 1, 0), first)
        key = (rows, mesh, prices.groups, prices.device.name, link, free)
        if key not in self.solvers:
            limited = restriction(mesh, request.forced, free=free)
            model = StageModel(self.at(rows), prices, limited, link)
            self.solvers[key] = IntraOp(model, self.limits, self.effort)
        return self.solvers[key]

    def stage(self, rows: int, choice: StageChoice, in_flight: int) -> tuple[IntraOp, StageAnswer]:
        """The best mesh of a stage of a pipeline, and its answer."""
        run = self.structure.run(choice.start, choice.stop)
        count = self.num_microbatches(rows)
        answers = [
            (solver, answer)
            for solver in self.solvers_on(rows, choice.first_device, choice.num_devices)
            if (answer := solver.best(run, count, in_flight)) is not None
        ]
        return min(answers, key=lambda pair: pair[1].objective)

    def in_flight(self, schedule: str, num_stages: int, rows: int, stage: int) -> int:
        if num_stages == 1:
            return 1
        return SCHEDULES[schedule].in_flight(num_stages, self.num_microbatches(rows), stage)

    def candidate(self, draft: _Draft, schedule: str | None = None) -> Candidate:
        """A draft with its stages, as the dynamic program saw it or under a schedule."""
        return self._candidate(draft, schedule or self.in_flight_schedule, refine=False)

    def refined(self, draft: _Draft) -> list[Candidate]:
        """The draft under every schedule that is allowed and fits, simulated."""
        forced = self.request.forced.schedule
        names = ("1f1b", "gpipe") if len(draft.pipeline.stages) > 1 else ("1f1b",)
        found = []
        for name in (forced,) if forced is not None else names:
            try:
                found.append(self._candidate(draft, name, refine=True))
            except ValueError:
                continue
        return found

    def _candidate(self, draft: _Draft, schedule: str, *, refine: bool) -> Candidate:
        stages, rows = draft.pipeline.stages, draft.rows
        chosen = []
        for index, choice in enumerate(stages):
            in_flight = self.in_flight(schedule, len(stages), rows, index)
            if refine:
                run = self.structure.run(choice.start, choice.stop)
                solver, _ = self.stage(rows, choice, in_flight)
                solver.refine(run, self.num_microbatches(rows), in_flight)
            chosen.append(self.stage(rows, choice, in_flight))
        return self._simulated(rows, schedule, stages, chosen)

    def _simulated(
        self,
        rows: int,
        schedule: str,
        stages: tuple[StageChoice, ...],
        chosen: list[tuple[IntraOp, StageAnswer]],
    ) -> Candidate:
        began = time.perf_counter()
        costs = [answer.cost for _, answer in chosen]
        count = self.num_microbatches(rows)
        timeline = simulate_stages(schedule, count, costs)
        self._took("simulator", time.perf_counter() - began)
        return Candidate(
            rows,
            count,
            schedule,
            stages,
            tuple((solver.model, answer) for solver, answer in chosen),
            timeline.step_seconds,
            timeline.bubble_fraction,
            max(cost.total_bytes for cost in costs),
        )

    def freed(self, best: Candidate) -> Candidate:
        """The winner with the meshes' axes left to the solver, if that is faster by enough."""
        if self.effort.left_seconds < 0.3 * self.request.time_limit_seconds:
            return best
        chosen = []
        for index, (choice, (model, answer)) in enumerate(
            zip(best.stages, best.answers, strict=True)
        ):
            mesh = model.prices.mesh
            solver = self._solver(best.rows, mesh, choice.first_device, free=True)
            run = self.structure.run(choice.start, choice.stop)
            in_flight = self.in_flight(best.schedule, len(best.stages), best.rows, index)
            free = solver.best(run, best.num_microbatches, in_flight)
            if free is None or free.objective >= answer.objective * (1 - 1e-9):
                found = self._solver(best.rows, mesh, choice.first_device, free=False)
                chosen.append((found, answer))
            else:
                chosen.append((solver, free))
        other = self._simulated(best.rows, best.schedule, best.stages, chosen)
        return other if other.step_seconds < best.step_seconds * (1 - WORTH_IT) else best

    def spent(self) -> tuple[int, dict[str, float]]:
        """How many programs were solved, and seconds by phase."""
        seconds = {
            "costs": self.effort.table_seconds, "ilp": self.effort.seconds, **self.seconds
        }  # fmt: skip
        seconds["total"] = time.perf_counter() - self.began
        return self.effort.num_problems, seconds

    def failure(self) -> Exception:
        """Why there is no plan: no time, or no memory and by how much."""
        excess = [over for s in self.solvers.values() for over in s.excess_bytes.values()]
        if self.effort.left_seconds <= 0 or not excess:
            return TimeLimitError(
                "AP701", "no plan was found within the time limit", fix="a longer --time-limit"
            )
        return does_not_fit(min(excess), self.limits, self.request, self.cluster)


@dataclass
class _Costs:
    """The matrices of the dynamic program at one micro-batch size."""

    search: _Search
    rows: int
    made: dict[object, Floats] = field(default_factory=dict)

    def matrix(self, left: int, first: int, size: int) -> Floats:
        """t[k, i] of the stages with ``left`` stages to come, itself included."""
        search = self.search
        num_blocks = len(search.structure.blocks.blocks)
        is_first, is_last = first == 0, left == 1
        count = search.num_microbatches(self.rows)
        in_flight = (
            1
            if is_first and is_last
            else SCHEDULES[search.in_flight_schedule].in_flight(left, count, 0)
        )
        solvers = search.solvers_on(self.rows, first, size)
        key = (is_first, is_last, in_flight, tuple(id(solver) for solver in solvers))
        if key not in self.made:
            starts = range(1) if is_first else range(1, num_blocks)
            stops = range(num_blocks, num_blocks + 1) if is_last else range(1, num_blocks)
            runs = {(k, i): search.structure.run(k, i) for k in starts for i in stops if k < i}
            self.made[key] = self._matrix(runs, solvers, count, in_flight)
        return self.made[key]

    def _matrix(
        self,
        runs: dict[tuple[int, int], Run],
        solvers: list[IntraOp],
        count: int,
        in_flight: int,
    ) -> Floats:
        families: dict[int, dict[int, Run]] = {}
        for run in runs.values():
            families.setdefault(run.family, {})[run.key] = run
        num_blocks = len(self.search.structure.blocks.blocks)
        cost = np.full((num_blocks + 1, num_blocks + 1), np.inf)
        for solver in solvers:
            for family in families.values():
                ordered = sorted(family.values(), key=lambda run: run.num_blocks)
                solver.prepare(ordered, count)
            for (k, i), run in sorted(runs.items(), key=lambda item: item[1].num_blocks):
                answer = solver.best(run, count, in_flight)
                if answer is not None:
                    cost[k, i] = min(cost[k, i], answer.objective)
        return cost
