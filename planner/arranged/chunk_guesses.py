"""About what pipelines would take if their ranks had several stages (chunks) each.

In: pipelines of one stage per rank, the blocks' FLOPs, the schedules that are allowed. Out: the
ways to cut them that take least. A stage's seconds are shared out over its blocks by their FLOPs,
a chunk takes what its blocks do, and the schedule is simulated. What cannot be among the fastest
is not simulated: a way takes no less than its busiest rank,

    T >= F before it + N (F + B) of its chunks + B behind it + the end of the step,

where "before" are the forwards and messages that its first stage waits for with the first
micro-batch, and "behind" the backwards and messages from that stage on with the last one. A
schedule that puts gradients of weights off may have them done meanwhile: then T is no less than
without B behind it, nor than with B less these gradients.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from operator import add, itemgetter

import numpy as np

from ...cost_model.simulator import step_seconds
from ...cost_model.stage_costs import StageCosts
from ..errors import UsageError
from ..pricing.step import known_schedule
from ..requests.request import MOST_CHUNKS
from ..schedules.held import splits
from ..schedules.orders import round_size
from ..schedules.schedules import find_schedule, parts_of_ranks
from ..search.report_plan import Candidate
from ..summary import schedule_text
from .balanced import Floats, balanced, evened

MOST_ACTIONS = 16_384
"""Stages times micro-batches that are simulated here."""

NUM_CHUNKS = (*range(2, 5), 6, MOST_CHUNKS)
FEW_CHUNKS, MOST_STAGES = 4, 128
"""Numbers of stages per rank that are tried; more than a few only where that makes no more stages
than this, as the work of pricing and simulating a pipeline grows with them."""

ROUNDING = 1e-9
"""A bound is below what is simulated by so much, as both are sums of rounded numbers."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of a chunk; ``late`` of its backward are gradients of weights."""

    forward: float
    backward: float
    late: float
    step: float


@dataclass(frozen=True, eq=False)
class Base:
    """A candidate to cut, what the blocks up to each take of the figures of ``Share``, and its
    slowest message, forward and backward."""

    candidate: Candidate
    sums: Floats
    sent: tuple[float, float]

    @staticmethod
    def of(candidate: Candidate, flops: Floats) -> Base:
        """By stage a block takes as much as its share of the stage's FLOPs."""
        costs = [(answer.cost, answer) for _, answer in candidate.answers]
        own = [np.zeros((1, 4))]
        for (cost, answer), stage in zip(costs, candidate.stages, strict=True):
            weights = flops[stage.start : stage.stop]
            weights = weights if weights.any() else np.ones_like(weights)
            late = answer.table.weight_grads(answer.run)[0]
            figures = (cost.forward_seconds, cost.backward_seconds, late, cost.step_seconds)
            own.append(np.outer(weights / weights.sum(), figures))
        sent = [cost.receive_seconds for cost, _ in costs]
        slowest = max(there for there, _ in sent), max(back for _, back in sent)
        return Base(candidate, np.concatenate(own).cumsum(axis=0), slowest)

    def shares(self, starts: Sequence[int]) -> tuple[Share, ...]:
        """What the chunks that begin at these blocks take."""
        ends = self.sums[[*starts, len(self.sums) - 1]]
        return tuple(Share(*own) for own in np.diff(ends, axis=0).tolist())


@dataclass(frozen=True)
class Way:
    """A candidate cut into so many stages per rank, under a schedule, and what these take.

    ``starts`` are the blocks that they begin with.
    """

    base: Base
    schedule: str
    chunks: int
    starts: tuple[int, ...]
    costs: tuple[Share, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.base.candidate.stages)

    @property
    def num_microbatches(self) -> int:
        return self.base.candidate.num_microbatches

    @property
    def summary(self) -> str:
        return self.base.candidate.summary_under(schedule_text(self.schedule, self.chunks))


@dataclass(frozen=True, order=True)
class Guess:
    """A way, and about what its step would take. Of equally fast ones the first counts."""

    seconds: float
    number: int
    way: Way = field(compare=False)


def fastest(
    bases: Iterable[Candidate], schedules: Sequence[str], flops: Sequence[float], *,
    most: int, bar: float, numbers: Sequence[int] = NUM_CHUNKS,
) -> list[Guess]:  # fmt: skip
    """The ``most`` guesses that take least, all less than ``bar`` seconds, the best first.

    ``flops`` are those of the blocks, ``numbers`` of stages per rank.
    """
    found: list[Guess] = []
    every = [
        (least_seconds(way), number, way)
        for number, way in enumerate(ways(bases, schedules, flops, numbers))
    ]
    for least, number, way in sorted(every, key=itemgetter(0)):
        limit = found[most - 1].seconds if len(found) >= most else bar
        if least > limit or least >= bar:
            break
        try:
            seconds = about(way)
        except UsageError:
            continue
        if seconds < bar:
            insort(found, Guess(seconds, number, way))
            found = _once(found)
    return found[:most]


