"""The fastest pipelines solved again, with narrower gaps of their stages or freer axes.

Integer programs narrow the gap of every stage as far as it can change the ranking; schedules under
which a pipeline loses even with optimal layouts are skipped. With free axes a mesh's axis "dp" may
split weights, too, if tables can solve the stage. The bounded search space excludes these plans, as
its tables would be far wider, so the lower bound does not cover them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..inter_op.inter_op import Pipeline, StageChoice
from ..intra_op.closing import MOST_PROGRAMS
from ..search.bound import work_bound
from ..search.branch_and_bound import PipelineProposal
from ..search.candidates import Candidate, candidates
from ..search.context import LONG, SearchContext
from ..search.pool import CandidatePool

WORTH_IT = 1e-9
"""Least relative gain of a candidate with free axes that is kept; it exceeds rounding."""


def refined_layouts(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield candidates of the pool's fastest pipelines, with stages solved closer to the optimum by
    integer programs."""
    context.observe("refining the best", 1, 1)
    pool.settle()
    for proposal in _fastest(context, pool):
        if context.is_late(0.8):
            return
        hopeless = pool.hopeless_schedules(proposal)
        if hopeless is not None:
            yield from candidates(
                context, proposal, programs=MOST_PROGRAMS, below=pool.step_seconds, without=hopeless
            )


def free_axes(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield candidates of the pool's fastest pipelines, and of single stages, in which the solver
    may use mesh axes in any way.

    A single stage may fit only with free axes. After much work, or if prices must be measured (each
    mesh adds ops to measure), only the fastest pipeline is tried.
    """
    if not context.request.frees_axes or context.is_late(0.9):
        return
    proposals = _fastest(context, pool)
    if context.basis.asked is not None:
        proposals = proposals[:1]
    elif not _is_long(context):
        proposals += _single_stages(context)
    for proposal in dict.fromkeys(proposals):
        if work_bound(context, (proposal.rows,)) < pool.step_seconds:
            for candidate in candidates(context, proposal, below=pool.step_seconds, free=True):
                if candidate.step_seconds < pool.step_seconds * (1 - WORTH_IT):
                    yield candidate


def _fastest(context: SearchContext, pool: CandidatePool) -> list[PipelineProposal]:
    """Return the pool's fastest pipelines: only one after much work, else ``request.top``."""
    pipelines = dict.fromkeys(
        (each.rows, each.stages) for each in pool.ranked() if each.base is None
    )
    number = 1 if _is_long(context) else context.request.top
    return [
        PipelineProposal(rows, Pipeline(stages, 0.0)) for rows, stages in list(pipelines)[:number]
    ]


def _is_long(context: SearchContext) -> bool:
    return context.budget.work - context.began_work > LONG


def _single_stages(context: SearchContext) -> list[PipelineProposal]:
    """Return a proposal of one stage on all devices for every micro-batch size."""
    if 1 not in context.stage_numbers:
        return []
    stage = StageChoice(0, len(context.structure.blocks.blocks), 0, context.cluster.num_devices)
    return [PipelineProposal(rows, Pipeline((stage,), 0.0)) for rows in context.microbatch_rows]
