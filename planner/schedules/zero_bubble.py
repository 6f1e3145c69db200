"""Orders of schedules that split the backward: input gradients first, weight gradients later.

In: the numbers of pipeline ranks, micro-batches and chunks. Out: each rank's compute actions in
order. An ``I`` computes the input gradients that the stage before waits for; its ``W`` computes the
weight gradients, which nothing waits for, and fills bubbles. Sources: Qi et al. 2023, Zero Bubble
Pipeline Parallelism (arXiv:2401.10241); DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ...cost_model.simulator.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
    ActionKind,
    Row,
    Table,
)
from .orders import in_turn, interleaved_rounds


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """Order actions as ZB-H1, 1F1B with split backwards, whose bubble is a third of 1F1B's if F = I
    = W.

    F, I and W are the seconds of a forward, an input backward and a weight backward. Rank ``r``
    warms up as in 1F1B and defers weight gradients by ``r`` micro-batches. With several chunks the
    order is interleaved 1F1B, also as in
    ``torch.distributed.pipelining.ScheduleInterleavedZeroBubble``. Source: Qi et al. 2023
    (arXiv:2401.10241), section 2.1 and figure 3 top.
    """
    return tuple(
        _split_1f1b(rank, num_ranks, num_microbatches, num_chunks, pace=1)
        for rank in range(num_ranks)
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Table:
    """Order actions as ZB-H2: no bubble if F = I = W, for twice the memory of 1F1B.

    F, I and W are the seconds of a forward, an input backward and a weight backward. The warm-up is
    twice ZB-H1's, which fills the wait for the first backward, and weight gradients are deferred
    twice as far. Source: Qi et al. 2023 (arXiv:2401.10241), section 2.2 and figure 3 bottom.
    """
    return tuple(
        _split_1f1b(rank, num_ranks, num_microbatches, 1, pace=2) for rank in range(num_ranks)
    )


def _split_1f1b(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, *, pace: int
) -> Row:
    """Return the row of ``rank`` in 1F1B with split backwards, where a weight backward comes ``pace
    * rank`` input backwards after its own. ``pace`` also multiplies the warm-up."""
    size, turns = interleaved_rounds(num_ranks, num_microbatches, num_chunks)
    last = num_chunks - 1
    order = in_turn(
        tuple(Action(FORWARD, chunk * num_ranks + rank, m) for chunk, m in turns),
        tuple(Action(INPUT_BACKWARD, (last - chunk) * num_ranks + rank, m) for chunk, m in turns),
        warmup=last * size + pace * (num_ranks - 1 - rank),
    )
    return _with_weights(order, behind=pace * rank)


def _with_weights(order: Row, *, behind: int) -> Row:
    """Return a row of forwards and input backwards with each weight backward added, ``behind``
    input backwards after the input backward of its micro-batch."""
    actions: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        actions.append(action)
        if action.kind == INPUT_BACKWARD:
            waiting.append(action._replace(kind=WEIGHT_BACKWARD))
            if len(waiting) > behind:
                actions.append(waiting.popleft())
    return (*actions, *waiting)


def zbv(num_ranks: int, num_microbatches: int) -> Table:
    """Order actions as ZBV, two chunks per rank in a V: no bubble if F = I = W, memory of 1F1B.

    F, I and W are the seconds of a forward, an input backward and a weight backward. Rank ``r`` has
    stages ``r`` and ``2 num_ranks - 1 - r``, so a micro-batch's backward begins on the rank where
    its forward ended. The order is built for at least ``2 num_ranks - 1`` micro-batches; surplus
    actions are removed. Source: Qi et al. 2023 (arXiv:2401.10241), section 6, figure 7; for equal
    F, I and W, ordered as in ``torch.distributed.pipelining.ScheduleZBVZeroBubble``.
    """
    count = max(num_microbatches, 2 * num_ranks - 1)
    return tuple(
        tuple(a for a in _zbv_row(rank, num_ranks, count) if a.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )


def _zbv_row(rank: int, num_ranks: int, count: int) -> Iterator[Action]:
    """Yield the actions of ``rank`` in ZBV with ``count`` micro-batches."""
    down, up = _Chunk(rank), _Chunk(2 * num_ranks - 1 - rank)
    left = num_ranks - rank
    for _ in range(2 * left - 1):
        yield down.forward()
    for _ in range(rank):
        yield from (up.forward(), down.forward())
    for _ in range(left):
        yield from (up.forward(), up.inputs(), up.weights())
    while up.forwards < count:
        if down.forwards < count:
            yield down.forward()
        yield from (down.inputs(), down.weights(), up.forward(), up.inputs(), up.weights())
    for _ in range(rank):
        yield from (down.inputs(), up.inputs())
    for _ in range(left):
        yield from (down.inputs(), down.weights())
    for chunk in (up, down):
        while chunk.weight_backwards < count:
            yield chunk.weights()


class _Chunk:
    """Counter of a stage's actions; each method returns the stage's next action of one kind."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.forwards = self.input_backwards = self.weight_backwards = 0

    def forward(self) -> Action:
        self.forwards += 1
        return Action(FORWARD, self.stage, self.forwards - 1)

    def inputs(self) -> Action:
        self.input_backwards += 1
        return Action(INPUT_BACKWARD, self.stage, self.input_backwards - 1)

    def weights(self) -> Action:
        self.weight_backwards += 1
        return Action(WEIGHT_BACKWARD, self.stage, self.weight_backwards - 1)


