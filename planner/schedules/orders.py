"""Orders in which pipeline ranks compute: one short pure function per schedule.

In: the numbers of pipeline ranks, micro-batches and chunks (stages per rank; stage ``s`` is on rank
``s % num_ranks``). Out: each rank's compute actions in order, without messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...cost_model.simulator.actions import (
    BACKWARD,
    FORWARD,
    REDUCE,
    STEP,
    Action,
    ActionKind,
    Edges,
    Row,
    Table,
    Wiring,
    chain,
)


def depths(wiring: Wiring) -> tuple[int, ...]:
    """Return, for each stage, the number of stages on the longest path from it to a last stage,
    both included.

    In a chain it is ``num_stages - stage``, the forwards of 1F1B before its first backward.

    >>> depths(Wiring.of(4, ((0, 1), (1, 3), (2, 3))))
    (3, 2, 2, 1)
    """
    found = [1] * len(wiring.consumers)
    for stage in reversed(range(len(found))):
        found[stage] += max((found[after] for after in wiring.consumers[stage]), default=0)
    return tuple(found)


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """Order all forwards before all backwards. Source: Huang et al. 2019, GPipe, figure 2c."""
    return tuple(
        tuple(Action(FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Action(BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_ranks)
    )


def one_forward_one_backward(
    num_ranks: int, num_microbatches: int, *, eager: int = 1, depth: Sequence[int] = ()
) -> Table:
    """Order actions as 1F1B; ``eager=2`` doubles the forwards of the warm-up.

    ``depth``: for each stage, the number of stages to the last, itself included (a chain by
    default).

    Source: Narayanan et al. 2021 (arXiv:2104.04473), figure 4 top; eager: Zhuang et al. 2023
    (arXiv:2211.05322), section 4.
    """
    return tuple(
        in_turn(
            tuple(Action(FORWARD, stage, m) for m in range(num_microbatches)),
            tuple(Action(BACKWARD, stage, m) for m in range(num_microbatches)),
            warmup=eager * ((depth[stage] if depth else num_ranks - stage) - 1),
        )
        for stage in range(num_ranks)
    )


def inference(num_ranks: int, num_microbatches: int) -> Table:
    """Order the forwards of an inference step."""
    return tuple(
        tuple(Action(FORWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_ranks)
    )


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """Order actions as interleaved 1F1B: each round of micro-batches runs through all chunks in
    turn.

    A rank's warm-up is a round for each chunk but the last, and two forwards per rank after it. A
    round is ``num_ranks`` micro-batches, or more if only then all rounds are equal
    (``round_size``). Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2 and figure 4
    bottom.
    """
    size, turns = interleaved_rounds(num_ranks, num_microbatches, num_chunks)
    return tuple(
        in_turn(
            tuple(Action(FORWARD, chunk * num_ranks + rank, m) for chunk, m in turns),
            tuple(
                Action(BACKWARD, (num_chunks - 1 - chunk) * num_ranks + rank, m)
                for chunk, m in turns
            ),
            warmup=(num_chunks - 1) * size + 2 * (num_ranks - 1 - rank),
        )
        for rank in range(num_ranks)
    )


def round_size(num_ranks: int, num_microbatches: int) -> int:
    """Return the micro-batches per round of interleaved 1F1B if ``num_microbatches // num_ranks``
    rounds (at least one) can be equal; else 0.

    >>> round_size(4, 8), round_size(4, 10), round_size(4, 3), round_size(4, 9), round_size(4, 13)
    (4, 5, 3, 0, 0)
    """
    rounds = max(1, num_microbatches // num_ranks)
    return 0 if num_microbatches % rounds else num_microbatches // rounds


def interleaved_rounds(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of micro-batches per round of interleaved 1F1B, and the (chunk,
    micro-batch) pairs of all rounds in the order in which a rank runs them."""
    size = num_microbatches if num_chunks == 1 else round_size(num_ranks, num_microbatches)
    return size, [
        (chunk, m)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for m in range(first, first + size)
    ]


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """Order all forwards of a rank's first chunk, then of the next; then all backwards in reverse
    order of chunks and micro-batches.

    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism (arXiv:2211.05953), figure 4;
    the backwards in the order of ``torch.distributed.pipelining.ScheduleLoopedBFS``.
    """
    return tuple(
        tuple(
            Action(FORWARD, stage, m)
            for stage in range(rank, num_ranks * num_chunks, num_ranks)
            for m in range(num_microbatches)
        )
        + tuple(
            Action(BACKWARD, stage, m)
            for stage in reversed(range(rank, num_ranks * num_chunks, num_ranks))
            for m in reversed(range(num_microbatches))
        )
        for rank in range(num_ranks)
    )


