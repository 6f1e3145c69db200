"""What collectives of states add to the compute that they run beside, block by block.

Written for itself, for the brute force: of the planner nothing is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from brute_force_layouts import Floats

States = Sequence[tuple[Floats, Floats]]
"""Of each block seconds of collectives, and how much longer compute beside them takes."""


def one_ahead(states: States, compute: Sequence[Floats]) -> Floats:
    """Seconds added to a pass in which each block is gathered while the one before it computes."""
    total = states[0][0].copy()
    for (needs, slows), own in zip(states[1:], compute[:-1], strict=True):
        total += np.where(own + slows >= needs, slows, needs - own)
    return total


def ahead_and_behind(gather: States, scatter: States, compute: Sequence[Floats]) -> Floats:
    """Seconds added to a backward: while a block computes, the block before it is gathered and the
    gradients of the block after it are scattered."""
    total = gather[-1][0] + scatter[0][0]
    for at, own in enumerate(compute):
        beside = [gather[at - 1]] if at > 0 else []
        beside += scatter[at + 1 : at + 2]
        needs = sum((each[0] for each in beside), np.zeros_like(own))
        slows = sum((each[1] for each in beside), np.zeros_like(own))
        total = total + np.where(own + slows >= needs, slows, needs - own)
    return total


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
