"""Plans that hold more than the plan that they were made of: recomputed until they fit.

In: a plan of one stage per rank, how it is cut and priced, and the bytes of a device. Out: the
plan cut, with as many blocks recomputed as it then lacks. What is held falls by the same bytes
for every block that is recomputed, so the share follows from two plans: as many as the base
recomputes, and all of them. A heuristic: which blocks these are is not searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..plan import BlockPlan, Plan, Recompute

Cut = Callable[[Plan], Plan]
"""A plan of one stage per rank → the plan cut and priced."""


def fitting(
    cut: Cut, base: Plan, limit_bytes: float, mode: Recompute, *, bar: float = float("inf")
) -> Plan:
    """``base`` cut, recomputed by ``mode`` as far as ``limit_bytes`` ask for.

    As it is if that fits, or if nothing makes it fit in less than ``bar`` seconds.
    """
    found = cut(base)
    if mode == "none" or _peak(found) <= limit_bytes or _step(found) >= bar:
        return found
    least = cut(recomputed(base, 0.0, mode))
    if _peak(least) > limit_bytes or _peak(found) <= _peak(least):
        return found
    share = (limit_bytes - _peak(least)) / (_peak(found) - _peak(least))
    if share * _step(found) + (1 - share) * _step(least) >= bar:
        return least
    some = cut(recomputed(base, share, mode))
    fits = [plan for plan in (some, least) if _peak(plan) <= limit_bytes]
    return min(fits, key=_step)


def recomputed(base: Plan, share: float, mode: Recompute) -> Plan:
    """A ``share`` of each stage's blocks as they are, evenly spaced, the others by ``mode``."""
    stages = []
    for stage in base.stages:
        blocks = tuple(
            block if _is_kept(index, share) else _more(block, mode)
            for index, block in enumerate(stage.blocks)
        )
        stages.append(replace(stage, blocks=blocks))
    return replace(base, stages=tuple(stages))


def _is_kept(index: int, share: float) -> bool:
    return int((index + 1) * share) > int(index * share)


def _more(block: BlockPlan, mode: Recompute) -> BlockPlan:
    return block if block.recompute == "full" else replace(block, recompute=mode)


def _peak(found: Plan) -> int:
    return found.prediction.peak_memory_bytes


def _step(found: Plan) -> float:
    return found.prediction.step_seconds
