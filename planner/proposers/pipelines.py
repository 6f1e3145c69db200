"""Pipelines of one stage per rank, by best-first search with dynamic programming.

A node of the search is a micro-batch size with a tiling of the devices
(``search.branch_and_bound``). Nodes with stages of one size come first, so that there is a plan
soon; then nodes of mixed sizes. The most promising node is expanded first; its stages are priced
lazily. Each pipeline found is simulated under every schedule that the request allows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..inter_op.branches_search import branch_pipelines
from ..requests.request import MOST_CHUNKS
from ..search.bound import unequal_bound, work_bound
from ..search.branch_and_bound import MOST_CUTS, TOLERANCE, PipelineProposal, SearchNode, best_first
from ..search.candidates import Candidate
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..search.space import mixed_tiling, uniform_tiling
from ..stage.branches import find_sections

NUM_GROUPS = 2
"""Number of groups of micro-batch sizes, each searched without knowledge of the others. A
pipeline's 1F1B time ends the search of others in its group, although interleaving might make these
faster: with one group Llama-3-405B on 16,384 devices gets a plan that is 11 % slower."""

NEAR = 1.05
"""Ratio to the best step time up to which proposals of further groups are added to the pool."""

SOON = 800
"""Work (``Budget.work``) after which the nodes known so far are searched for a first plan."""


def dynamic_program(
    context: SearchContext, pool: CandidatePool, num_groups: int = NUM_GROUPS
) -> Iterator[Candidate]:
    """Yield the best pipelines at every micro-batch size, first with stages of equal size.

    The micro-batch sizes are dealt into groups, a single one if queries of times are recorded. The
    first group fills ``pool``, every further one a pool of its own.
    """
    sizes = context.microbatch_rows
    number = min(num_groups, len(sizes)) if context.basis.asked is None else 1
    pools = [pool, *(CandidatePool(context) for _ in range(number - 1))]
    for at, own in enumerate(pools):
        pool.is_open |= _Exploration(context, own, sizes[at::number]).run()
    for other in pools[1:]:
        for seconds, proposal in _fastest_first(other):
            if seconds < pool.step_seconds * NEAR:
                yield from pool.simulate(proposal)


def _fastest_first(pool: CandidatePool) -> list[tuple[float, PipelineProposal]]:
    """Return (least step seconds, pipeline) of each pipeline in the pool that fits, fastest
    first."""
    found = []
    for proposal in pool.proposals:
        steps = [
            each.step_seconds for each in pool.known if (each.rows, each.stages) == proposal.key
        ]
        if steps:
            found.append((min(steps), proposal))
    return sorted(found, key=lambda entry: entry[0])


class _Exploration:
    """Search over some of the micro-batch sizes. Candidates enter the pool at once, as their step
    times decide which search nodes are expanded next."""

    def __init__(self, context: SearchContext, pool: CandidatePool, sizes: tuple[int, ...]) -> None:
        self.context, self.pool, self.sizes = context, pool, sizes
        self.began = context.budget.work
        self._works: dict[int, float] = {}

    def run(self) -> bool:
        """Expand search nodes with stages of one size, then nodes with stages of mixed sizes.

        Return whether some plans were not tried, so that a longer search might find one that fits.
        """
        context, nodes = self.context, list[SearchNode]()
        for index, rows in enumerate(self.sizes):
            if self.pool.proposals and context.budget.is_late(0.5):
                break
            context.budget.observe(f"micro-batches of {rows} rows", index, len(self.sizes))
            uniform = list(self._uniform(rows))
            for node in uniform:  # find a first plan soon, for Ctrl-C
                if self.pool.proposals:
                    break
                self._follow([node], until_first=True)
            nodes += uniform
        self._follow(nodes)
        began = context.budget.work
        mixed = self._looked(self._mixed())
        self._follow(mixed, began=began)
        nodes += mixed
        return any(node.estimate < float("inf") for node in nodes) or (
            any(node.num_blocks > MOST_CUTS for node in nodes)  # not every cut was tried
        )

    def _uniform(self, rows: int) -> Iterator[SearchNode]:
        """Yield search nodes with stages of equal size, unless their lower bound exceeds the
        cutoff.

        With S stages on D/S devices each, some stage takes at least W/D of a micro-batch's work W
        (seconds on one device), and all together take S·W/D: N micro-batches take at least (N + S −
        1)·W/D.
        """
        costs, count = self.context.solvers.costs(rows), self.context.num_microbatches(rows)
        work = self._work(rows) / count
        chunks = MOST_CHUNKS if self.context.request.chunked_schedules else 1
        for number in self.context.stage_numbers:
            if work * (count + (number - 1) / chunks) >= self.pool.cutoff:
                continue  # on several stages per rank, too
            tiling = uniform_tiling(self.context.cluster, number, costs.place)
            if tiling is not None:
                least = work * (count + number - 1) * (1 - TOLERANCE)
                yield SearchNode(rows, costs, tiling, (number,), least)

    def _work(self, rows: int) -> float:
        """Return ``work_bound`` (a bound from FLOPs and bytes) of a micro-batch size. Cached."""
        if rows not in self._works:
            self._works[rows] = work_bound(self.context, (rows,))
        return self._works[rows]

    def _mixed(self) -> Iterator[SearchNode]:
        """Yield search nodes of stages of mixed sizes, best micro-batch sizes so far first."""
        context, pool, budget = self.context, self.pool, self.context.budget
        order = dict.fromkeys(
            [proposal.rows for proposal in pool.best_proposals()] + list(self.sizes)
        )
        allowed = context.request.features.allows("mixed-stages")
        several = tuple(number for number in context.stage_numbers if number > 1 and allowed)
        began = budget.work
        for rows in order:
            if several and not (pool.proposals and (budget.is_late(0.6) or budget.is_long(began))):
                costs = context.solvers.costs(rows)
                tiling = mixed_tiling(context.cluster, several[-1], costs.place)
                cutoff = pool.cutoff
                if cutoff == float("inf") or unequal_bound(context, rows, tiling) < cutoff:
                    yield SearchNode(rows, costs, tiling, several)

    def _looked(self, nodes: Iterator[SearchNode]) -> list[SearchNode]:
        """Estimate the nodes; return the ones that can still beat the fastest candidate.

        If estimating takes long, the nodes so far are expanded until there is a first plan.
        """
        open_nodes: list[SearchNode] = []
        for node in nodes:
            with self.context.budget.timed("dp"):
                node.look(self.pool.cutoff)
            if node.estimate < float("inf"):
                open_nodes.append(node)
            if not self.pool.proposals and self.context.budget.work - self.began > SOON:
                self._follow(open_nodes, until_first=True)
        return open_nodes

    def _follow(
        self, nodes: list[SearchNode], *, until_first: bool = False, began: float | None = None
    ) -> None:
        """Expand search nodes, most promising first; stop after long work since ``began``."""
        budget, pool = self.context.budget, self.pool

        def enough(estimate: float, found: list[PipelineProposal]) -> bool:
            if estimate == float("inf") or (found and until_first):
                return True
            if pool.proposals and (budget.is_late(0.7) or (began and budget.is_long(began))):
                return True
            return estimate >= pool.cutoff or budget.left_seconds <= 0

        with budget.timed("dp"):
            for proposal in best_first(nodes, enough):
                pool.add_all(pool.simulate(proposal))


def placed_pipelines(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield the pipelines of the request's placer, which replaces the dynamic program.

    Each micro-batch size has an equal share of the remaining time.
    """
    placer, sizes = context.request.placer, context.microbatch_rows
    assert placer is not None, "this proposer is only used where there is one"
    pool.is_open = True
    for index, rows in enumerate(sizes):
        share = 0.8 * max(context.budget.left_seconds, 0.0) / (len(sizes) - index)
        context.budget.observe(f"learning to place micro-batches of {rows} rows", index, len(sizes))
        with context.budget.timed("learning"):
            found = placer(
                context.solvers.table(rows),
                context.num_microbatches(rows),
                context.stage_numbers,
                time_limit_seconds=share,
            )
        for pipeline in found:
            yield from pool.simulate(PipelineProposal(rows, pipeline))


def parallel_branches(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield pipelines whose parallel branches run on separate devices."""
    if not context.request.features.allows("branches"):
        return
    for section in find_sections(context.structure):
        for rows in context.microbatch_rows:
            if context.budget.is_late(0.7):
                return
            for pipeline in branch_pipelines(
                context.solvers.table(rows), section, context.num_microbatches(rows)
            ):
                if len(pipeline.stages) in context.stage_numbers:
                    yield from pool.simulate(PipelineProposal(rows, pipeline))
