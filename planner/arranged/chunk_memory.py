"""Plans that hold more or less than the plan that they were made of: recomputed as memory asks.

In: a plan of one stage per rank, how it is cut and priced, and the bytes of a device. Out: the
plan cut, with more blocks recomputed if it does not fit, and fewer if there is room. What is
held changes by the same bytes with every block of a rank, so the rank's share follows from two
plans: as the base is, and with all blocks recomputed, or none. A heuristic: which blocks
these are is not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
        less = recomputed(base, _names(base), "none")
        return found if less == base else _between(cut, base, found, cut(less), limit_bytes, "none")
    if _step(found) >= bar:
        return found
    least = cut(recomputed(base, _names(base), mode))
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
    high_names: set[str] = set()
    for rank, names in _rank_blocks(low).items():
        room, takes = limit_bytes - few[rank], many[rank] - few[rank]
        share = min(1.0, room / takes) if takes > 0 else 1.0
        high_names |= {name for at, name in enumerate(names) if _is_chosen(at, share)}
    if not high_names:
        return low
    changed = high_names if mode == "none" else _names(base) - high_names
    some = cut(recomputed(base, changed, mode))
    return min((plan for plan in (some, low) if _peak(plan) <= limit_bytes), key=_step)


def recomputed(base: Plan, names: Collection[str], mode: Recompute) -> Plan:
    """The blocks of these names recomputed by ``mode``: fully where they are already, or not
    at all."""
    stages = []
    for stage in base.stages:
        blocks = tuple(
            _changed(block, mode) if block.name in names else block for block in stage.blocks
        )
        stages.append(replace(stage, blocks=blocks))
    return replace(base, stages=tuple(stages))


def _is_chosen(index: int, share: float) -> bool:
    return int((index + 1) * share) > int(index * share)


def _changed(block: BlockPlan, mode: Recompute) -> BlockPlan:
    is_weaker = block.recompute == "full" and mode == "selective"
    return block if is_weaker else replace(block, recompute=mode)


def _names(base: Plan) -> set[str]:
    return {block.name for stage in base.stages for block in stage.blocks}


def _rank_blocks(found: Plan) -> dict[frozenset[int], list[str]]:
    """The blocks that each rank runs; another cut gives it others."""
    blocks: dict[frozenset[int], list[str]] = {}
    for stage in found.stages:
        blocks.setdefault(frozenset(stage.devices), []).extend(b.name for b in stage.blocks)
    return blocks


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
