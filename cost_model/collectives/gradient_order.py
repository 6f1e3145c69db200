"""The order in which gradients are summed, and the seconds of a step with that order.

In: seconds of each block of a model that one rank computes, forward, backward and its update, and
of each sum of gradients. Out: the seconds of a step among many like it.

"backward": sums run as the backward makes their gradients; when all are done the weights are
updated, and the next step begins. "priority": a block is updated when its own sums are done, and
the next forward waits at each block for that block alone, so that sums run beside the next forward,
too. The gradients of the blocks that the forward needs first are the last of the backward, so among
the sums that could run the earliest block's is started first; large sums are cut into parts, so
that it need not wait long for another's end. Sources: Jayarajan et al., "Priority-based Parameter
Propagation for Distributed DNN Training" (P3), MLSys 2019; Peng et al., "A Generic Communication
Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019.

All ranks must start sums in one order, so it is part of the plan: a rank starts a sum when its
gradients and all earlier sums are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..simulator.overlap import Collectives

STEPS = 4
"""Number of simulated training steps, of which the last gives the time of a step."""


class SumSeconds(NamedTuple):
    """Collective that sums gradients across ranks, and its ``seconds``. The gradients are complete
    after the backward of block (layer) number ``block``; −1: after the backward of all blocks."""

    block: int
    seconds: float

    @property
    def needed_by(self) -> int:
        """First block (layer) whose forward may read the parameters that the sum updates."""
        return max(self.block, 0)


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """Seconds of one rank's work, by block (layer): ``forward`` and ``backward`` of one
    micro-batch, ``update`` of the weights once per step. ``slowed_share`` is the share of compute
    speed (0 to 1) that is lost while gradients are summed."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    num_microbatches: int = 1
    slowed_share: float = 0.0


def priority_order(blocks: BlockSeconds, sums: Sequence[SumSeconds]) -> tuple[int, ...]:
    """Return the indices of the collectives ``sums`` in the order of their starts. Whenever the
    links are free, the sum starts that the next forward needs first, of all with complete
    gradients.

    >>> blocks = BlockSeconds((1, 1), (1, 1), (0, 0))
    >>> priority_order(blocks, [SumSeconds(1, 0.5), SumSeconds(1, 2.0), SumSeconds(0, 1.0)])
    (0, 1, 2)
    >>> priority_order(blocks, [*[SumSeconds(1, 0.6)] * 3, SumSeconds(0, 1.0)])
    (0, 1, 3, 2)
    """
    ready_at = _ready_seconds(blocks)
    left, now, order = list(range(len(sums))), 0.0, list[int]()
    while left:
        now = max(now, min(ready_at[sums[number].block] for number in left))
        ready = [number for number in left if ready_at[sums[number].block] <= now]
        best = min(ready, key=lambda number: (sums[number].needed_by, number))
        order.append(best)
        left.remove(best)
        now += sums[best].seconds
    return tuple(order)


def _ready_seconds(blocks: BlockSeconds) -> dict[int, float]:
    """Return for each block (layer) the seconds from the start of the last backward until its
    gradients are complete; key −1 is for all blocks."""
    ends = list(accumulate(reversed(blocks.backward)))
    return {**dict(enumerate(reversed(ends))), -1: ends[-1] if ends else 0.0}


def step_seconds(
    blocks: BlockSeconds, sums: Sequence[SumSeconds], *, overlaps_steps: bool
) -> float:
    """Return the seconds of a training step, one of many in succession. The collectives ``sums``
    start in the given order. With ``overlaps_steps`` the next forward waits at each block only for
    the sums of this block's gradients, without it for all sums.

    >>> blocks = BlockSeconds((1, 1), (1, 1), (0, 0))
    >>> sums = [SumSeconds(1, 1.0), SumSeconds(0, 1.0)]
    >>> step_seconds(blocks, sums, overlaps_steps=False)
    5.0
    >>> step_seconds(blocks, [SumSeconds(0, 1.0)], overlaps_steps=True)
    5.0
    >>> step_seconds(blocks, [SumSeconds(1, 2.0)], overlaps_steps=True)
    4.0
    """
    links = Collectives(blocks.slowed_share, busy_until=0.0)
    done: list[tuple[int, float]] = []
    now, began = 0.0, 0.0
    for _ in range(STEPS):
        began, now = now, _forward(blocks, links, now, done)
        for _ in range(blocks.num_microbatches - 1):
            now += sum(blocks.backward) + sum(blocks.forward)
        now, done = _last_backward(blocks, sums, links, now)
        if not overlaps_steps:
            now = max([now, *(end for _, end in done)]) + sum(blocks.update)
            done = []
    return now - began


def _forward(
    blocks: BlockSeconds, links: Collectives, now: float, done: Sequence[tuple[int, float]]
) -> float:
    """Return the time (seconds) at which a step's first forward ends, if it starts at ``now``.
    ``done`` has (block that needs it, time of its end) of each sum of gradients of the previous
    step; ``links`` holds the collectives that run meanwhile."""
    for block, seconds in enumerate(blocks.forward):
        ends = [end for needed_by, end in done if needed_by == block]
        if ends:
            now = max(now, *ends)
        update = blocks.update[block] if done else 0.0
        now = links.finish(now, update + seconds)
    return now


def _last_backward(
    blocks: BlockSeconds, sums: Sequence[SumSeconds], links: Collectives, now: float
) -> tuple[float, list[tuple[int, float]]]:
    """Return the time at which the step's last backward ends, if it starts at ``now``, and for each
    sum of gradients (block that needs it, time of its end)."""
    done: list[tuple[int, float]] = []
    for block in reversed(range(len(blocks.backward))):
        now = links.finish(now, blocks.backward[block])
        while len(done) < len(sums):
            own = sums[len(done)]
            if own.needed_by < block:
                break
            links.busy_until = max(links.busy_until, now) + own.seconds
            done.append((own.needed_by, links.busy_until))
    return now, done
