"""Of plans that are equally fast, within what the model can tell, the simplest.

In: candidates or plans with their steps, a tolerance. Out: which is chosen, and why each other
one is less simple. ``Shape`` is the order: its fields are compared one after the other, fewer or
lower is simpler; of two alike in all of them the faster is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ..plan import Alternative, Plan, Simplest
from ..price_sources import with_sources
from ..pricing.basis import Basis
from ..requests.pins import pinned_blocks
from .candidates import completed, is_whole
from .report_plan import Candidate
from .search import Searched

Item = TypeVar("Item")

SCHEDULES = (
    "1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2",
    "interleaved", "bfs", "zbv", "dualpipev", "terapipe", "chimera",
)  # fmt: skip
"""The simplest first: whole backwards, backwards in two halves, several stages per rank or
micro-batches in parts."""

MOST_TOLERANCE = 0.1
"""However unsure the measurements are, slower plans than that are not taken for equal."""


class Shape(NamedTuple):
    """What makes a plan simple, the weightiest first."""

    stages_per_rank: int
    pipeline_stages: int
    schedule: int
    mesh_axes: int
    zero_stage: int
    recomputed_blocks: int
    microbatches: int

    def more_than(self, other: Shape) -> str:
        """The first thing in which this is less simple, in words; "" if it is not.

        >>> Shape(1, 2, 3, 1, 0, 0, 8).more_than(Shape(1, 2, 0, 1, 0, 0, 8))
        'a less simple schedule'
        """
        for own, others, words in zip(self, other, WORDS, strict=True):
            if own != others:
                return words if own > others else ""
        return ""


WORDS = (
    "more stages per rank", "more pipeline stages", "a less simple schedule", "more mesh axes",
    "a higher ZeRO stage", "more blocks recomputed", "more micro-batches",
)  # fmt: skip


def shape_of(found: Candidate) -> Shape:
    """The shape of a candidate, whose ranks have one stage each."""
    settings = [answer.setting for _, answer in found.answers]
    return Shape(
        1,
        len(found.stages),
        _schedule_number(found.schedule) if len(found.stages) > 1 else 0,
        max(sum(size > 1 for size in model.prices.mesh.shape) for model, _ in found.answers),
        max(setting.zero for setting in settings),
        sum(sum(map(sum, setting.policy)) for setting in settings),
        found.num_microbatches,
    )


def shape_of_plan(plan: Plan) -> Shape:
    """The shape of a plan."""
    blocks = [block for stage in plan.stages for block in stage.blocks]
    return Shape(
        plan.num_chunks,
        len(plan.stages) // plan.num_chunks,
        _schedule_number(plan.schedule) if plan.has_pipeline else 0,
        max(sum(size > 1 for size in stage.mesh.shape) for stage in plan.stages),
        max(stage.zero for stage in plan.stages),
        sum(block.recompute != "none" for block in blocks),
        plan.num_microbatches,
    )


def _schedule_number(name: str) -> int:
    return SCHEDULES.index(name) if name in SCHEDULES else len(SCHEDULES)


def equals(items: Sequence[Item], seconds: Callable[[Item], float], tolerance: float) -> list[Item]:
    """The items within the tolerance of the fastest."""
    most = min(map(seconds, items)) * (1 + tolerance)
    return [item for item in items if seconds(item) <= most]


def simplest_first(
    items: Sequence[Item], seconds: Callable[[Item], float], shape: Callable[[Item], Shape]
) -> list[Item]:
    """The items, the simplest first, of equally simple ones the fastest."""
    return sorted(items, key=lambda item: (shape(item), seconds(item)))


def simplest_of(
    found: Searched, tolerance: float, other: Alternative | None
) -> tuple[Searched, Simplest | None] | None:
    """What was found with the simplest within the tolerance of the fastest as the winner, and
    why it won if it is not the fastest.

    ``other`` is the fastest plan of another schedule, where one is faster than all of these; None
    is returned where none of these is near it. The whole step of one of very many micro-batches
    is simulated before it wins.
    """
    fastest, summary = found.ranking[0].step_seconds, found.ranking[0].summary
    if other is not None:
        fastest, summary = other.step_seconds, other.summary
    elif not tolerance or found.job.stopped:
        return found, None
    can, most = found.request.allows_one_stage, fastest * (1 + tolerance)
    allowed = [each for each in found.ranking if can or len(each.stages) == 1]
    near = [each for each in allowed if tolerance and each.step_seconds <= most]
    for each in simplest_first(near, _seconds, shape_of):
        best = each
        is_known = each is found.ranking[0] or is_whole(len(each.stages), each.num_microbatches)
        if not is_known:
            best = completed(found.job, each)
        if best.step_seconds <= most:
            rest = [one for one in found.ranking if one is not each]
            number = len({one.summary for one in near}) + (other is not None)
            why = Simplest(tolerance, number, summary, fastest)
            is_slower = best.step_seconds > fastest
            return replace(found, ranking=[best, *rest]), why if is_slower else None
    return None


def _seconds(found: Candidate) -> float:
    return found.step_seconds


def tolerance_of(found: Searched, basis: Basis) -> float:
    """How much longer a step may be to count as equal: what was asked for, or as much as the
    interpolated part of the fastest plan's times may be wrong, if that is more; 0 where the
    fastest is asked for."""
    asked = found.request.tolerance
    if not asked or basis.used is None:
        return asked
    plan = found.plan(found.ranking[0], with_others=False)
    blocks = pinned_blocks(found.graph, found.blocks, found.request.pins)
    own = with_sources(plan, found.graph, blocks, basis=basis, rules=found.job.rules).prediction
    error = own.profile.interpolation_error if own.profile is not None else 0.0
    return max(asked, min(MOST_TOLERANCE, error * own.sources.get("interpolated", 0.0)))