def in_turn(forwards: Row, backwards: Row, *, warmup: int) -> Row:
    """Return ``warmup`` forwards, then forwards and backwards in turn, then remaining backwards."""
    warmup = min(len(forwards), warmup)
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *itertools.chain.from_iterable(pairs), *backwards[steady:])


def updating_1f1b(num_ranks: int, num_microbatches: int, per_update: int = 1) -> Table:
    """Order actions as 1F1B that updates a stage's weights after every ``per_update`` backwards.

    ``per_update=1``: PipeDream (Harlap et al. 2018, arXiv:1806.03377, section 3.2), where a
    micro-batch's backward uses the weights of its forward, and AMPNet (Gaunt et al. 2017,
    arXiv:1705.09786, section 3), which uses the newest weights. AMPNet's workers run messages as
    they arrive, backwards first; for equal stages and at most ``num_ranks`` micro-batches under way
    this is the same order. More: PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503, section
    3.1).
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
    """Return the least number of micro-batches per update for which two versions of the weights
    suffice.

    It divides the number of micro-batches. Update k's forwards use version k - 1, made after the
    backwards of update k - 2; 1F1B runs at most ``num_ranks - 1`` forwards ahead of backwards.
    Source: Narayanan et al. 2021 (arXiv:2006.09503), section 3.1: at least the number of stages.

    >>> per_update_of_2bw(4, 16), per_update_of_2bw(4, 6), per_update_of_2bw(4, 3)
    (4, 6, 3)
    """
    least = min(num_ranks, num_microbatches)
    return next(g for g in range(least, num_microbatches + 1) if num_microbatches % g == 0)


def chimera(num_ranks: int, num_microbatches: int) -> Table:
    """Order actions as Chimera: two opposite 1F1B pipelines that fill each other's bubbles.

    Micro-batches run in groups of ``num_ranks``: the first half of a group from rank 0 to the last
    rank, the second half from the last rank to rank 0. A group starts in the bubbles at the end of
    the previous group (direct concatenation), whose actions have priority. Source: Li and Hoefler
    2021, Chimera (arXiv:2107.06925), sections 3.1 and 3.5, figures 3 and 7.
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
    """Sort key of one of Chimera's actions: by time slot, then earlier groups of micro-batches
    (``unit``) first, then backwards first."""

    slot: int
    unit: int
    is_forward: bool


def _slots(stage: int, num_ranks: int, count: int) -> Iterator[tuple[int, ActionKind, int]]:
    """Yield (time slot, kind, micro-batch) of a stage's actions in 1F1B with ``count``
    micro-batches, if every action takes one time slot.

    Forwards of a stage with an even number are in even slots, backwards in odd slots; for odd
    numbers it is reversed. In Chimera, if ``num_ranks`` is even, a rank has a stage of each sort,
    so only forwards of one and backwards of the other share slots.
    """
    for m in range(count):
        yield stage + 2 * m, FORWARD, m
        yield num_ranks + 2 * m + num_ranks - 1 - stage, BACKWARD, m


def two_ways(num_ranks: int) -> tuple[tuple[int, ...], Edges]:
    """Return, for Chimera, the part of the model that each stage holds, and the (producer,
    consumer) edges between the stages of its two pipelines.

    >>> two_ways(2)
    ((0, 1, 0, 1), ((0, 1), (2, 3)))
    """
    down = chain(num_ranks)
    up = tuple((source + num_ranks, target + num_ranks) for source, target in down)
    return tuple(range(num_ranks)) * 2, down + up


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
