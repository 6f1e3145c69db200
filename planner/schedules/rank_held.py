"""Micro-batches that the stages of a pipeline hold when each rank holds the most.

In: a schedule, ranks, stages per rank, micro-batches. Out: for every stage how many micro-batches
whose backward is to come it holds at the moment when its rank holds the most of them for all of
its stages together. What a rank holds then fits in its memory.

>>> rank_held("zbv", 2, 2, 8), rank_held("interleaved", 2, 2, 8)
((3, 2, 2, 1), (3, 2, 2, 1))
"""

from __future__ import annotations

from functools import lru_cache

from ...cost_model.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from .schedules import can_have, compute_orders

MANY_STAGES = 64
"""Of no more stages, twice as many micro-batches are gone through, of more as many: with more
than these no fewer are held."""


@lru_cache(maxsize=4096)
def rank_held(
    name: str, num_ranks: int, num_chunks: int, num_microbatches: int
) -> tuple[int, ...] | None:
    """By stage; None where the schedule cannot have so many."""
    num_stages = num_ranks * num_chunks
    if not can_have(name, num_stages, num_microbatches, num_chunks):
        return None
    times = 2 if num_stages <= MANY_STAGES else 1
    count = min(num_microbatches, times * num_stages)
    found = [0] * num_stages
    for row in compute_orders(name, num_stages, count, num_chunks):
        held: dict[int, int] = {}
        most = 0
        for kind, stage, *_ in row:
            if kind == FORWARD:
                held[stage] = held.get(stage, 0) + 1
            elif kind in (BACKWARD, INPUT_BACKWARD):
                held[stage] -= 1
            if sum(held.values()) > most:
                most = sum(held.values())
                for own, number in held.items():
                    found[own] = number
    return tuple(found)
