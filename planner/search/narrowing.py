"""The plan's own layouts proven: how much faster others could make its stages.

In: the winner of a search. Out: the same with narrower gaps of its stages, or a faster way to run
them, where the integer programs that this takes find one. Of all others only as much is proven
as tells that they lose (``ranking``).
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..inter_op.inter_op import Pipeline
from ..intra_op.closing import WINNERS_PROGRAMS
from ..intra_op.pool import StageAnswer, gap_between
from ..pricing.stage_model import StageModel
from .candidates import candidate, completed, is_whole
from .free_axes import WORTH_IT
from .job import Job
from .quests import Draft
from .report_plan import Candidate

TIME_SHARE = 0.5
"""Of the time that is left, what this may take."""

_Answer = tuple[StageModel, StageAnswer]


def narrowed(job: Job, best: Candidate) -> Candidate:
    """The winner with ``layouts_gap`` as it was asked for, as far as that can be reached in time.

    Left as it is where its axes were left to the solver or its devices have unequal shares: then
    more than the layouts of its meshes was searched; and after Ctrl-C.
    """
    effort = job.effort
    if best.layouts_gap <= job.request.gap or job.stopped or effort.left_seconds <= 0:
        return best
    found, deadline = best, effort.deadline
    with job.stoppable():
        effort.deadline = time.perf_counter() + TIME_SHARE * effort.left_seconds
        found = _narrowed(job, best)
    if not job.stopped:
        effort.deadline = deadline
    return found


def _narrowed(job: Job, best: Candidate) -> Candidate:
    draft = Draft(best.rows, Pipeline(best.stages, best.step_seconds))
    plain = candidate(job, draft, best.schedule)
    if plain is None or not _is_like(best, plain):
        return best
    found = candidate(job, draft, best.schedule, programs=WINNERS_PROGRAMS)
    if found is None:
        return best
    if found.step_seconds < best.step_seconds * (1 - WORTH_IT):
        if not is_whole(len(found.stages), found.num_microbatches):
            found = completed(job, found)
        if found.step_seconds < best.step_seconds:
            return found
    if not _is_like(best, found):
        return best
    every = zip(best.answers, found.answers, strict=True)
    return replace(best, answers=tuple(_with_gap(own, other) for own, other in every))


def _is_like(best: Candidate, found: Candidate) -> bool:
    """Whether the stages are on the same meshes, solved by the same solver."""
    return all(
        model is other and not answer.shares
        for (model, answer), (other, _) in zip(best.answers, found.answers, strict=True)
    )


def _with_gap(own: _Answer, other: _Answer) -> _Answer:
    """A stage's answer with the bound that another one has."""
    (model, answer), bound = own, other[1].objective * (1 - other[1].gap)
    return model, replace(answer, gap=min(answer.gap, gap_between(bound, answer.objective)))
