"""Plans of one stage in which unlike devices take unequal shares of the batch.

In: a search context for a cluster whose devices differ. Out: for each micro-batch size and mesh
with an axis "dp" the best candidate, and a lower bound of such plans.

A coordinate of "dp" is priced on its own device, with the graph that it runs (``shares``). For each
common setting (layouts, ZeRO stage, recomputed blocks) the best shares are searched, within every
device's own memory; blocks are recomputed only if memory limits the shares. The lower bound divides
the rows by each device's bound from the stage solver, over all layouts, ZeRO stages and memory
limits: a stage waits for its slowest device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..graph.layout import Mesh
from ..inter_op.heterogeneous import inner_size
from ..inter_op.inter_op import StageChoice
from ..inter_op.submesh import meshes
from ..intra_op.intra_op import IntraOp, StageAnswer
from ..schedules.schedules import can_have
from ..search.candidates import Candidate, build_simulated, reindex_solution
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..search.report_plan import stage_layouts
from ..stage.recompute_policy import (
    NO_RECOMPUTE,
    RecomputePolicy,
    policies,
    recomputing,
    uniform_policy,
)
from ..stage.stage_cost import StageCost, StageTable
from ..stage.stage_model import StageModel
from ..stage.stage_problem import Solution, StageOptions, StageProblem
from ..stage.structure import Run
from ..variants.shares import best_shares, coordinate_ranks, slowest_cost, why_not

MOST_POLICIES = 40
"""Maximum recomputation policies to try; with more, all blocks of a policy are treated alike."""

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class SharedAnswer(StageAnswer):
    """Solution of a stage with unequal shares of the batch. ``taken``: rows of a micro-batch for
    each index along the mesh axis "dp"; ``joint``: the stage's cost, in which the slowest share
    counts."""

    joint: StageCost
    taken: tuple[int, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        return self.taken

    @property
    def cost(self) -> StageCost:
        return self.joint


def uneven_shares(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield the best candidate with unequal batch shares for each micro-batch size and mesh; set
    the lower bound ``context.known.shared_bound``."""
    least = float("inf")
    for candidate, bound in shared_candidates(context, context.microbatch_rows):
        least = min(least, bound)
        if candidate is not None:
            yield candidate
    context.known.shared_bound = least


def shared_candidates(
    context: SearchContext, rows: Sequence[int]
) -> Iterator[tuple[Candidate | None, float]]:
    """Yield (best candidate or None, lower bound) for each micro-batch size and mesh."""
    request, size = context.request, context.cluster.num_devices
    allowed = request.features.allows("uneven-shares") and 1 in context.stage_numbers
    more = max(request.forced.cp or 1, request.forced.ep or 1)
    if not allowed or more > 1 or context.basis.asked is not None:
        return
    if why_not(context.structure.graph, (), lambda name: None):
        return
    for mesh in meshes(size, inner_size(context.cluster, 0, size), request.forced):
        if mesh.axes[0] != "dp" or not request.features.allows_mesh(mesh, request.max_tp):
            continue
        for each in rows:
            shared = _Shared(context, mesh, each)
            if each >= mesh.shape[0] and len(set(shared.devices)) > 1:
                if context.budget.left_seconds <= 0:
                    yield None, 0.0
                    return
                yield shared.best(), shared.bound_seconds()


