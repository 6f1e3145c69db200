"""What a pipeline takes at least, whatever its schedule.

In: the figures of its stages (forward, backward, receive forward, receive backward, end of the
step; where backwards are split the second is the first half, and a sixth the weights'), how many
micro-batches, which stage needs which. Out: a lower bound of its step.

A stage computes nothing before the first micro-batch has come through all that it needs; then
it computes all forwards and backwards of all micro-batches; after the last of these there is
its own end of the step, or the way back of that micro-batch through the stages before it and
their ends:

    there_i = max over p needed by i of  there_p + f_p + receive_pi
    back_i  = max(e_i, max over p of  receive backward_pi + b_p + back_p)
    step   >= max over i of  there_i + N·(f_i + b_i) + back_i

With backwards split into b and the weights' w, which others do not wait for:

    next_i = max over p of  receive backward_pi + b_p + max(w_p + e_p, next_p)
    step   >= max over i of  there_i + N·(f_i + b_i) + max(N·w_i + e_i, next_i)

This holds for chains and graphs, for any order of a stage's actions, and however messages
share a channel: they only come later then. Figures may be arrays, of many pipelines at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WeightedEdges = Sequence[tuple[int, int, float]]


def least_seconds(figures: Sequence[Any], count: int, edges: WeightedEdges | None = None) -> Any:
    """The bound. ``figures[stage]`` are the five or six; ``edges`` are those of
    ``branches.stage_edges``.

    >>> float(least_seconds([(1, 2, 0, 0, 1), (2, 4, 0.5, 0.5, 1)], 3))
    23.0
    """
    before: list[list[tuple[int, float]]] = [[] for _ in figures]
    chained = [(target - 1, target, 1.0) for target in range(1, len(figures))]
    for source, target, share in chained if edges is None else edges:
        before[target].append((source, share))
    there: list[Any] = []
    back: list[Any] = []
    least: Any = 0.0
    for stage, (forward, backward, receive, receive_backward, end, *late) in enumerate(figures):
        weights = late[0] if late else 0.0
        arrived, after = 0.0 * forward, 0.0 * end
        for source, share in before[stage]:
            arrived = np.maximum(arrived, there[source] + figures[source][0] + share * receive)
            returned = share * receive_backward + figures[source][1] + back[source]
            after = np.maximum(after, returned)
        there.append(arrived)
        back.append(np.maximum(weights + end, after))
        ended = np.maximum(count * weights + end, after)
        least = np.maximum(least, arrived + count * (forward + backward) + ended)
    return least
