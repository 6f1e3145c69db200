"""What a schedule's stages hold at once: micro-batches by what of their backward is left.

In: a schedule, how many stages and micro-batches. Out: for each stage the pairs (micro-batches
whose backward is to come, micro-batches of which only the gradients of weights are), as many of
each as are held together at some time, without pairs that another one covers. A schedule that
does not split backwards has one pair, with none of the latter.

>>> halves("1f1b", 1, 3, 8), halves("zb-h1", 3, 3, 8), halves("zb-h1", 1, 3, 8)
(((1, 0),), ((3, 0), (2, 1)), ((1, 2), (0, 3)))
"""

from __future__ import annotations

from functools import lru_cache

from ...cost_model.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from .catalogue import Size
from .schedules import compute_orders, find_schedule, in_flight

Halves = tuple[tuple[int, int], ...]

MANY_TIMES = 4
"""With more micro-batches than so many per stage, no more are held: a table need not be longer."""


@lru_cache(maxsize=64)
def splits(name: str) -> bool:
    """Whether a schedule puts gradients of weights off.

    >>> splits("zb-h2"), splits("eager-1f1b")
    (True, False)
    """
    info = find_schedule(name)
    orders = info.orders(Size(2, 4, info.chunks[0]))
    return any(action.kind == WEIGHT_BACKWARD for row in orders for action in row)


@lru_cache(maxsize=65536)
def halves(name: str, depth: int, num_stages: int, num_microbatches: int) -> Halves:
    """Of a stage with ``depth`` stages to come, itself included, one stage per rank."""
    if not splits(name):
        return ((in_flight(name, depth, num_stages, num_microbatches), 0),)
    if num_stages == 1:
        return ((1, 0),)
    num_stages = max(num_stages, depth)
    found = stage_halves(name, num_stages, min(num_microbatches, MANY_TIMES * num_stages))
    return found[num_stages - depth]


@lru_cache(maxsize=1024)
def stage_halves(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[Halves, ...]:
    """Of every stage, by its table."""
    held = [[0, 0] for _ in range(num_stages)]
    seen: list[set[tuple[int, int]]] = [set() for _ in range(num_stages)]
    for row in compute_orders(name, num_stages, num_microbatches, num_chunks):
        for kind, stage, *_ in row:
            own = held[stage]
            if kind == FORWARD:
                own[0] += 1
            elif kind in (BACKWARD, INPUT_BACKWARD):
                own[0] -= 1
                own[1] += kind == INPUT_BACKWARD
            elif kind == WEIGHT_BACKWARD:
                own[1] -= 1
            seen[stage].add((own[0], own[1]))
    return tuple(_largest(each) for each in seen)


def _largest(pairs: set[tuple[int, int]]) -> Halves:
    found: list[tuple[int, int]] = []
    for waiting, late in sorted(pairs, reverse=True):
        if not found or late > found[-1][1]:
            found.append((waiting, late))
    return tuple(found)


def is_split(pairs: Halves) -> bool:
    """Whether gradients of weights are put off."""
    return any(late for _, late in pairs)


def most_held(pairs: Halves) -> int:
    """Micro-batches at once, of either sort."""
    return max(waiting + late for waiting, late in pairs)


def held_bytes(pairs: Halves, kept_bytes: float, late_bytes: float) -> float:
    """The most that is held at once, where a micro-batch keeps so much before either half.

    >>> held_bytes(((3, 0), (2, 1)), 10.0, 20.0)
    40.0
    """
    return max(waiting * kept_bytes + late * late_bytes for waiting, late in pairs)
