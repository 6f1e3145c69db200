"""Orders of asynchronous schedules: weights are updated while micro-batches are under way.

In: how many pipeline ranks and micro-batches, and micro-batches per update. Out: each rank's
compute actions, and REDUCE and STEP right after the last backward of each update. Which
version of the weights an action uses is ``cost_model.actions.weight_versions``. One table
fills the pipeline at its start and drains it at its end; between, it never waits for an update.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...cost_model.actions import BACKWARD, REDUCE, STEP, Action, Row, Table
from .orders import one_forward_one_backward


def updating_1f1b(num_ranks: int, num_microbatches: int, per_update: int = 1) -> Table:
    """1F1B that updates a stage's weights after every ``per_update`` backwards.

    With 1: PipeDream (Harlap et al. 2018, arXiv:1806.03377, section 3.2), whose stages each
    compute a micro-batch's backward with the weights of its forward; and AMPNet (Gaunt et al.
    2017, arXiv:1705.09786, section 3), which uses the newest. AMPNet's workers take whatever
    arrives, backwards first; with at most ``num_ranks`` micro-batches admitted and equal
    stages that is this order. With more: PipeDream-2BW (Narayanan et al. 2021,
    arXiv:2006.09503, section 3.1).
    """
    return tuple(
        tuple(_with_updates(row, num_microbatches, per_update))
        for row in one_forward_one_backward(num_ranks, num_microbatches)
    )


def _with_updates(row: Row, num_microbatches: int, per_update: int) -> Iterator[Action]:
    for action in row:
        yield action
        kind, stage, m, _ = action
        if kind == BACKWARD and ((m + 1) % per_update == 0 or m + 1 == num_microbatches):
            yield Action(REDUCE, stage, m)
            yield Action(STEP, stage, m)


def per_update_of_2bw(num_ranks: int, num_microbatches: int) -> int:
    """The least micro-batches per update with which two versions suffice, that divides all.

    A stage's forward of update k uses version k - 1, which the backwards of update k - 2 must
    have made; 1F1B is ``num_ranks - 1`` forwards ahead of them at most. Source: Narayanan et
    al. 2021 (arXiv:2006.09503), section 3.1: at least as many as there are stages.

    >>> per_update_of_2bw(4, 16), per_update_of_2bw(4, 6), per_update_of_2bw(4, 3)
    (4, 6, 3)
    """
    least = min(num_ranks, num_microbatches)
    return next(g for g in range(least, num_microbatches + 1) if num_microbatches % g == 0)
