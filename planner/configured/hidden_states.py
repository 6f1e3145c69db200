"""Collectives of ZeRO 2 and 3 beside compute: what of them a pass still waits for.

In: a stage's cost with every collective exposed. Out: the cost where parameters are gathered and
gradients are scattered block by block beside the compute of the other blocks, which they slow down;
the first block's are waited for.
"""

from __future__ import annotations

from dataclasses import replace

from ...cost_model.stage_costs import Overlap
from ..pricing.stage_cost import StageCost


def beside_compute(cost: StageCost, num_blocks: int, overlap: Overlap) -> StageCost:
    """The cost of a stage of so many blocks, its states gathered and scattered beside compute."""
    own = cost.seconds
    forward = _exposed(
        own.forward_states, own.forward_compute + own.forward_communication, num_blocks, overlap
    )
    backward = _exposed(
        own.backward_states, own.backward_compute + own.backward_communication, num_blocks, overlap
    )
    return replace(cost, seconds=own._replace(forward_states=forward, backward_states=backward))


def _exposed(states: float, compute: float, num_blocks: int, overlap: Overlap) -> float:
    """Seconds that collectives of ``states`` seconds add to a pass of ``compute`` seconds.

    The first block's are waited for. While the others run, compute goes at 1/slowdown: it
    either outlasts them, (slowdown − 1)/slowdown of their time longer, or ends before them.

    >>> _exposed(4.0, 12.0, 4, Overlap(1.5)), _exposed(4.0, 1.0, 4, Overlap(1.5))
    (2.0, 3.0)
    """
    first = states / num_blocks
    rest = states - first
    slowed = rest * (overlap.slowdown - 1) / overlap.slowdown
    return first + max(slowed, rest - compute)
