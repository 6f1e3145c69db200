"""Pipelines that are followed for being cut again into several stages per rank.

In: quests of stages of one size. Out: their drafts that take least then, about. A pipeline that
is not the fastest as it is may be so with shorter stages: it waits less for its first
micro-batch. So the order is that of

    max(Σ q / chunks + max m, Σ q + max m / chunks)      (``costs``)

under what is known of the stages, which are priced in that order (best-first, as in ``quests``):
a rank has all of its work to do, and a micro-batch goes through all stages one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from .quests import TOLERANCE, Draft, Quest

MOST_CHUNKS = 8
"""Stages per rank."""

MOST_LOOPED = 4
MOST_PRICED = 12
"""Pipelines that are followed for this, and that are priced for it."""


def loops(
    quests: Sequence[Quest], step_seconds: Callable[[], float], is_late: Callable[[], bool]
) -> Iterator[tuple[float, Draft]]:
    """Drafts with about what they take cut again, if that is less than the best step so far."""
    heap: list[tuple[float, int, Quest]] = []
    for number, quest in enumerate(quests):
        if quest.tiling.most > 1 and quest.numbers and not is_late():
            quest.look(float("inf"))
            heapq.heappush(heap, (quest.looped_seconds(MOST_CHUNKS), number, quest))
    taken = 0
    for _ in range(MOST_PRICED):
        if not heap or heap[0][0] >= step_seconds() or taken == MOST_LOOPED or is_late():
            return
        least, number, quest = heapq.heappop(heap)
        rival = heap[0][0] if heap else float("inf")
        pipeline = quest.price_looped(MOST_CHUNKS, step_seconds())
        seconds = quest.looped_seconds(MOST_CHUNKS)
        if pipeline is not None and seconds <= max(least, rival) * (1 + TOLERANCE):
            taken += 1
            yield seconds, Draft(quest.rows, pipeline)
            continue
        quest.look(float("inf"))
        heapq.heappush(heap, (quest.looped_seconds(MOST_CHUNKS), number, quest))
