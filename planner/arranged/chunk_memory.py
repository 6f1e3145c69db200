"""Plans that hold more or less than the plan that they were made of: recomputed as memory asks.

In: a plan of one stage per rank, how it is cut and priced, and the bytes of a device. Out: the
plan cut, with more blocks recomputed if it does not fit, and fewer if there is room. What is
held changes by the same bytes with every block that is recomputed, so the share follows from
two plans: as the base is, and with all blocks recomputed, or none. A heuristic: which blocks
these are is not searched.
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
    """``base`` cut, and recomputed by ``mode`` where ``limit_bytes`` ask for it and else not.

    As it is if nothing makes it fit in less than ``bar`` seconds, or if ``mode`` is "none".
    """
    found = cut(base)
    if mode == "none":
        return found
    if _peak(found) <= limit_bytes:
        less = recomputed(base, 1.0, "none")
        return found if less == base else _between(cut, base, found, cut(less), limit_bytes, "none")
    if _step(found) >= bar:
        return found
    least = cut(recomputed(base, 0.0, mode))
    if _peak(least) > limit_bytes:
        return found
    return _between(cut, base, least, found, limit_bytes, mode)


def _between(
    cut: Cut, base: Plan, low: Plan, high: Plan, limit_bytes: float, mode: Recompute
) -> Plan:
    """The fastest of ``low``, which fits, ``high``, and what lies between as memory allows."""
    if _peak(high) <= limit_bytes:
        return min(low, high, key=_step)
    share = (limit_bytes - _peak(low)) / (_peak(high) - _peak(low))
    some = cut(recomputed(base, share, mode))
    return min((plan for plan in (some, low) if _peak(plan) <= limit_bytes), key=_step)


def recomputed(base: Plan, share: float, mode: Recompute) -> Plan:
    """Some of each stage's blocks changed, evenly spaced.

    With "none" a ``share`` is no longer recomputed; else a ``share`` stays as it is, and the
    others are recomputed by ``mode``, or fully where they are already.
    """
    stages = []
    for stage in base.stages:
        blocks = tuple(
            _changed(block, mode) if _is_chosen(index, share) is (mode == "none") else block
            for index, block in enumerate(stage.blocks)
        )
        stages.append(replace(stage, blocks=blocks))
    return replace(base, stages=tuple(stages))


def _is_chosen(index: int, share: float) -> bool:
    return int((index + 1) * share) > int(index * share)


def _changed(block: BlockPlan, mode: Recompute) -> BlockPlan:
    is_weaker = block.recompute == "full" and mode == "selective"
    return block if is_weaker else replace(block, recompute=mode)


def _peak(found: Plan) -> int:
    return found.prediction.peak_memory_bytes


def _step(found: Plan) -> float:
    return found.prediction.step_seconds
