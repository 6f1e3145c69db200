"""Pipelines of one stage per rank, by dynamic programming, best-first.

A node of the search is a micro-batch size with a tiling of the devices (``search.quests``). Nodes
with stages of one size come first, so that there soon is a plan; then those that mix sizes. The
most promising node is followed first, its stages priced no further than needed. Each pipeline
that is found is simulated under every schedule that the request allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..inter_op.branches_search import branch_pipelines
from ..pricing.branches import sections
from ..pricing.step import KnownSteps
from ..requests.request import MOST_CHUNKS
from ..search.bound import work_bound
from ..search.candidates import Candidate
from ..search.job import Job
from ..search.pool import CandidatePool
from ..search.quests import MOST_CUTS, TOLERANCE, Draft, Quest, drafts
from ..search.space import mixed_tiling, uniform_tiling

NEAR = 1.05
"""Drafts of another part that are within this factor of the best are taken in."""

SOON = 800
"""The work after which a first plan is made of what is known."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What the search of some micro-batch sizes found: drafts with their steps, the fastest first.

    ``steps`` are those that were simulated. ``is_open``: something may yet fit; ``excess_bytes``
    by how much the rest does not.
    """

    drafts: tuple[tuple[float, Draft], ...]
    steps: KnownSteps
    is_open: bool
    excess_bytes: list[float]


def dynamic_program(job: Job, pool: CandidatePool) -> Iterator[Candidate]:
    """The best pipelines of every micro-batch size, stages of one size first, then of any."""

    def first(sizes: tuple[int, ...]) -> Explored:
        return _explored(job, pool, sizes)

    for number, found in enumerate(job.workers.map(explored, first=first)):
        pool.is_open |= found.is_open
        if number:  # the first part filled this pool
            job.beyond += found.excess_bytes
            job.steps.update(found.steps)
            for seconds, draft in found.drafts:
                if seconds < pool.step_seconds * NEAR:
                    yield from pool.simulate(draft)


def explored(job: Job, sizes: tuple[int, ...]) -> Explored:
    """What the search of some micro-batch sizes found, here or in another process."""
    return _explored(job, CandidatePool(job), sizes)


def _explored(job: Job, pool: CandidatePool, sizes: tuple[int, ...]) -> Explored:
    exploration = _Exploration(job, pool, sizes)
    exploration.run()
    least: dict[Draft, float] = {}
    for draft in pool.drafts:
        steps = [each.step_seconds for each in pool.known if (each.rows, each.stages) == draft.key]
        if steps:
            least[draft] = min(steps)
    ordered = sorted(least.items(), key=lambda entry: entry[1])
    found = tuple((seconds, draft) for draft, seconds in ordered)
    return Explored(found, job.steps, exploration.is_open, job.excess_bytes)


class _Exploration:
    """The search of some micro-batch sizes; candidates go into the pool as they are found, as
    what was found says which nodes are worth following."""

    def __init__(self, job: Job, pool: CandidatePool, sizes: tuple[int, ...]) -> None:
        self.job, self.pool, self.sizes = job, pool, sizes
        self.began = job.effort.work
        self.is_open = False
        self._works: dict[int, float] = {}

    def run(self) -> None:
        """Follows nodes with stages of one size, then of any."""
        job, nodes = self.job, list[Quest]()
        for index, rows in enumerate(self.sizes):
            if self.pool.drafts and job.is_late(0.5):
                break
            job.observe(f"micro-batches of {rows} rows", index, len(self.sizes))
            uniform = list(self._uniform(rows))
            for node in uniform:  # a first plan soon, of as few stages as fit: what Ctrl-C leaves
                if self.pool.drafts:
                    break
                self._follow([node], until_first=True)
            nodes += uniform
        self._follow(nodes)
        began = job.effort.work
        mixed = self._looked(self._mixed())
        self._follow(mixed, began=began)
        nodes += mixed
        self.is_open = any(node.estimate < float("inf") for node in nodes) or (
            any(node.num_blocks > MOST_CUTS for node in nodes)  # not every cut was tried
        )

    def _uniform(self, rows: int) -> Iterator[Quest]:
        """Stages of one size; without those whose work and waiting alone take too long.

        Of S stages on D/S devices each, one takes at least a share W/D of a micro-batch's work W,
        and all of them S·W/D: N micro-batches take at least (N + S − 1)·W/D.
        """
        costs, count = self.job.costs(rows), self.job.num_microbatches(rows)
        work = self._work(rows) / count
        chunks = MOST_CHUNKS if self.job.request.chunked_schedules else 1
        for number in self.job.stage_numbers:
            if work * (count + (number - 1) / chunks) >= self.pool.cutoff:
                continue  # on several stages per rank too
            tiling = uniform_tiling(self.job.cluster, number, costs.place)
            if tiling is not None:
                least = work * (count + number - 1) * (1 - TOLERANCE)
                yield Quest(rows, costs, tiling, (number,), least)

    def _work(self, rows: int) -> float:
        """``work_bound`` of a micro-batch size."""
        if rows not in self._works:
            self._works[rows] = work_bound(self.job, (rows,))
        return self._works[rows]

    def _mixed(self) -> Iterator[Quest]:
        """Stages of any sizes, for the micro-batches that are best in one size first."""
        job, pool = self.job, self.pool
        order = dict.fromkeys([draft.rows for draft in pool.best_drafts()] + list(self.sizes))
        allowed = job.request.features.allows("mixed-stages")
        several = tuple(number for number in job.stage_numbers if number > 1 and allowed)
        began = job.effort.work
        for rows in order:
            if several and not (pool.drafts and (job.is_late(0.6) or job.is_long(began))):
                costs = job.costs(rows)
                tiling = mixed_tiling(job.cluster, several[-1], costs.place)
                yield Quest(rows, costs, tiling, several)

    def _looked(self, nodes: Iterator[Quest]) -> list[Quest]:
        """The nodes that can still beat the incumbent, with their estimates.

        Where estimating takes long, those known so far are followed to a first plan.
        """
        open_nodes: list[Quest] = []
        for node in nodes:
            with self.job.timed("dp"):
                node.look(self.pool.cutoff)
            if node.estimate < float("inf"):
                open_nodes.append(node)
            if not self.pool.drafts and self.job.effort.work - self.began > SOON:
                self._follow(open_nodes, until_first=True)
        return open_nodes

    def _follow(
        self, nodes: list[Quest], *, until_first: bool = False, began: float | None = None
    ) -> None:
        """Makes the nodes' pipelines, the most promising first; ``began`` limits the work."""
        job, pool = self.job, self.pool

        def enough(estimate: float, found: list[Draft]) -> bool:
            if estimate == float("inf") or (found and until_first):
                return True
            if pool.drafts and (job.is_late(0.7) or (began and job.is_long(began))):
                return True
            return estimate >= pool.cutoff or job.effort.left_seconds <= 0

        with job.timed("dp"):
            for draft in drafts(nodes, enough):
                pool.add_all(pool.simulate(draft))


