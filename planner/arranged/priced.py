"""Plans of other schedules than the search's, as ``evaluate`` prices them.

In: a plan, who prices it, what is wanted. Out: the plan with its predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..evaluate import Evaluation, Evaluator
from ..plan import Plan


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which plans are worth simulating: those that fit, where they may take less."""

    bytes: float = float("inf")
    seconds: float = float("inf")


def priced(looped: Plan, evaluator: Evaluator, wanted: Wanted | None = None) -> Plan:
    """The plan with its predictions under the schedule.

    The step of one that is not ``wanted`` is what it takes at least.
    """
    staged = evaluator.staged(looped, looped.cluster)
    if wanted is None:
        return _predicted(looped, staged.evaluation())
    least, peak = staged.least_seconds, staged.peak_bytes()
    is_wanted = peak <= wanted.bytes and least < wanted.seconds
    found = staged.evaluation() if is_wanted else staged.figures(least, 0.0, peak)
    return _predicted(looped, found)


def _predicted(looped: Plan, found: Evaluation) -> Plan:
    before = looped.prediction
    ratio = before.step_seconds / found.step_seconds
    return replace(
        looped,
        stages=tuple(
            replace(stage, prediction=prediction)
            for stage, prediction in zip(looped.stages, found.stages, strict=True)
        ),
        prediction=replace(
            before,
            step_seconds=found.step_seconds,
            bubble_fraction=found.bubble_fraction,
            tokens_per_second=before.tokens_per_second * ratio,
            model_flops_utilization=before.model_flops_utilization * ratio,
            peak_memory_bytes=found.peak_memory_bytes,
        ),
    )
