"""About what pipelines would take if their ranks had several stages (chunks) each.

In: pipelines of one stage per rank, the schedules that are allowed. Out: the ways to cut them
that take least. A rank's seconds are shared out over its chunks and the schedule is simulated.
What cannot be among the fastest is not simulated: a way takes no less than its busiest rank,

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
from operator import itemgetter

from ...cost_model.simulator import step_seconds
from ...cost_model.stage_costs import StageCosts
from ..errors import UsageError
from ..pricing.step import known_schedule
from ..schedules.held import splits
from ..schedules.orders import round_size
from ..schedules.schedules import find_schedule, parts_of_ranks
from ..search.loops import MOST_CHUNKS
from ..search.report_plan import Candidate

MOST_ACTIONS = 16_384
"""Stages times micro-batches that are simulated here."""

ROUNDING = 1e-9
"""A bound is below what is simulated by so much, as both are sums of rounded numbers."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of a rank, or of one of its chunks; ``late`` of its backward are gradients of
    weights."""

    forward: float
    backward: float
    late: float
    step: float

    def of(self, count: int) -> Share:
        """One of ``count`` equal parts."""
        late, step = self.late / count, self.step / count
        return Share(self.forward / count, self.backward / count, late, step)


@dataclass(frozen=True)
class Base:
    """A candidate to cut, what its ranks take, and its slowest message, forward and backward."""

    candidate: Candidate
    ranks: tuple[Share, ...]
    sent: tuple[float, float]

    @staticmethod
    def of(candidate: Candidate) -> Base:
        costs = [(answer.cost, answer) for _, answer in candidate.answers]
        ranks = tuple(
            Share(
                cost.forward_seconds, cost.backward_seconds,
                answer.figures.late(answer.run)[0], cost.step_seconds,
            )
            for cost, answer in costs
        )  # fmt: skip
        sent = [cost.receive_seconds for cost, _ in costs]
        return Base(candidate, ranks, (max(there for there, _ in sent), max(b for _, b in sent)))


@dataclass(frozen=True)
class Way:
    """A candidate cut into so many stages per rank, under a schedule."""

    base: Base
    schedule: str
    chunks: int

    @property
    def num_ranks(self) -> int:
        return len(self.base.ranks)

    @property
    def num_microbatches(self) -> int:
        return self.base.candidate.num_microbatches

    @property
    def costs(self) -> list[Share]:
        """What one chunk of each rank takes."""
        return [rank.of(self.chunks) for rank in self.base.ranks]

    @property
    def summary(self) -> str:
        pipeline = self.base.candidate.summary.rsplit(", ", 1)[0]
        return f"{pipeline}, {self.schedule}, each cut in {self.chunks}"


@dataclass(frozen=True, order=True)
class Guess:
    """A way, and about what its step would take. Of equally fast ones the first counts."""

    seconds: float
    number: int
    way: Way = field(compare=False)


def fastest(
    bases: Iterable[Candidate], schedules: Sequence[str], num_blocks: int, *, most: int, bar: float
) -> list[Guess]:
    """The ``most`` guesses that take least, all less than ``bar`` seconds, the best first."""
    found: list[Guess] = []
    every = [
        (least_seconds(way), number, way)
        for number, way in enumerate(ways(bases, schedules, num_blocks))
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
    return found[:most]


def ways(bases: Iterable[Candidate], schedules: Sequence[str], num_blocks: int) -> Iterator[Way]:
    """Every way to cut the candidates that is not too large."""
    for base in map(Base.of, bases):
        for name in schedules:
            low, high = find_schedule(name).chunks
            for chunks in range(max(low, 2), min(high, MOST_CHUNKS) + 1):
                number, count = len(base.ranks) * chunks, base.candidate.num_microbatches
                if number <= num_blocks and number * count <= MOST_ACTIONS:
                    yield Way(base, name, chunks)


def about(way: Way) -> float:
    """What the step takes, about. Raises UsageError where the schedule cannot be."""
    step = partial(_simulated, way, way.costs)
    return extrapolated(step, way.num_ranks, way.chunks, way.num_microbatches)


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


def _simulated(way: Way, costs: Sequence[Share], num_microbatches: int) -> float:
    """The step where each chunk takes its share of its rank's seconds. Raises UsageError."""
    number = way.num_ranks * way.chunks
    schedule = known_schedule(way.schedule, number, num_microbatches, way.chunks)
    own = [costs[rank] for rank in schedule.stage_rank]
    return float(
        step_seconds(
            schedule,
            StageCosts(
                [each.forward for each in own],
                [each.backward for each in own],
                send_seconds=[way.base.sent[0]] * (number - 1),
                send_backward_seconds=[way.base.sent[1]] * (number - 1),
                step_seconds=[each.step for each in own],
                weight_backward_seconds=[each.late for each in own],
            ),
        )
    )


def least_seconds(way: Way) -> float:
    """What ``about`` cannot be below; 0 where that is extrapolated."""
    count, chunks = way.num_microbatches, way.chunks
    if count > sum(_simulated_numbers(way.num_ranks, chunks, count)):
        return 0.0
    costs, sent = way.costs, way.base.sent
    parts = parts_of_ranks(way.schedule, way.num_ranks, chunks)
    rank_of = {stage: rank for rank, stages in enumerate(parts) for stage in stages}
    order = [rank_of[stage] for stage in range(len(rank_of))]
    is_split = splits(way.schedule)
    back = [each.backward - each.late if is_split else each.backward for each in costs]
    before = _waits(order, [each.forward for each in costs], sent[0])
    behind = _waits(order, back, sent[1])
    last = costs[order[0]]
    ends = []
    for own, stages in zip(costs, parts, strict=True):
        first, work = min(stages), count * chunks * (own.forward + own.backward)
        ends.append(before[first] + work + chunks * own.step)
        if is_split:
            work -= count * chunks * own.late
        ends.append(before[first] + work + behind[first] + chunks * last.step)
    return max(ends) * (1 - ROUNDING)


def _waits(order: Sequence[int], seconds: Sequence[float], sent: float) -> list[float]:
    """For each stage what the stages before it take, one after the other, and their messages."""
    steps = [seconds[rank] + (sent if rank != other else 0.0) for rank, other in pairwise(order)]
    return list(accumulate(steps, initial=0.0))
