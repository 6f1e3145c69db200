"""What collectives of states add to the compute that they run beside, block by block.

Written for itself, for the brute force: of the planner nothing is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from brute_force_layouts import Floats

States = Sequence[tuple[Floats, ...]]
"""Of each block seconds of collectives, how much longer compute beside them takes, and, except
once per step, how many of the seconds are copies over the host's link."""


def one_ahead(states: States, compute: Sequence[Floats], moved: Sequence[Floats]) -> Floats:
    """Seconds added to a pass in which each block is gathered while the one before it computes,
    whose activations take the host's link for ``moved``."""
    total = states[0][0].copy()
    for own, kept, each in zip(compute, moved, states[1:], strict=False):
        total += _added(own, kept, [each])
    return total


def ahead_and_behind(
    gather: States, scatter: States, compute: Sequence[Floats], moved: Sequence[Floats]
) -> Floats:
    """Seconds added to a backward: while a block computes, the block before it is gathered and the
    gradients of the block after it are scattered."""
    total = gather[-1][0] + scatter[0][0]
    for at, (own, kept) in enumerate(zip(compute, moved, strict=True)):
        beside = [gather[at - 1]] if at > 0 else []
        beside += scatter[at + 1 : at + 2]
        total = total + _added(own, kept, beside)
    return total


def _added(own: Floats, kept: Floats, beside: States) -> Floats:
    """Seconds that ``beside`` adds to compute: until all is gathered and scattered, and, after the
    activations, all is copied over the host's link."""
    needs, slows, copies = (sum((e[i] for e in beside), np.zeros_like(own)) for i in range(3))
    ends = np.where(own + slows >= needs, own + slows, needs)
    link = np.maximum(own, kept)  # within which activations are copied
    return np.maximum(ends - own, kept + copies - link)


def all_at_once(states: States, compute: Sequence[Floats]) -> Floats:
    """Seconds added to a pass if all blocks are gathered one after the other from its start on.

    Follows the pass block by block. A block's compute begins once the block has arrived and the
    block before it is computed. Until all blocks have arrived, compute runs at a lower rate.
    """
    whole = sum(needs for needs, _ in states)
    lost = sum(slows for _, slows in states)
    share = np.divide(lost, whole, out=np.zeros_like(whole), where=whole > 0)
    now, there = np.zeros_like(whole), np.zeros_like(whole)
    for (needs, _), own in zip(states, compute, strict=True):
        there = there + needs
        now = np.maximum(now, there)
        left = np.maximum(whole - now, 0.0)
        during = left * (1 - share)
        slowly = np.divide(own, 1 - share, out=np.zeros_like(own), where=share < 1)
        now = np.where(own <= during, now + slowly, now + left + own - during)
    return now - sum(compute)
