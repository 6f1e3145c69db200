"""Moves: changes of a pipeline that place one of its blocks elsewhere.

In: a pipeline and a block. Out: the pipeline after each move, by the move's number, or None if the
result is no pipeline of the space:

    0            the block stays
    1, 2         it joins the stage before or after its own, with the blocks in between
    3 + i        a stage begins with it; the blocks before it keep size i of the stage's devices
    3 + m + i    its stage takes size i of the devices of its own and the stage after (of the
                 stage before, if it is the last)

A stage that loses all of its blocks gives its devices to the stage that they join.
"""

from __future__ import annotations

from autoparallel.placers.space import Space
from autoparallel.planner.inter_op.inter_op import StageChoice

Stages = tuple[StageChoice, ...]


def num_moves(space: Space) -> int:
    return 3 + 2 * len(space.sizes)


def moves(space: Space, stages: Stages, block: int) -> list[Stages | None]:
    """Return the pipelines after each move of ``block``, None for a move that cannot be run.

    Moves: none; the block joins the previous or next stage; a stage of each size is cut there; the
    block's stage gets each size.
    """
    index = next(i for i, stage in enumerate(stages) if stage.stop > block)
    found = [_move_border(stages, index, block + 1, -1), _move_border(stages, index, block, 1)]
    found += [_cut(stages, index, block, size) for size in space.sizes]
    found += [_resize(stages, index, size) for size in space.sizes]
    runnable: list[Stages | None] = [stages]
    for each in found:
        runs = each is not None and each != stages and space.stage_seconds(each) is not None
        runnable.append(each if runs else None)
    return runnable


def _move_border(stages: Stages, index: int, border: int, step: int) -> Stages | None:
    """Move the border between stage ``index`` and the previous (``step`` −1) or next (1) stage to
    block ``border``; an emptied stage is removed. None if there is no such stage."""
    low = index if step > 0 else index - 1
    if low < 0 or low + 1 >= len(stages):
        return None
    one, two = stages[low], stages[low + 1]
    size = one.num_devices + two.num_devices
    if border in (one.start, two.stop):
        pair: Stages = (StageChoice(one.start, two.stop, one.first_device, size),)
    else:
        pair = (
            StageChoice(one.start, border, one.first_device, one.num_devices),
            StageChoice(border, two.stop, two.first_device, two.num_devices),
        )
    return stages[:low] + pair + stages[low + 2 :]


def _cut(stages: Stages, index: int, block: int, size: int) -> Stages | None:
    stage = stages[index]
    if block == stage.start or size >= stage.num_devices:
        return None
    pair = (
        StageChoice(stage.start, block, stage.first_device, size),
        StageChoice(block, stage.stop, stage.first_device + size, stage.num_devices - size),
    )
    return stages[:index] + pair + stages[index + 1 :]


def _resize(stages: Stages, index: int, size: int) -> Stages | None:
    if len(stages) == 1:
        return None
    low = min(index, len(stages) - 2)
    one, two = stages[low], stages[low + 1]
    both = one.num_devices + two.num_devices
    first = size if low == index else both - size
    if not 0 < first < both:
        return None
    pair = (
        StageChoice(one.start, one.stop, one.first_device, first),
        StageChoice(two.start, two.stop, one.first_device + first, both - first),
    )
    return stages[:low] + pair + stages[low + 2 :]
