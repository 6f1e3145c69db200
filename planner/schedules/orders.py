"""The orders in which pipeline ranks compute, one short pure function per schedule.

In: how many pipeline ranks, micro-batches and chunks (stages per rank; stage ``s`` is on rank
``s % num_ranks``). Out: each rank's compute actions in order, with nothing sent or received.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ...cost_model.actions import BACKWARD, FORWARD, Action, Row, Table, Wiring


def depths(wiring: Wiring) -> tuple[int, ...]:
    """For each stage how many stages the longest way from it to an end has, itself included.

    In a chain ``num_stages - stage``: 1F1B starts as many micro-batches before it goes back.

    >>> depths(Wiring.of(4, ((0, 1), (1, 3), (2, 3))))
    (3, 2, 2, 1)
    """
    found = [1] * len(wiring.consumers)
    for stage in reversed(range(len(found))):
        found[stage] += max((found[after] for after in wiring.consumers[stage]), default=0)
    return tuple(found)


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards. Source: Huang et al. 2019, GPipe, figure 2c."""
    return tuple(
        tuple(Action(FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Action(BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_ranks)
    )


def one_forward_one_backward(
    num_ranks: int, num_microbatches: int, *, eager: int = 1, depth: Sequence[int] = ()
) -> Table:
    """1F1B; ``eager=2`` warms up with twice as many forwards.

    ``depth`` of each stage, see ``depths``; that of a chain by default.

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
    """Forwards only."""
    return tuple(
        tuple(Action(FORWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_ranks)
    )


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """1F1B over the chunks of each rank: micro-batches go in rounds through chunk after chunk.

    A rank warms up with the rounds that its later chunks need, and twice its distance to the
    last rank. A round is ``num_ranks`` micro-batches, or equal parts of what does not divide.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2 and figure 4 bottom.
    """
    size, turns = rounds(num_ranks, num_microbatches, num_chunks)
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
    """The micro-batches of one round of interleaved 1F1B; 0 where rounds cannot be equal.

    >>> round_size(4, 8), round_size(4, 10), round_size(4, 3), round_size(4, 9), round_size(4, 13)
    (4, 5, 3, 0, 0)
    """
    rounds = max(1, num_microbatches // num_ranks)
    return 0 if num_microbatches % rounds else num_microbatches // rounds


def rounds(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[int, list[tuple[int, int]]]:
    """The size of a round, and (chunk, micro-batch) in the order in which rounds take them."""
    size = num_microbatches if num_chunks == 1 else round_size(num_ranks, num_microbatches)
    return size, [
        (chunk, m)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for m in range(first, first + size)
    ]


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Table:
    """All forwards chunk by chunk, then all backwards from the last chunk, last micro-batch first.

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
    """``warmup`` forwards, then forward and backward in turn, then the backwards left."""
    warmup = min(len(forwards), warmup)
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *chain.from_iterable(pairs), *backwards[steady:])
