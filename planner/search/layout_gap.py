"""Proof of the winner's layouts: bounds of the gain that other layouts of its stages could bring.

In: the winner of a search. Out: the winner with narrower gaps of its stages, or a faster candidate
if the integer programs find better layouts. Other candidates are solved only until they are proven
worse than the winner.
"""

from __future__ import annotations

from dataclasses import replace

from ..inter_op.inter_op import Pipeline
from ..intra_op.closing import WINNERS_PROGRAMS
from ..intra_op.pool import StageAnswer, gap_between
from ..stage.stage_model import StageModel
from .branch_and_bound import PipelineProposal
from .candidates import Candidate, candidate, complete_simulation, is_whole
from .context import SearchContext

TIME_SHARE = 0.5
"""Fraction of the remaining time that tightening may take."""

WORTH_IT = 1e-9
"""Relative gain of a step that exceeds rounding."""

_Answer = tuple[StageModel, StageAnswer]


def tighten_gap(context: SearchContext, winner: Candidate) -> Candidate:
    """Solve integer programs until the winner's layout gap (possible gain by better layouts) is
    within ``request.gap``, as far as time allows.

    Nothing is done after Ctrl-C, nor for unequal batch shares, whose search covered more than
    layouts on given meshes. For a candidate with a ``base`` the base's gap is tightened.
    """
    budget = context.budget
    if winner.layouts_gap <= context.request.gap or budget.ended_by:
        return winner
    found, deadline = winner, budget.deadline
    with budget.stoppable():
        budget.end_in(TIME_SHARE * budget.left_seconds)
        if winner.base is not None:
            found = replace(winner, base=_with_gaps(winner.base, _proven(context, winner.base)))
        else:
            found = _better_of(context, winner, _proven(context, winner))
    if not budget.stopped:
        budget.deadline = deadline
    return found


def _proven(context: SearchContext, best: Candidate) -> Candidate | None:
    """Return the candidate solved with more integer programs; None if its stages come from other
    solvers."""
    proposal = PipelineProposal(best.rows, Pipeline(best.stages, best.step_seconds))
    plain = candidate(context, proposal, best.schedule)
    if plain is None or not _is_like(best, plain):
        return None
    return candidate(context, proposal, best.schedule, programs=WINNERS_PROGRAMS)


def _better_of(context: SearchContext, best: Candidate, proven: Candidate | None) -> Candidate:
    """Return ``proven`` (the candidate solved further) if it is faster, else ``best`` with the
    bounds that were proven."""
    if proven is not None and proven.step_seconds < best.step_seconds * (1 - WORTH_IT):
        whole = proven if is_whole(proven) else complete_simulation(context, proven)
        if whole.step_seconds < best.step_seconds:
            return whole
    return _with_gaps(best, proven)


def _with_gaps(best: Candidate, proven: Candidate | None) -> Candidate:
    """Return the candidate ``best`` with the proven bounds of its stages."""
    if proven is None or not _is_like(best, proven):
        return best
    pairs = zip(best.answers, proven.answers, strict=True)
    return replace(best, answers=tuple(_with_gap(answer, other) for answer, other in pairs))


def _is_like(best: Candidate, found: Candidate) -> bool:
    """Return whether the stages of both candidates come from the same solvers."""
    return all(
        model is other and not answer.shares
        for (model, answer), (other, _) in zip(best.answers, found.answers, strict=True)
    )


def _with_gap(own: _Answer, other: _Answer) -> _Answer:
    """Return a stage's solution with the proven bound of another solution of the stage."""
    (model, answer), bound = own, other[1].objective * (1 - other[1].gap)
    return model, replace(answer, gap=min(answer.gap, gap_between(bound, answer.objective)))
