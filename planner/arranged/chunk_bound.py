"""What no pipeline of several stages per rank is faster than.

In: a job whose search is done, the schedules that are allowed. Out: a lower bound of the step
over all cuts into 2 to ``most_chunks`` stages on each of R equally large ranks, over all
micro-batch sizes, meshes, layouts, ZeRO stages and rungs. The first R stages are on ranks of their
own, as in loops and V shapes.

A rank runs both passes of N micro-batches and the end of the step of all its stages, one after
the other. The busiest rank does at least their mean, and has waited:

    R · step  >=  Σ over stages s of  N·C_s + (R - 1 - s)·F_s   where s < R - 1,

as the first micro-batch comes to stage s through the forwards before it; and as no backward
begins before a micro-batch is through all stages, and a rank has no more than N forwards to do
until then,

    R · step  >=  Σ over stages of  N·C_s + (R - N)·F_s         where N < R.

C is what a stage computes and communicates per micro-batch, with its share of the step's end, F
what a forward computes at least. (Where a schedule does not put gradients of weights off a rank
waits again in the end, but its own end of the step, which is in C, comes meanwhile.) How memory
comes in, and a bound of the busiest rank, is in ``chunk_prices``. Nothing is below ``work_bound``,
which is all that there is after a search that was stopped, or where the tables of blocks would be
too wide.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..intra_op.block_prices import Neighbours
from ..intra_op.kind_tables import TooWideError
from ..requests.options import microbatch_rows
from ..requests.request import CHUNKED_SCHEDULES
from ..search.beside import Company
from ..search.job import Job
from ..search.space import uniform_tiling
from ..search.work_bound import work_bound
from .chunk_prices import Ranks


def chunk_bound(
    job: Job, numbers: tuple[int, ...], most_chunks: int, schedules: Sequence[str] = ()
) -> float:
    """No plan of several stages on each of so many ranks takes less than this; infinite where
    there is none. ``schedules``: that are allowed; any of several stages if none is named."""
    every = microbatch_rows(job.structure.graph, job.request, job.cluster)
    work = work_bound(job, every)
    names = tuple(schedules) or CHUNKED_SCHEDULES
    if not job.stopped:
        with job.stoppable():
            company = job.company or Company(job, (every,))
            found = company.over(chunk_bound_of, numbers, most_chunks, names)
            return max(min(found), work)
    return work


def chunk_bound_of(
    job: Job, rows: Sequence[int], numbers: Sequence[int], most_chunks: int,
    schedules: Sequence[str],
) -> float:  # fmt: skip
    """``chunk_bound`` of some micro-batch sizes, without ``work_bound``.

    The parts of the space, by ranks and micro-batch sizes, have the bound of their work alone
    first; the least are bounded until the least of all is so.
    """
    work = {each: work_bound(job, (each,)) for each in rows}
    parts = [(work[each], each, number) for each in rows for number in numbers if number > 1]
    heapq.heapify(parts)
    least = float("inf")
    ranks: dict[tuple[int, int], Ranks] = {}
    while parts and parts[0][0] < least:
        seconds, each, number = parts[0]
        if (each, number) in ranks:
            heapq.heappop(parts)
            own = ranks[each, number]
            for chunks in range(2, min(most_chunks, len(own.kinds) // number) + 1):
                least = min(least, max(seconds, _of_chunks(own, chunks, schedules, least)))
            continue
        some = _ranks(job, each, number)
        if some is None:
            heapq.heappop(parts)
            continue
        ranks[each, number] = some
        try:
            seconds = max(seconds, some.work_seconds())
        except TooWideError:
            return 0.0
        heapq.heapreplace(parts, (seconds, each, number))
    return least


def _ranks(job: Job, rows: int, number: int) -> Ranks | None:
    """So many ranks of one size; None where there are none with a mesh."""
    costs = job.costs(rows)
    tiling = uniform_tiling(job.cluster, number, costs.place)
    if tiling is None:
        return None
    places = dict.fromkeys(move.place for move in tiling.moves)
    meshes = [mesh for place in places for mesh in costs.places[place].meshes]
    return Ranks(number, meshes, Neighbours.of(costs.runs.structure)) if meshes else None


def _of_chunks(
    ranks: Ranks, chunks: int, schedules: Sequence[str], enough: float = float("inf")
) -> float:
    """Of so many stages per rank, under any of the schedules; what is ``enough`` is not raised."""
    every = [ranks.step_seconds(name, chunks, enough) for name in schedules]
    return min(every, default=float("inf"))