def _once(found: Sequence[Guess]) -> list[Guess]:
    """Of the same cut at other blocks only the fastest."""
    once: dict[object, Guess] = {}
    for guess in found:
        own = guess.way
        once.setdefault((id(own.base), own.schedule, own.chunks), guess)
    return list(once.values())


def ways(
    bases: Iterable[Candidate], schedules: Sequence[str], flops: Sequence[float],
    numbers: Sequence[int] = NUM_CHUNKS,
) -> Iterator[Way]:  # fmt: skip
    """Every way to cut the candidates that is not too large, or the only one asked for."""
    weights = np.array(flops)
    starts: dict[int, tuple[int, ...]] = {}
    evenly: dict[object, tuple[int, ...]] = {}
    for base in (Base.of(each, weights) for each in bases):
        ranks, count = len(base.candidate.stages), base.candidate.num_microbatches
        for name in schedules:
            low, high = find_schedule(name).chunks
            for chunks in numbers:
                number = ranks * chunks
                is_few = chunks <= FEW_CHUNKS or number <= MOST_STAGES
                is_few = is_few and number * count <= MOST_ACTIONS
                can_be = low <= chunks <= high and number <= len(flops)
                if can_be and (is_few or len(numbers) == 1):
                    if number not in starts:
                        starts[number] = balanced(flops, number)
                    even, parts = starts[number], parts_of_ranks(name, ranks, chunks)
                    if (number, parts) not in evenly:
                        evenly[number, parts] = evened(flops, even, parts)
                    for own in dict.fromkeys((even, evenly[number, parts])):
                        yield Way(base, name, chunks, own, base.shares(own))


def about(way: Way) -> float:
    """What the step takes, about. Raises UsageError where the schedule cannot be."""
    step = partial(_simulated, way)
    seconds = extrapolated(step, way.num_ranks, way.chunks, way.num_microbatches)
    return max(seconds, least_seconds(way))


def extrapolated(
    step: Callable[[int], float], num_ranks: int, chunks: int, num_microbatches: int
) -> float:
    """``step(num_microbatches)``, from two shorter ones if there are many micro-batches.

    What a micro-batch adds is the same once all stages are full: as many micro-batches as two
    and three times the stages are simulated, and the rest goes on as between them.
    """
    few, many = _simulated_numbers(num_ranks, chunks, num_microbatches)
    if num_microbatches <= few + many:
        return step(num_microbatches)
    less, more = step(few), step(many)
    return more + (more - less) / (many - few) * (num_microbatches - many)


def _simulated_numbers(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[int, int]:
    size = chunks * (round_size(num_ranks, num_microbatches) or num_microbatches)
    return 2 * size, 3 * size


def _simulated(way: Way, num_microbatches: int) -> float:
    """The step of so many micro-batches. Raises UsageError."""
    own = way.costs
    schedule = known_schedule(way.schedule, len(own), num_microbatches, way.chunks)
    return float(
        step_seconds(
            schedule,
            StageCosts(
                [each.forward for each in own],
                [each.backward for each in own],
                send_seconds=[way.base.sent[0]] * (len(own) - 1),
                send_backward_seconds=[way.base.sent[1]] * (len(own) - 1),
                step_seconds=[each.step for each in own],
                weight_backward_seconds=[each.late for each in own],
            ),
        )
    )


def least_seconds(way: Way) -> float:
    """What ``about`` is not below."""
    count, costs, sent = way.num_microbatches, way.costs, way.base.sent
    parts = parts_of_ranks(way.schedule, way.num_ranks, way.chunks)
    rank_of = {stage: rank for rank, stages in enumerate(parts) for stage in stages}
    order = [rank_of[stage] for stage in range(len(rank_of))]
    is_split = splits(way.schedule)
    back = [each.backward - each.late if is_split else each.backward for each in costs]
    before = _waits(order, [each.forward for each in costs], sent[0])
    behind = _waits(order, back, sent[1])
    steps = [sum(costs[stage].step for stage in stages) for stages in parts]
    ends = []
    for step, stages in zip(steps, parts, strict=True):
        own, first = [costs[stage] for stage in stages], min(stages)
        work = count * sum(each.forward + each.backward for each in own)
        ends.append(before[first] + work + step)
        if is_split:
            work -= count * sum(each.late for each in own)
        ends.append(before[first] + work + behind[first] + steps[order[0]])
    return max(ends) * (1 - ROUNDING)


def _waits(order: Sequence[int], seconds: Sequence[float], sent: float) -> list[float]:
    """For each stage what the stages before it take, one after the other, and their messages."""
    moves = [sent if rank != other else 0.0 for rank, other in pairwise(order)]
    return list(accumulate(map(add, seconds, moves), initial=0.0))
