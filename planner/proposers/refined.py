"""The fastest pipelines with their layouts proven, stage by stage, by integer programs.

The gap of every stage is narrowed as far as it can change the ranking; a schedule under which a
pipeline loses whatever its gaps hide is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..inter_op.inter_op import Pipeline
from ..intra_op.closing import MOST_PROGRAMS
from ..search.candidates import Candidate, candidates
from ..search.job import LONG, Job
from ..search.pool import CandidatePool
from ..search.quests import Draft


def refined_layouts(job: Job, pool: CandidatePool) -> Iterator[Candidate]:
    """The pool's fastest pipelines again, the gaps of their stages narrowed."""
    job.observe("refining the best", 1, 1)
    pool.settle()
    pipelines = dict.fromkeys(
        (each.rows, each.stages) for each in pool.ranked() if each.base is None
    )
    number = 1 if job.effort.work - job.began_work > LONG else job.request.top
    for rows, stages in list(pipelines)[:number]:
        if job.is_late(0.8):
            return
        draft = Draft(rows, Pipeline(stages, pool.step_seconds))
        hopeless = pool.hopeless_schedules(draft)
        if hopeless is not None:
            yield from candidates(
                job, draft, programs=MOST_PROGRAMS, below=pool.step_seconds, without=hopeless
            )