def dualpipev(num_ranks: int, num_microbatches: int) -> Table:
    """Order actions as DualPipeV, half of DualPipe: two chunks per rank in a V, whose passes run in
    pairs.

    A pair (forward of one chunk, backward of the other chunk) may overlap communication with
    compute; here its two actions follow each other. Takes at least ``2 num_ranks`` micro-batches.
    Source: github.com/deepseek-ai/DualPipe, ``dualpipe/dualpipev.py``, for the eight phases;
    DeepSeek-V3 (arXiv:2412.19437), section 3.2.1.
    """
    return tuple(
        tuple(_dualpipev_row(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)
    )


def _dualpipev_row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield the actions of ``rank`` in the eight phases of DualPipeV."""
    row = _Pairs(rank, 2 * num_ranks - 1 - rank)
    down, up, after = row.down, row.up, num_ranks - 1 - rank
    for _ in range(2 * after):
        yield row.next(FORWARD, down)
    for _ in range(rank + 1):
        yield from (row.next(FORWARD, down), row.next(FORWARD, up))
    for _ in range(after):
        yield from (row.next(INPUT_BACKWARD, up), *row.oldest(), row.next(FORWARD, up))
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        yield from (row.next(FORWARD, down), row.next(BACKWARD, up))
        yield from (row.next(FORWARD, up), row.next(BACKWARD, down))
    for _ in range(after):
        yield from (row.next(BACKWARD, up), row.next(FORWARD, up), row.next(BACKWARD, down))
    for position in range(2 * (rank + 1)):
        kind: ActionKind = BACKWARD if position < rank + 1 else INPUT_BACKWARD
        yield row.next(kind, down if position % 2 else up)
    for _ in range(after):
        yield from (*row.oldest(), row.next(INPUT_BACKWARD, down))
    while row.waiting:
        yield from row.oldest()


class _Pairs:
    """Number of micro-batches that each of a rank's two chunks (stages ``down`` and ``up``) has
    started, forward and backward, with the rank's deferred weight backwards."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self.counts: dict[tuple[bool, int], int] = {}
        self.waiting: deque[Action] = deque()

    def next(self, kind: ActionKind, stage: int) -> Action:
        key = (kind == FORWARD, stage)
        m = self.counts.get(key, 0)
        self.counts[key] = m + 1
        if kind == INPUT_BACKWARD:
            self.waiting.append(Action(WEIGHT_BACKWARD, stage, m))
        return Action(kind, stage, m)

    def oldest(self) -> tuple[Action, ...]:
        return (self.waiting.popleft(),) if self.waiting else ()
