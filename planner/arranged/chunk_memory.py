"""Plans that hold more or less than the plan that they were made of: recomputed as memory asks.

In: a plan of one stage per rank, how it is cut and priced, and the bytes of a device. Out: the
plan cut, with no more recomputed than must be. What is held changes by the same bytes with every
block of a rank, so the rank's share follows from two plans, with all blocks run in one way or
in the next (not recomputed, selectively, fully). A heuristic: which blocks these are is not
searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..plan import Plan, Recompute

Cut = Callable[[Plan], Plan]
"""A plan of one stage per rank → the plan cut and priced."""


def fitting(
    cut: Cut,
    base: Plan,
    limit_bytes: float,
    modes: Sequence[Recompute],
    *,
    bar: float = float("inf"),
) -> Plan:
    """``base`` cut, and recomputed as little as ``limit_bytes`` allow.

    ``modes`` are the ways that blocks may run in, the one that keeps most first: two neighbours
    of them are mixed. As it is if nothing makes it fit in less than ``bar`` seconds, or if there
    is one way only.
    """
    found, names = cut(base), _names(base)
    fits = _peak(found) <= limit_bytes
    is_free = base == recomputed(base, names, "none")
    if len(modes) < 2 or (is_free and (fits or _step(found) >= bar)):
        return found

    def uniform(mode: Recompute) -> tuple[Plan, Plan]:
        whole = recomputed(base, names, mode)
        return whole, found if whole == base else cut(whole)

    at = len(modes) // 2
    low = uniform(modes[at])
    if _peak(low[1]) > limit_bytes and at + 1 < len(modes):
        high, at = low, at + 1
        low = uniform(modes[at])
    else:
        high = uniform(modes[at - 1])
    every = [found, low[1], high[1]]
    if _peak(low[1]) <= limit_bytes < _peak(high[1]) and _step(high[1]) < bar:
        changed = _to_recompute(low[1], high[1], limit_bytes)
        every.append(cut(recomputed(high[0], changed, modes[at])))
    return min((plan for plan in every if _peak(plan) <= limit_bytes), key=_step, default=found)


def _to_recompute(low: Plan, high: Plan, limit_bytes: float) -> set[str]:
    """The blocks to recompute as in ``low``, which fits, the others as in ``high``, which does
    not: of each rank as many as its memory asks, evenly."""
    few, many = _rank_bytes(low), _rank_bytes(high)
    found: set[str] = set()
    for rank, names in _rank_blocks(low).items():
        room, takes = limit_bytes - few[rank], many[rank] - few[rank]
        share = min(1.0, room / takes) if takes > 0 else 1.0
        found |= {name for at, name in enumerate(names) if not _is_chosen(at, share)}
    return found


def recomputed(base: Plan, names: Collection[str], mode: Recompute) -> Plan:
    """The blocks of these names recomputed by ``mode``."""
    stages = []
    for stage in base.stages:
        blocks = tuple(
            replace(block, recompute=mode) if block.name in names else block
            for block in stage.blocks
        )
        stages.append(replace(stage, blocks=blocks))
    return replace(base, stages=tuple(stages))


def _is_chosen(index: int, share: float) -> bool:
    return int((index + 1) * share) > int(index * share)


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
