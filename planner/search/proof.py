"""What is known of how good the best plan can be, while and after a search.

In: a job, the best step so far. Out: lower bounds of all plans that the search may make, of one
stage per rank and of several. Parts of the micro-batch sizes are bounded as soon as they are
explored, where there are processes beside this one (``beside``); whoever asks waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..inter_op.heterogeneous import is_mixed
from ..requests.options import microbatch_rows
from ..requests.request import SCHEDULES
from .beside import Company
from .bound import bounds
from .job import Job
from .work_bound import work_bound

BOUND_SHARE = 0.4
LEAST_BOUND = 400
"""Of the work that the search took, and at least: what narrowing the bound may take besides."""


@dataclass
class Proof:
    """The bounds of a search that began at some work of its effort.

    ``shared_bound`` is that of plans in which unlike devices take unequal shares, once these were
    tried (``is_shared_out``).
    """

    job: Job
    began: float
    shared_bound: float = float("inf")
    is_shared_out: bool = False
    _parts: list[Callable[[], tuple[float, float]]] = field(default_factory=list)

    def begin(self, at: int, step_seconds: float, done: float = 1.0) -> None:
        """Begins to bound a part, with a share of the work; ``done`` is how much of that is."""
        job = self.job
        if job.company is None or not set(job.request.schedules) <= set(SCHEDULES):
            return
        patience = max(LEAST_BOUND, BOUND_SHARE * (job.effort.work - self.began) / done)
        self._parts.append(
            job.company.later(
                at, bounds, job.stage_numbers, step_seconds, job.request.gap, patience
            )
        )

    def begin_rest(self, step_seconds: float) -> None:
        """Begins to bound the parts of which that has not begun."""
        job = self.job
        if job.company is None:
            rows = microbatch_rows(job.structure.graph, job.request, job.cluster)
            job.company = Company(job, (rows,))
        for at in range(len(self._parts), len(job.company.parts)):
            self.begin(at, step_seconds)

    def least(self) -> float:
        """What no plan of one stage per rank takes less than; 0 where that is not known."""
        job = self.job
        least = min((own for own, _ in self._found()), default=0.0)
        if not self.is_shared_out and is_mixed(job.cluster):  # it was ended before that
            rows = microbatch_rows(job.structure.graph, job.request, job.cluster)
            least = min(least, work_bound(job, rows))
        return min(least, self.shared_bound)

    def others(self) -> float | None:
        """What none of several stages per rank takes less than, None if it was not asked for."""
        if self.job.others_bound is None or not self._parts:
            return None
        return min(others for _, others in self._found())

    def _found(self) -> list[tuple[float, float]]:
        try:
            return [each() for each in self._parts]
        except KeyboardInterrupt:
            self.job.interrupt()
            return [each() for each in self._parts]
