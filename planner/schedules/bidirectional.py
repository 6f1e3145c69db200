"""Orders of schedules whose micro-batches enter at both ends of the pipeline.

In: how many pipeline ranks and micro-batches. Out: each rank's compute actions in order. With
D ranks, stages 0 to D-1 are the pipeline down, stage ``s`` on rank ``s``, and stages D to 2D-1
the pipeline up, stage ``D + s`` on rank ``D-1-s``. Both compute part ``s`` of the model: each
rank holds two parts, and the gradients of the two replicas of a part are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...cost_model.actions import BACKWARD, FORWARD, Action, ActionKind, Edges, Table, chain


def chimera(num_ranks: int, num_microbatches: int) -> Table:
    """Two 1F1B pipelines in opposite directions, whose actions fall into each other's gaps.

    Micro-batches go in units of ``num_ranks``, the first half of a unit down and the second up;
    where forward and backward take one slot each and ``num_ranks`` is even, no two actions of
    a unit are due on a rank at the same time. A unit begins in the gaps at the end of the one
    before (direct concatenation), and gives way to it. Source: Li and Hoefler 2021, Chimera
    (arXiv:2107.06925), sections 3.1 and 3.5, figures 3 and 7.
    """
    due: list[list[tuple[_Due, Action]]] = [[] for _ in range(num_ranks)]
    for unit, first in enumerate(range(0, num_microbatches, num_ranks)):
        count = min(num_ranks, num_microbatches - first)
        down = (count + 1) // 2
        for stage in range(num_ranks):
            for slot, kind, m in _slots(stage, num_ranks, down):
                at = _Due(slot + 2 * num_ranks * unit, unit, kind == FORWARD)
                due[stage].append((at, Action(kind, stage, first + m)))
            for slot, kind, m in _slots(stage, num_ranks, count - down):
                at = _Due(slot + 2 * num_ranks * unit, unit, kind == FORWARD)
                action = Action(kind, num_ranks + stage, first + down + m)
                due[num_ranks - 1 - stage].append((at, action))
    return tuple(tuple(action for _, action in sorted(row)) for row in due)


class _Due(NamedTuple):
    """When an action is due: by slot, an earlier unit first, its backwards first."""

    slot: int
    unit: int
    is_forward: bool


def _slots(stage: int, num_ranks: int, count: int) -> Iterator[tuple[int, ActionKind, int]]:
    """(slot, kind, micro-batch) of 1F1B where every action takes one slot.

    Micro-batches enter in every other slot, as they leave. Forwards of a stage are in slots of
    its parity, backwards in the others, and with the other direction it is the reverse: only
    forwards and backwards of the two share a parity, and up to ``num_ranks / 2`` micro-batches
    those are over before these begin.
    """
    for m in range(count):
        yield stage + 2 * m, FORWARD, m
        yield num_ranks + 2 * m + num_ranks - 1 - stage, BACKWARD, m


def two_ways(num_ranks: int) -> tuple[tuple[int, ...], Edges]:
    """The part of each stage and the edges of both pipelines.

    >>> two_ways(2)
    ((0, 1, 0, 1), ((0, 1), (2, 3)))
    """
    down = chain(num_ranks)
    up = tuple((source + num_ranks, target + num_ranks) for source, target in down)
    return tuple(range(num_ranks)) * 2, down + up
