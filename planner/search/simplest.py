"""Choice of the simplest among candidates that are equally fast within the cost model's accuracy.

In: candidates with their steps, a tolerance. Out: the chosen candidate. ``Shape`` defines the
order: its fields are compared in turn, lower is simpler; among equal shapes the faster candidate is
chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..plan import Plan, Simplest
from .candidates import Candidate, complete_simulation, is_whole
from .context import SearchContext
from .pool import CandidatePool

SCHEDULES = (
    "1f1b",
    "gpipe",
    "eager-1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "bfs",
    "zbv",
    "dualpipev",
    "terapipe",
    "chimera",
)
"""Schedules, the simplest first: with whole backwards, split backwards, several stages per rank,
slices of sequences, two directions."""

MOST_TOLERANCE = 0.1
"""Maximum tolerance, even if measurements are more uncertain."""


class Shape(NamedTuple):
    """Measures of a plan's complexity, the most important measure first."""

    idle_axis: bool
    stages_per_rank: int
    pipeline_stages: int
    schedule: int
    mesh_axes: int
    zero_stage: int
    recomputed_blocks: int
    replicated_shards: bool


def shape_of(candidate: Candidate) -> Shape:
    """Return the complexity of a candidate."""
    settings = [answer.setting for _, answer in candidate.answers]
    shardings = [model.prices.shardings[own.setting.zero] for model, own in candidate.answers]
    return Shape(
        candidate.has_idle_axis,
        candidate.num_chunks,
        len(candidate.stages) // candidate.num_chunks,
        _schedule_number(candidate.schedule) if len(candidate.stages) > 1 else 0,
        max(sum(size > 1 for size in model.prices.mesh.shape) for model, _ in candidate.answers),
        max(own.zero for own in shardings),
        sum(sum(map(sum, setting.policy)) for setting in settings),
        any(own.degree for own in shardings),
    )


def _schedule_number(name: str) -> int:
    return SCHEDULES.index(name) if name in SCHEDULES else len(SCHEDULES)


def simplest_of(
    context: SearchContext, pool: CandidatePool, tolerance: float
) -> tuple[Candidate, Simplest | None]:
    """Return the simplest allowed candidate within ``tolerance`` of the fastest, with the reason if
    it is not the fastest.

    Extrapolated steps are simulated in full before their candidate is chosen.
    """
    ranked = pool.ranked_allowed()
    fastest = ranked[0]
    if not tolerance or context.budget.stopped:
        return fastest, None
    most = fastest.step_seconds * (1 + tolerance)
    near = [each for each in ranked if each.step_seconds <= most]
    for each in sorted(near, key=lambda own: (shape_of(own), own.step_seconds)):
        best = each if each is fastest or is_whole(each) else complete_simulation(context, each)
        if best is not each:
            pool.replace(each, best)
        if best.step_seconds <= most:
            if best.step_seconds <= fastest.step_seconds:
                return best, None
            number = len({own.summary for own in near})
            return best, Simplest(tolerance, number, fastest.summary, fastest.step_seconds)
    return fastest, None


def tolerance_of(
    asked: float, fastest: Callable[[], Plan], priced_by_source: Callable[[Plan], Plan]
) -> float:
    """Return the relative difference up to which steps count as equally fast: the requested
    tolerance, or the error of the fastest plan's interpolated times if larger; 0 if the fastest
    plan is requested."""
    if not asked:
        return asked
    prediction = priced_by_source(fastest()).prediction
    error = prediction.profile.interpolation_error if prediction.profile is not None else 0.0
    return max(asked, min(MOST_TOLERANCE, error * prediction.sources.get("interpolated", 0.0)))
