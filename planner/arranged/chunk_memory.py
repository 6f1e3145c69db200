"""Plans that hold more or less than the plan that they were made of: recomputed as memory asks.

In: a plan of one stage per rank, how it is cut and priced, and the bytes of a device. Out: the
plan cut, with no more recomputed than must be. What is held changes by about the same bytes with
every block of a stage, so how many blocks follows from two plans, with all blocks run in one way
or in the next (not recomputed, selectively, fully); where that is too few, by what lasts only for
a while, the rest is asked of the same again. A heuristic: other mixes are not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..evaluate import BRIEF
from ..plan import Plan, Recompute, StagePlan
from ..pricing.stage_cost import together

MOST_MIXES = 3
"""How often a mix of two ways is made that may not fit yet."""

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
        room = limit_bytes
        for more in range(MOST_MIXES):
            changed = _to_recompute(low[1], high[1], room, more)
            every.append(cut(recomputed(high[0], changed, modes[at])))
            excess = _peak(every[-1]) - limit_bytes
            if excess <= 0:
                break
            room -= excess
    return min((plan for plan in every if _peak(plan) <= limit_bytes), key=_step, default=found)


def _to_recompute(low: Plan, high: Plan, limit_bytes: float, more: int) -> set[str]:
    """The blocks to recompute as in ``low``, which fits, the others as in ``high``, which does
    not: of each rank as few as its memory asks, and some ``more``."""
    found: set[str] = set()
    for stages in _ranks(high).values():
        excess = _rank_bytes(high, stages) - limit_bytes
        if excess > 0:
            saved = {stage: _saved(low, high, stage) for stage in stages}
            found |= _fewest(high, saved, excess, more)
    return found


def _saved(low: Plan, high: Plan, stage: int) -> float:
    """What a block of a stage holds less if recomputed, on average."""
    return (_lasting(high, stage) - _lasting(low, stage)) / len(high.stages[stage].blocks)


def _fewest(high: Plan, saved: Mapping[int, float], excess: float, more: int) -> set[str]:
    """As few blocks of some stages as hold so much less: first where a block saves the most,
    which is in stages with the most micro-batches in flight."""
    found: set[str] = set()
    for stage in sorted(saved, key=lambda own: -saved[own]):
        for name in _commonest_first(high.stages[stage]):
            if excess <= 0:
                more -= 1
            if excess > 0 or more >= 0:
                excess -= saved[stage]
                found.add(name)
    return found


def _commonest_first(stage: StagePlan) -> list[str]:
    """A stage's blocks, those first of which there are many alike."""
    counts = Counter(block.kind for block in stage.blocks)
    return [block.name for block in sorted(stage.blocks, key=lambda own: -counts[own.kind])]


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


def _names(base: Plan) -> set[str]:
    return {block.name for stage in base.stages for block in stage.blocks}


def _ranks(found: Plan) -> dict[frozenset[int], list[int]]:
    """The stages that each rank runs."""
    stages: dict[frozenset[int], list[int]] = {}
    for number, stage in enumerate(found.stages):
        stages.setdefault(frozenset(stage.devices), []).append(number)
    return stages


def _rank_bytes(found: Plan, stages: Iterable[int]) -> float:
    """What a rank holds for all its stages."""
    own = (found.stages[stage].prediction.memory_bytes for stage in stages)
    return sum(together(own, once=BRIEF).values())


def _lasting(found: Plan, stage: int) -> float:
    """What a stage holds while others of its rank run."""
    own = found.stages[stage].prediction.memory_bytes
    return sum(size for name, size in own.items() if name not in BRIEF)


def _peak(found: Plan) -> int:
    return found.prediction.peak_memory_bytes


def _step(found: Plan) -> float:
    return found.prediction.step_seconds