@dataclass
class _Shared:
    """Search for unequal batch shares on one mesh over the whole cluster, at one micro-batch size.
    A coordinate is an index along the mesh axis "dp": its ranks have one share."""

    context: SearchContext
    mesh: Mesh
    rows: int
    _solvers: dict[tuple[int, int], IntraOp] = field(default_factory=dict)
    _tables: dict[tuple[int, int], StageTable | None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.context.num_microbatches(self.rows)

    @property
    def parts(self) -> int:
        return self.mesh.shape[0]

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        every = tuple(range(self.mesh.size))
        return tuple(coordinate_ranks(every, self.parts, each) for each in range(self.parts))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Return, for each coordinate, the first coordinate that has equal devices."""
        cluster = self.context.cluster
        own = [cluster.slowest_device(ranks) for ranks in self.ranks]
        return tuple(own.index(device) for device in own)

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Return the memory limit in bytes of the devices at each coordinate of mesh axis 0."""
        return tuple(self.context.limits_on(ranks).memory_bytes for ranks in self.ranks)

    @property
    def blocks(self) -> tuple[int, int]:
        return 0, len(self.context.structure.blocks.blocks)

    def run(self, coordinate: int, rows: int) -> Run:
        return self.solver(coordinate, rows).model.structure.run(*self.blocks)

    def solver(self, coordinate: int, rows: int) -> IntraOp:
        """Return a solver for a coordinate that takes ``rows`` rows, without a memory limit."""
        key = self.devices[coordinate], rows
        if key not in self._solvers:
            context, every = self.context, tuple(range(self.mesh.size))
            prices = context.prices(self.rows, self.mesh, every, own=self.ranks[key[0]])
            link, limited = context.cluster.link(0, 0), context.restriction(self.mesh)
            model = StageModel(context.tables.at(rows * self.parts), prices, limited, link)
            limits = replace(context.limits, memory_bytes=INFINITE)
            self._solvers[key] = IntraOp(model, limits, context.budget)
        return self._solvers[key]

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Return the rows per second of each coordinate if all take equally many rows."""
        even = max(1, self.rows // self.parts)
        found = [self._bound(each, even) for each in range(self.parts)]
        return tuple(1 / max(seconds, 1e-30) for seconds in found)

    def _bound(self, coordinate: int, rows: int) -> float:
        return self.solver(coordinate, rows).bound_seconds(self.run(coordinate, rows), self.count)

    def bound_seconds(self) -> float:
        """Return a lower bound over all shares, layouts, ZeRO stages and recomputation."""
        shares = best_shares(self.rows, self.speeds, self._bound)
        assert shares is not None, "a bound has no memory limit"
        return self.count * max(self._bound(each, rows) for each, rows in enumerate(shares))

    def best(self) -> Candidate | None:
        """Return the fastest candidate; None if unequal shares are impossible or do not fit."""
        base = self.solver(0, max(1, self.rows // self.parts))
        run = base.model.structure.run(*self.blocks)
        found: list[SharedAnswer] = []
        if base.best(run, self.count, 1) is None:
            return None
        for entry in list(base.pools[run.family].entries.values()):
            self._tables.clear()
            start = StageAnswer(
                run, entry.table, entry.solution, StageOptions(self.count), 0.0, 1.0
            )
            if self._is_possible(base.model, start):
                found += self._of_solution(start)
        if not found:
            return None
        best = min(found, key=lambda answer: (answer.objective, answer.cost.total_bytes))
        choice = StageChoice(*self.blocks, 0, self.mesh.size)
        schedule = self.context.request.schedules[0]
        if not can_have(schedule, 1, self.count, 1):
            return None
        return build_simulated(self.context, self.rows, schedule, (choice,), [(base.model, best)])

    def _is_possible(self, model: StageModel, answer: StageAnswer) -> bool:
        graph, own = model.structure.graph, model.structure.blocks
        layouts = stage_layouts(model.structure, model, answer, self.blocks)
        names = [node.name for node in graph if node.kind in ("op", "input")]
        return not why_not(graph, names, lambda name: own.entry(layouts, name))

    def _of_solution(self, start: StageAnswer) -> Iterator[SharedAnswer]:
        """Yield the best shares under the layouts of ``start``, by ZeRO stage, with more and more
        recomputation until memory no longer limits the shares."""
        base = self.solver(0, max(1, self.rows // self.parts))
        for zero in base.zeros:
            free: float | None = None
            for policy in self._policies(start.run):
                setting = replace(start.setting, zero=zero, policy=policy)
                found = self._answer(start, setting, self.limits)
                if free is None:
                    least = self._answer(start, setting, (INFINITE,) * self.parts)
                    free = INFINITE if least is None else least.objective
                if found is not None:
                    yield found
                    if found.objective <= free:
                        break

    def _policies(self, run: Run) -> Iterator[RecomputePolicy]:
        """Yield the recomputation policies to try, first the policy without recomputation."""
        request = self.context.request
        modes = (
            self.context.limits.modes if request.recompute is None else (request.recompute, "none")
        )
        listed = policies(*run.class_counts, recomputing(None, modes))
        sizes, allowed = run.class_counts[0], listed.within(modes)
        many = int(allowed.sum()) > MOST_POLICIES
        for number, allows in enumerate(allowed.tolist()):
            policy = listed[number]
            is_whole = sizes in policy or not policy.num_blocks
            if not allows or (many and not is_whole):
                continue
            forced = request.recompute or "none"
            if forced != "none" and policy != uniform_policy(forced, sizes):
                continue
            yield policy if policy.num_blocks else NO_RECOMPUTE

    def _answer(
        self, start: StageAnswer, setting: StageOptions, limits: Sequence[float]
    ) -> SharedAnswer | None:
        """Return the solution with the best shares under ``setting``; None if nothing fits."""
        costs: dict[tuple[int, int], StageCost | None] = {}

        def cost(coordinate: int, rows: int) -> StageCost | None:
            key = self.devices[coordinate], rows
            if key not in costs:
                table = self._priced(key[0], rows, start.solution)
                run = self.run(key[0], rows)
                costs[key] = None if table is None else table.price(run, setting)
            return costs[key]

        def seconds(coordinate: int, rows: int) -> float:
            own = cost(coordinate, rows)
            if own is None or own.total_bytes > limits[coordinate]:
                return INFINITE
            return own.forward_seconds + own.backward_seconds

        shares = best_shares(self.rows, self.speeds, seconds)
        if shares is None:
            return None
        every = [own for at, rows in enumerate(shares) if (own := cost(at, rows)) is not None]
        joint = slowest_cost(every)
        micro = joint.forward_seconds + joint.backward_seconds
        objective = micro + joint.step_seconds / self.count
        return SharedAnswer(
            start.run, start.table, start.solution, setting, objective, start.gap, joint, shares
        )

    def _priced(self, coordinate: int, rows: int, solution: Solution) -> StageTable | None:
        """Return a solution's costs on a coordinate; None if a layout is impossible there."""
        key = coordinate, rows
        if key not in self._tables:
            base = self.solver(0, max(1, self.rows // self.parts)).model
            model = self.solver(coordinate, rows).model
            self._tables[key] = None
            own = reindex_solution(base, model, solution)
            if own is not None:
                problem = StageProblem(model, self.run(coordinate, rows))
                self._tables[key] = StageTable(problem, problem.choices(own))
        return self._tables[key]