def learned(job: Job, pool: CandidatePool) -> Iterator[Candidate]:
    """The pipelines of a placer that learns, in place of those of the dynamic program.

    Each micro-batch size has an equal share of what is left of the time.
    """
    placer, sizes = job.request.placer, job.microbatch_rows
    assert placer is not None, "this proposer is only used where there is one"
    pool.is_open = True
    for index, rows in enumerate(sizes):
        share = 0.8 * max(job.effort.left_seconds, 0.0) / (len(sizes) - index)
        job.observe(f"learning to place micro-batches of {rows} rows", index, len(sizes))
        with job.timed("learning"):
            found = placer(
                job.table(rows), job.num_microbatches(rows), job.stage_numbers,
                time_limit_seconds=share,
            )  # fmt: skip
        for pipeline in found:
            yield from pool.simulate(Draft(rows, pipeline))


def parallel_branches(job: Job, pool: CandidatePool) -> Iterator[Candidate]:
    """Pipelines in which parallel branches of the model have devices of their own."""
    if not job.request.features.allows("branches"):
        return
    for section in sections(job.structure):
        for rows in job.microbatch_rows:
            if job.is_late(0.7):
                return
            for pipeline in branch_pipelines(job.table(rows), section, job.num_microbatches(rows)):
                if len(pipeline.stages) in job.stage_numbers:
                    yield from pool.simulate(Draft(rows, pipeline))
