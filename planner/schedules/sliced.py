"""TeraPipe: the sequences of a micro-batch pass the pipeline in slices.

In: ranks, micro-batches, slices. Out: each rank's compute actions in order. Under causal attention
a position needs only earlier positions, so a slice can go on to the next stage while its stage
computes the next slice; the keys and values of earlier slices stay in the stage, and their
gradients come from later slices, whose backwards therefore run first. Source: Li et al. 2021,
TeraPipe (arXiv:2102.07988), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...cost_model.simulator.actions import BACKWARD, FORWARD, Action, Table


def terapipe(num_ranks: int, num_microbatches: int, num_slices: int) -> Table:
    """Order, on each rank, all forwards in the order of micro-batches and slices, then all
    backwards, each micro-batch's last slice first."""
    units = [(m, part) for m in range(num_microbatches) for part in range(num_slices)]
    back = [(m, part) for m in range(num_microbatches) for part in reversed(range(num_slices))]
    return tuple(
        (
            *(Action(FORWARD, stage, m, part) for m, part in units),
            *(Action(BACKWARD, stage, m, part) for m, part in back),
        )
        for stage in range(num_ranks)
    )


def slice_lengths(
    seconds: Callable[[int, int], float],
    length: int,
    num_stages: int,
    *,
    granularity: int = 1,
    num_sequences: int = 1,
) -> tuple[int, ...]:
    """Return the lengths of a sequence's slices that minimize the step's seconds: the sum of a
    stage's times for all slices + (num_stages - 1) · the longest time.

    ``seconds(n, before)``: seconds of a stage for the forward and backward of ``n`` positions after
    ``before`` others. All ``num_sequences`` sequences are cut alike, so the sum counts that often.
    Lengths are multiples of ``granularity``.

    Source: Li et al. 2021 (arXiv:2102.07988), equation 5 and algorithm 1: for every limit on the
    longest slice, dynamic programming finds the cheapest cut within it; limits ascend until the
    limit alone costs more than the best cut so far.

    >>> slice_lengths(lambda n, before: 1.0 + n, 8, 5, granularity=2)
    (2, 2, 2, 2)
    >>> slice_lengths(lambda n, before: 1.0 + n, 8, 1, granularity=2)
    (8,)
    """
    if length < 1 or granularity < 1 or length % granularity:
        raise ValueError(f"{length} positions are not slices of multiples of {granularity}")
    count = length // granularity
    times = [
        [
            seconds((end - start) * granularity, start * granularity)
            for end in range(start + 1, count + 1)
        ]
        for start in range(count)
    ]
    best: tuple[float, tuple[int, ...]] | None = None
    for limit in sorted({each for row in times for each in row}):
        if best is not None and (num_stages - 1) * limit >= best[0]:
            break
        cut = _cheapest(times, limit)
        if cut is None:
            continue
        total, ends, longest = cut
        cost = num_sequences * total + (num_stages - 1) * longest
        if best is None or cost < best[0]:
            best = cost, ends
    assert best is not None, "the whole sequence is one slice under the largest limit"
    starts = (0, *best[1][:-1])
    return tuple((end - start) * granularity for start, end in zip(starts, best[1], strict=True))


def _cheapest(
    times: Sequence[Sequence[float]], limit: float
) -> tuple[float, tuple[int, ...], float] | None:
    """Return the cut of a sequence with the least sum of times among cuts with no slice above
    ``limit`` seconds, as (sum, ends of slices, longest time); None without any.

    ``times[start][k]`` is the time of the slice from ``start`` to ``start + 1 + k``.
    """
    count = len(times)
    found: list[tuple[float, int] | None] = [None] * count + [(0.0, count)]
    for start in reversed(range(count)):
        for steps, time in enumerate(times[start], start=1):
            rest = found[start + steps]
            if time <= limit and rest is not None:
                total = time + rest[0]
                if (own := found[start]) is None or total < own[0]:
                    found[start] = total, start + steps
    if found[0] is None:
        return None
    ends, longest, at = [], 0.0, 0
    while at < count:
        step = found[at]
        assert step is not None
        longest = max(longest, times[at][step[1] - at - 1])
        at = step[1]
        ends.append(at)
    return found[0][0], tuple(ends), longest
