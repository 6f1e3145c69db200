"""Plans that hold more or less than the plan that they were made of: recomputed as memory asks.

In: a plan of one stage per rank, how it is cut and priced, and the bytes of a device. Out: the
plan cut, with more blocks recomputed if it does not fit, and fewer if there is room. What is
held changes by the same bytes with every block of a rank, so its share follows from two
plans: as the base is, and with all blocks recomputed, or none. A heuristic: which blocks
these are is not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        less = recomputed(base, _all(base, 1.0), "none")
        return found if less == base else _between(cut, base, found, cut(less), limit_bytes, "none")
    if _step(found) >= bar:
        return found
    least = cut(recomputed(base, _all(base, 0.0), mode))
    if _peak(least) > limit_bytes:
        return found
    return _between(cut, base, least, found, limit_bytes, mode)


def _between(
    cut: Cut, base: Plan, low: Plan, high: Plan, limit_bytes: float, mode: Recompute
) -> Plan:
    """The fastest of ``low``, which fits, ``high``, and what lies between as memory allows."""
    if _peak(high) <= limit_bytes:
        return min(low, high, key=_step)
    few, many = _rank_bytes(low), _rank_bytes(high)
    ranks = [frozenset(stage.devices) for stage in base.stages]
    room = [(limit_bytes - few[rank], many[rank] - few[rank]) for rank in ranks]
    shares = [min(1.0, has / takes) if takes > 0 else 1.0 for has, takes in room]
    some = cut(recomputed(base, shares, mode))
    return min((plan for plan in (some, low) if _peak(plan) <= limit_bytes), key=_step)


def recomputed(base: Plan, shares: Sequence[float], mode: Recompute) -> Plan:
    """Some of each stage's blocks changed, evenly spaced.

    With "none" the stage's share is no longer recomputed; else its share stays as it is, and
    the others are recomputed by ``mode``, or fully where they are already.
    """
    stages = []
    for stage, share in zip(base.stages, shares, strict=True):
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


def _all(base: Plan, share: float) -> list[float]:
    return [share] * len(base.stages)


def _rank_bytes(found: Plan) -> dict[frozenset[int], float]:
    """What each rank holds for all its stages, about: what is transient counts in each."""
    held: dict[frozenset[int], float] = {}
    for stage in found.stages:
        rank = frozenset(stage.devices)
        held[rank] = held.get(rank, 0.0) + sum(stage.prediction.memory_bytes.values())
    return held


def _peak(found: Plan) -> int:
    return found.prediction.peak_memory_bytes


def _step(found: Plan) -> float:
    return found.prediction.step_seconds
