"""The order of sums of gradients: worked examples, and a simulation in small steps of time."""

from __future__ import annotations

import random

import pytest
from random_suites import seeds

from autoparallel.cost_model.collectives.gradient_order import (
    BlockSeconds,
    SumSeconds,
    priority_order,
    step_seconds,
)


def ticked(blocks: BlockSeconds, sums: list[SumSeconds], *, overlaps_steps: bool) -> int:
    """The step by brute force: whole seconds pass one after the other, nothing is slowed.

    In each the links work on the first sum that is not done, if its gradients are there, and the
    device on the next piece of compute, if that need not wait.
    """
    number, micro = len(blocks.forward), blocks.num_microbatches
    ends: list[int] = []
    left: list[list[float]] = []  # seconds of each sum that has been begun in any step
    waiting: list[SumSeconds] = []
    made: set[int] = set()
    work: list[tuple[str, int, float]] = []
    now = 0
    while len(ends) < 6:
        if not work:
            work = [("forward", b, s) for b, s in enumerate(blocks.forward)]
            for _ in range(micro - 1):
                work += [("free", 0, sum(blocks.backward) + sum(blocks.forward))]
            work += [("backward", b, blocks.backward[b]) for b in reversed(range(number))]
            if not overlaps_steps:
                work += [("wait", 0, 0.0), ("free", 0, sum(blocks.update))]
            elif ends:
                work = [
                    (kind, b, s + (blocks.update[b] if kind == "forward" else 0))
                    for kind, b, s in work
                ]
        # what takes no time
        while work:
            kind, block, seconds = work[0]
            pending = [own for own in waiting if own.needed_by == block]
            if kind == "wait" and waiting:
                break
            if kind == "forward" and pending:
                break
            if seconds > 0:
                break
            work.pop(0)
            if kind == "backward":
                made.add(block)
                if block == number - 1:
                    waiting, left = list(sums), [[own.seconds] for own in sums]
        if not work:
            ends.append(now)
            made = {-1, *range(number)} if overlaps_steps else set()
            continue
        kind, block, seconds = work[0]
        can_compute = seconds > 0 and not (
            kind == "forward" and any(own.needed_by == block for own in waiting)
        )
        can_send = bool(waiting) and (waiting[0].needed_by in made)
        if can_send:
            left[0][0] -= 1
        if can_compute:
            work[0] = (kind, block, seconds - 1)
        now += 1
        if can_send and left[0][0] <= 0:
            waiting.pop(0)
            left.pop(0)
        if can_compute and work[0][2] <= 0:
            work.pop(0)
            if kind == "backward":
                if block == number - 1:
                    made = set()
                    waiting, left = list(sums), [[own.seconds] for own in sums]
                made.add(block)
        if not work:
            ends.append(now)
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_a_step_takes_what_a_simulation_second_by_second_says(
    seed: int, overlaps_steps: bool
) -> None:
    rng = random.Random(seed)
    number = rng.randint(1, 4)

    def seconds(least: int = 1) -> tuple[float, ...]:
        return tuple(float(rng.randint(least, 4)) for _ in range(number))

    blocks = BlockSeconds(seconds(), seconds(), seconds(0), rng.randint(1, 2))
    sums = [
        SumSeconds(block, float(rng.randint(1, 6)))
        for block in reversed(range(number))
        for _ in range(rng.randint(1, 2))
    ]
    if overlaps_steps:
        sums = [sums[at] for at in priority_order(blocks, sums)]
    found = step_seconds(blocks, sums, overlaps_steps=overlaps_steps)
    assert found == ticked(blocks, sums, overlaps_steps=overlaps_steps)


def test_a_large_late_sum_lets_small_early_ones_pass_when_it_is_cut() -> None:
    """Two blocks. The second one's sum of 8 seconds is ready after 1 second, the first one's of 1
    after 2; a forward takes 1 + 6, of which the second block's part waits for its own sum.

    Whole: the sums end 9 and 10 seconds after the backward began; the forward of the first block
    begins at 10, that of the second ends at 17. In parts of 1 second: the first part ends at 2,
    then the first block's sum at 3, the last part at 10; the first forward ends at 4, and the
    second goes from 10 to 16.
    """
    blocks = BlockSeconds((1, 6), (1, 1), (0, 0))
    whole = [SumSeconds(1, 8.0), SumSeconds(0, 1.0)]
    parts = [*[SumSeconds(1, 1.0)] * 8, SumSeconds(0, 1.0)]
    order = priority_order(blocks, parts)
    assert order == (0, 8, *range(1, 8))
    ordered = [parts[at] for at in order]
    assert step_seconds(blocks, whole, overlaps_steps=True) == 17.0
    assert step_seconds(blocks, ordered, overlaps_steps=True) == 16.0
    assert step_seconds(blocks, whole, overlaps_steps=False) == 17.0


def test_compute_beside_sums_is_slowed() -> None:
    """The sum of 4 seconds begins with the backward's second half: 1 second of compute takes 2
    beside it, and 1 of the next forward's 2 takes the other 2."""
    blocks = BlockSeconds((0, 2), (1, 1), (0, 0), slowed_share=0.5)
    sums = [SumSeconds(1, 4.0)]
    assert step_seconds(blocks, sums, overlaps_steps=True) == 1 + 4 + 2
    slower = BlockSeconds((2, 0), (1, 1), (0, 0), slowed_share=0.5)
    assert step_seconds(slower, sums, overlaps_steps=True) == 1 + 4 + 1
