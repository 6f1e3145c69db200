"""The fastest pipelines with their stages solved again: more exactly, or with more freedom.

By integer programs the gap of every stage is narrowed as far as it can change the ranking; a
schedule under which a pipeline loses whatever its gaps hide is left out. With free axes a mesh's
axis "dp" may split weights too, where tables can solve that. The space of the search is without:
its tables would be far wider. So neither are such plans part of what the bound holds for.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..inter_op.inter_op import Pipeline, StageChoice
from ..intra_op.closing import MOST_PROGRAMS
from ..search.bound import work_bound
from ..search.candidates import Candidate, candidates
from ..search.job import LONG, Job
from ..search.pool import CandidatePool
from ..search.quests import Draft

WORTH_IT = 1e-9
"""The least gain for which axes are used for more: no rounding."""


def refined_layouts(job: Job, pool: CandidatePool) -> Iterator[Candidate]:
    """The pool's fastest pipelines again, the gaps of their stages narrowed."""
    job.observe("refining the best", 1, 1)
    pool.settle()
    for draft in _fastest(job, pool):
        if job.is_late(0.8):
            return
        hopeless = pool.hopeless_schedules(draft)
        if hopeless is not None:
            yield from candidates(
                job, draft, programs=MOST_PROGRAMS, below=pool.step_seconds, without=hopeless
            )


def free_axes(job: Job, pool: CandidatePool) -> Iterator[Candidate]:
    """The pool's fastest pipelines, and single stages, with the axes of their meshes left to the
    solver: a single stage may fit only so.

    Only the fastest is tried after much work, and where prices are to be measured: each mesh has
    ops of its own.
    """
    if not job.request.frees_axes or job.is_late(0.9):
        return
    drafts = _fastest(job, pool)
    if job.basis.asked is not None:
        drafts = drafts[:1]
    elif not _is_long(job):
        drafts += _single_stages(job)
    for draft in dict.fromkeys(drafts):
        if work_bound(job, (draft.rows,)) < pool.step_seconds:
            for candidate in candidates(job, draft, below=pool.step_seconds, free=True):
                if candidate.step_seconds < pool.step_seconds * (1 - WORTH_IT):
                    yield candidate


def _fastest(job: Job, pool: CandidatePool) -> list[Draft]:
    """The pool's fastest pipelines: one after much work, else as many as the request says."""
    pipelines = dict.fromkeys(
        (each.rows, each.stages) for each in pool.ranked() if each.base is None
    )
    number = 1 if _is_long(job) else job.request.top
    return [Draft(rows, Pipeline(stages, 0.0)) for rows, stages in list(pipelines)[:number]]


def _is_long(job: Job) -> bool:
    return job.effort.work - job.began_work > LONG


def _single_stages(job: Job) -> list[Draft]:
    """One stage on all devices at every micro-batch size."""
    if 1 not in job.stage_numbers:
        return []
    stage = StageChoice(0, len(job.structure.blocks.blocks), 0, job.cluster.num_devices)
    return [Draft(rows, Pipeline((stage,), 0.0)) for rows in job.microbatch_rows]
