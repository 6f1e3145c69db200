"""What is looked at in which order.

In: a job. Out: candidates, and the best known. Quests are looked at and followed to drafts,
drafts made candidates and simulated, the fastest refined (``search`` says more).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..inter_op.branches_search import branch_pipelines
from ..inter_op.inter_op import StageChoice
from ..intra_op.closing import MOST_PROGRAMS
from ..pricing.branches import sections
from ..requests.options import microbatch_rows
from ..requests.request import MOST_CHUNKS, Placer
from .beside import Company
from .candidates import candidates
from .free_axes import WORTH_IT, free_candidates, freed
from .job import Job
from .nearby import passed_over
from .quests import MOST_CUTS, TOLERANCE, Draft, Quest, drafts
from .report_plan import Candidate
from .shares import shared_candidates
from .space import mixed_tiling, uniform_tiling
from .standings import Explored, Standings
from .work_bound import work_bound

Observe = Callable[[str, float, float], None]
"""(what is being done, how much is done, of how much)."""

NEAR = 1.05
"""Of what another part found, drafts within this factor of the best are taken in."""

SOON = 800
"""The work after which a first plan is made of what is known."""

LONG = 5_000
"""Of a search of no more work (``Effort.work``), no part is cut short."""


def ignore(what: str, done: float, total: float) -> None:
    """Watches nothing."""


def explored(job: Job, rows: tuple[int, ...], numbers: tuple[int, ...]) -> Explored:
    """Follows the quests of some micro-batch sizes, here or in another process."""
    return Ranking(job, ignore).explored(rows, numbers)


class Ranking:
    """A search: ``found`` is what it has found so far."""

    def __init__(self, job: Job, observe: Observe) -> None:
        self.job = job
        self.observe = observe
        self.began = job.effort.work
        self.found = Standings(job)
        self._works: dict[int, float] = {}
        self.is_open = job.request.placer is not None  # whether some stages may yet fit

    def run(self) -> None:
        """Searches until nothing better is left, or the time is up."""
        job = self.job
        rows = microbatch_rows(job.structure.graph, job.request, job.cluster)
        numbers = job.stage_numbers
        if job.request.placer is not None:
            self._place(job.request.placer, rows, numbers)
            self._refine()
            return
        job.company = Company.of(job, rows)
        every = job.company.over(explored, numbers, first=lambda own: self.explored(own, numbers))
        for found in every[1:]:
            self._take_in(found)
        self._add_branches(rows, numbers)
        self._look_around(rows, numbers)
        self.observe("refining the best", len(rows), len(rows))
        if self.found.best:
            self.found.settle()
        self._refine()
        self._share_out(rows)

    def _explore(self, rows: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        """Follows the quests of some micro-batch sizes: stages of one size, then of any."""
        quests: list[Quest] = []
        for index, each in enumerate(rows):
            if self.found.drafts and self._is_late(0.5):
                break
            self.observe(f"micro-batches of {each} rows", index, len(rows))
            own = list(self._uniform(each, numbers))
            self._begin(own)
            quests += own
        self._follow(quests)
        began = self.job.effort.work
        mixed = self._looked(self._mixed(rows, numbers))
        self._follow(mixed, began=began)
        every = [*quests, *mixed]
        self.is_open = any(each.estimate < float("inf") for each in every) or (
            any(each.num_blocks > MOST_CUTS for each in every)  # not every cut was tried
        )

    def _begin(self, quests: list[Quest]) -> None:
        """Makes a first plan where there is none, of as few stages as fit, soon and simple: what
        Ctrl-C then leaves."""
        for quest in quests:
            if self.found.drafts:
                return
            self._follow([quest], until_first=True)

    def explored(self, rows: tuple[int, ...], numbers: tuple[int, ...]) -> Explored:
        """What following the quests of some micro-batch sizes came to."""
        self._explore(rows, numbers)
        least: dict[Draft, float] = {}
        for each in self.found.by_speed():
            least.setdefault(self.found.drawn[id(each)], each.step_seconds)
        drafts = tuple((seconds, draft) for draft, seconds in least.items())
        job = self.job
        return Explored(drafts, job.steps, self.is_open, job.excess_bytes)

    def _take_in(self, found: Explored) -> None:
        """Takes in another part's drafts, those that are near the best."""
        self.job.beyond += found.excess_bytes
        self.job.steps.update(found.steps)
        self.is_open |= found.is_open
        for seconds, draft in found.drafts:
            if seconds < self.found.step_seconds * NEAR:
                self.found.keep(draft)

    def _is_late(self, share: float = 0.7) -> bool:
        return self.job.effort.left_seconds < (1 - share) * self.job.request.time_limit_seconds

    def _is_long(self, began: float) -> bool:
        """Whether what was begun at some work has taken a third of all before it, and much."""
        spent = self.job.effort.work - began
        return spent > max(0.5 * LONG, (began - self.began) / 3)

    def _uniform(self, rows: int, numbers: tuple[int, ...]) -> Iterator[Quest]:
        """Stages of one size; without those whose work and waiting alone take too long.

        Of S stages on D/S devices each, one takes at least a share W/D of a micro-batch's work W,
        and all of them S·W/D: N micro-batches take at least (N + S − 1)·W/D.
        """
        costs, count = self.job.costs(rows), self.job.num_microbatches(rows)
        work = self._work(rows) / count
        for number in numbers:
            if self._is_beaten(rows, number):
                continue
            tiling = uniform_tiling(self.job.cluster, number, costs.place)
            if tiling is not None:
                least = work * (count + number - 1) * (1 - TOLERANCE)
                yield Quest(rows, costs, tiling, (number,), least)

    def _work(self, rows: int) -> float:
        """``work_bound`` of a micro-batch size."""
        if rows not in self._works:
            self._works[rows] = work_bound(self.job, (rows,))
        return self._works[rows]

    def _is_beaten(self, rows: int, number: int) -> bool:
        """Whether work and waiting alone take too long, on several stages per rank too."""
        count = self.job.num_microbatches(rows)
        work = self._work(rows) / count
        chunks = MOST_CHUNKS if self.job.request.chunked_schedules else 1
        return work * (count + (number - 1) / chunks) >= self.found.cutoff

    def _mixed(self, rows: tuple[int, ...], numbers: tuple[int, ...]) -> Iterator[Quest]:
        """Stages of any sizes, for the micro-batches that are best in one size first."""
        order = list(dict.fromkeys([draft.rows for draft in self.found.best_drafts()] + list(rows)))
        allowed = self.job.request.features.allows("mixed-stages")
        several = tuple(number for number in numbers if number > 1 and allowed)
        began = self.job.effort.work
        for each in order:
            if several and not (self.found.drafts and (self._is_late(0.6) or self._is_long(began))):
                costs = self.job.costs(each)
                tiling = mixed_tiling(self.job.cluster, several[-1], costs.place)
                yield Quest(each, costs, tiling, several)

    def _looked(self, quests: Iterator[Quest]) -> list[Quest]:
        """The quests that may still lead to something near the best, with their estimates.

        Where looking takes long, what was looked at is followed to a first plan.
        """
        found = []
        for quest in quests:
            began, solved = time.perf_counter(), self.job.solver_seconds
            quest.look(self.found.cutoff)
            spent = time.perf_counter() - began - (self.job.solver_seconds - solved)
            self.job.took("dp", spent)
            if quest.estimate < float("inf"):
                found.append(quest)
            if not self.found.drafts and self.job.effort.work - self.began > SOON:
                self._follow(found, until_first=True)
        return found

    def _follow(
        self, quests: list[Quest], *, until_first: bool = False, began: float | None = None
    ) -> None:
        """Makes the quests' pipelines, the most promising first; ``began`` limits the time."""

        def enough(estimate: float, found: list[Draft]) -> bool:
            if estimate == float("inf") or (found and until_first):
                return True
            if self.found.drafts and (self._is_late(0.7) or (began and self._is_long(began))):
                return True
            return estimate >= self.found.cutoff or self.job.effort.left_seconds <= 0

        start, solved = time.perf_counter(), self.job.solver_seconds
        for draft in drafts(quests, enough):
            self.found.keep(draft)
        spent = time.perf_counter() - start - (self.job.solver_seconds - solved)
        self.job.took("dp", spent)

    def _place(self, placer: Placer, rows: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        """Keeps the pipelines that a placer finds, in place of those of the dynamic program.

        Each micro-batch size has an equal share of what is left of the time.
        """
        job = self.job
        for index, each in enumerate(rows):
            share = 0.8 * max(job.effort.left_seconds, 0.0) / (len(rows) - index)
            self.observe(f"learning to place micro-batches of {each} rows", index, len(rows))
            began, solved = time.perf_counter(), job.solver_seconds
            pipelines = placer(
                job.table(each), job.num_microbatches(each), numbers, time_limit_seconds=share
            )
            spent = time.perf_counter() - began - (job.solver_seconds - solved)
            job.took("learning", spent)
            for pipeline in pipelines:
                self.found.keep(Draft(each, pipeline))

    def _add_branches(self, rows: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        """Pipelines in which branches have devices of their own."""
        job = self.job
        if not job.request.features.allows("branches"):
            return
        for section in sections(job.structure):
            for each in rows:
                if self._is_late(0.7):
                    return
                table, count = job.table(each), job.num_microbatches(each)
                for pipeline in branch_pipelines(table, section, count):
                    if len(pipeline.stages) in numbers:
                        self.found.keep(Draft(each, pipeline))

    def _look_around(self, rows: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        """Takes in pipelines that were passed over: any of few, else those next to the winner."""
        began = self.job.effort.work

        def best() -> tuple[float, Draft]:
            return self.found.step_seconds, self.found.drawn[id(self.found.best[0])]

        def is_late() -> bool:
            return self._is_late(0.75) or self._is_long(began)

        if self.found.best:
            for draft in passed_over(
                self.job, rows, numbers, drafts=self.found.drafts, best=best, is_late=is_late
            ):
                self.found.keep(draft)

    def _refine(self) -> None:
        """Solves the stages of the fastest again, each gap narrowed."""
        job, top = self.job, self.job.request.top
        fastest = self.found.by_speed()
        best = list(dict.fromkeys(self.found.drawn[id(each)] for each in fastest))[:top]
        if job.effort.work - self.began > LONG:
            best = best[:1]
        for draft in best:
            if self._is_late(0.8):
                break
            lost = self.found.lost(draft)
            if lost is None:
                continue
            for each in candidates(
                job, draft, programs=MOST_PROGRAMS, below=self.found.step_seconds, without=lost
            ):
                self.found.offer(each)
        if not self._is_late(0.9):
            self._free_axes()

    def _free_axes(self) -> None:
        """Offers the fastest pipelines, and single stages, with their axes left to the solver.

        A pipeline that loses with the axis "dp" for the batch alone may win without: a single
        stage may fit only so. Only the winner is tried after much work, and where prices are to
        be measured: each mesh has ops of its own.
        """
        job = self.job
        if not self.found.best or not job.request.frees_axes:
            return
        self._offer_faster(freed(job, self.found.best[0]))
        if job.basis.asked is None and job.effort.work - self.began <= LONG:
            fastest = dict.fromkeys((each.rows, each.stages) for each in self.found.by_speed())
            some = list(dict.fromkeys([*[*fastest][: job.request.top], *self._single_stages()]))
            for found in free_candidates(job, some, lambda: self.found.step_seconds):
                self._offer_faster(found)

    def _single_stages(self) -> Iterator[tuple[int, tuple[StageChoice, ...]]]:
        """One stage on all devices at every micro-batch size, where work alone is fast enough."""
        job = self.job
        if 1 in job.stage_numbers:
            whole = StageChoice(0, len(job.structure.blocks.blocks), 0, job.cluster.num_devices)
            for rows in microbatch_rows(job.structure.graph, job.request, job.cluster):
                if self._work(rows) < self.found.step_seconds:
                    yield rows, (whole,)

    def _offer_faster(self, found: Candidate) -> None:
        if found.step_seconds < self.found.step_seconds * (1 - WORTH_IT):
            self.found.offer(found)

    def _share_out(self, rows: tuple[int, ...]) -> None:
        """Plans in which unlike devices take unequal shares of the batch.

        They have every device, so they are the same for every order of the hosts.
        """
        least = float("inf")
        for found, bound in shared_candidates(self.job, rows):
            least = min(least, bound)
            if found is not None:
                self.found.offer(found)
        self.job.shared_bound = least
