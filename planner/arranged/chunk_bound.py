"""What no pipeline of several stages per rank is faster than.

In: a job whose search is done, the schedules that are allowed. Out: a lower bound of the step
over all cuts into 2 to ``most_chunks`` stages on each of R equally large ranks, in any order of
actions, over all micro-batch sizes, meshes, layouts, ZeRO stages and rungs. The first R stages
are on ranks of their own, as in loops and V shapes, or nothing is said of idle time.

A rank runs both passes of N micro-batches and the end of the step of all its stages, one after
the other. The busiest rank does at least their mean, and has waited:

    R · step  >=  Σ over stages s of  N·(W_s - R_s) + (R - 1 - s)·F_s   where s < R - 1,

as the first micro-batch comes to stage s through the forwards before it; and as no backward
begins before a micro-batch is through all stages, and a rank has no more than N forwards to do
until then,

    R · step  >=  Σ over stages of  N·(W_s - R_s) + (R - N)·F_s         where N < R.

With W and R of ``search_bound``, F what a forward computes at least. Where no schedule puts
gradients of weights off, the end of the step mirrors its beginning, and F is both passes. Each
is the least over all cuts by one sweep of ``inter_op_sweep``. Memory is left out. Nothing is
below ``work_bound``, which is all that there is after a search that was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..inter_op.cuts import Bands, Floats
from ..inter_op.sweep import Move, Sweep, Tiling, add
from ..requests.options import microbatch_rows
from ..schedules.held import splits
from ..schedules.schedules import find_schedule
from ..search.beside import Company
from ..search.bound import Space, space_of
from ..search.job import Job
from ..search.space import uniform_tiling
from ..search.work_bound import work_bound


def chunk_bound(
    job: Job, numbers: tuple[int, ...], most_chunks: int, schedules: Sequence[str] = ()
) -> float:
    """No plan of several stages on each of so many ranks takes less than this; infinite where
    there is none. ``schedules``: that are allowed; any if none is named."""
    every = microbatch_rows(job.structure.graph, job.request, job.cluster)
    work = work_bound(job, every)
    if not job.stopped:
        with job.stoppable():
            company = job.company or Company(job, (every,))
            found = company.over(chunk_bound_of, numbers, most_chunks, schedules)
            return max(min(found), work)
    return work


def chunk_bound_of(
    job: Job, rows: Sequence[int], numbers: Sequence[int], most_chunks: int,
    schedules: Sequence[str],
) -> float:  # fmt: skip
    """``chunk_bound`` of some micro-batch sizes, without ``work_bound``."""
    least = float("inf")
    for each in rows:
        costs = job.costs(each)
        for number in numbers:
            ranks = uniform_tiling(job.cluster, number, costs.place) if number > 1 else None
            most = min(most_chunks, costs.runs.classes.num_blocks // number)
            if ranks is not None:
                for chunks in range(2, most + 1):
                    least = min(least, _of_chunks(job, each, ranks, chunks, schedules))
    return least


def _of_chunks(job: Job, rows: int, ranks: Tiling, chunks: int, schedules: Sequence[str]) -> float:
    """The mean of the ranks' work where every stage may be on any of the ranks' places."""
    stages, costs = ranks.most * chunks, job.costs(rows)
    places = {move.place: move for move in ranks.moves}
    moves = tuple(
        Move(at, at + 1, place, move.first_device, move.num_devices)
        for at in range(stages)
        for place, move in places.items()
    )
    tiling = Tiling(stages, moves, stages, fixed=True)
    both = bool(schedules) and not any(_splits(name, chunks) for name in schedules)
    space, number = space_of(costs, tiling), ranks.most
    waits = [[float(max(number - 1 - at, 0)) for at in range(stages)]]
    if costs.runs.count < number:
        waits.append([float(number - costs.runs.count)] * stages)
    found = 0.0
    for own in waits:
        sweep = Sweep.of(tiling, Bands(costs.runs.every, _Waiting(space, own, both)), add)
        found = max(found, sweep.least(stages))
    return found / number


def _splits(name: str, chunks: int) -> bool:
    """Whether a schedule can have so many stages per rank and put gradients of weights off."""
    low, high = find_schedule(name).chunks
    return low <= chunks <= high and splits(name)


@dataclass(frozen=True)
class _Waiting:
    """``inter_op.cuts.Seconds``: what stages work, and so many times what their passes take."""

    space: Space
    waits: Sequence[float]
    both: bool
    _made: dict[tuple[float, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def __call__(self, left: int, place: int, first: bool) -> tuple[Floats, Floats]:
        nothing, work = self.space.seconds(left, place, first, form="largest")
        wait = self.waits[len(self.waits) - left]
        if not wait:
            return work, nothing
        key = (wait, id(work))
        if key not in self._made:
            passes = self.space.passes(left, place, first, both=self.both)
            self._made[key] = work + wait * passes, nothing
        return self._made[key]
