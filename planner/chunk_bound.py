"""What no pipeline of several stages per rank is faster than.

In: a job whose search is done. Out: a lower bound of the step over all cuts into 2 to
``most_chunks`` stages on each of equally large ranks, in any order of actions and any placement
of the stages, over all micro-batch sizes, meshes, layouts, ZeRO stages and rungs.

A rank runs both passes of N micro-batches and the end of the step of all its stages, one after
the other. The busiest of R ranks does at least their mean:

    step  >=  1/R · Σ over stages of  N·(W_i - R_i)

with W and R of ``search_bound``; the least over all cuts is one sweep of ``inter_op_sweep``.
Memory is left out.
"""

from __future__ import annotations

from .inter_op_sweep import Floats, Move, Sweep, Tiling, add
from .options import microbatch_rows
from .search_bound import space_of
from .search_job import Job
from .search_space import uniform_tiling


def chunk_bound(
    job: Job, numbers: tuple[int, ...], most_chunks: int, *, fewest_chunks: int = 2
) -> float:
    """No plan of so many stages on each of so many ranks takes less than this; infinite where
    there is none."""
    least = float("inf")
    for each in microbatch_rows(job.structure.graph, job.request, job.cluster):
        costs = job.costs(each)
        for number in numbers:
            ranks = uniform_tiling(job.cluster, number, costs.place) if number > 1 else None
            most = min(most_chunks, costs.runs.classes.num_blocks // number)
            if ranks is not None:
                for chunks in range(fewest_chunks, most + 1):
                    least = min(least, _of_chunks(job, each, ranks, chunks))
    return least


def _of_chunks(job: Job, rows: int, ranks: Tiling, chunks: int) -> float:
    """The mean of the ranks' work where every stage may be on any of the ranks' places."""
    stages, costs = ranks.most * chunks, job.costs(rows)
    places = {move.place: move for move in ranks.moves}
    moves = tuple(
        Move(at, at + 1, place, move.first_device, move.num_devices)
        for at in range(stages)
        for place, move in places.items()
    )
    tiling = Tiling(stages, moves, stages, fixed=True)
    space = space_of(costs, tiling)

    def band(left: int, place: int, first: bool, bound: float) -> tuple[Floats, Floats]:
        nothing, work = space.band(left, place, first, bound, turns=False)
        return work, nothing

    found = Sweep.of(tiling, costs.runs.classes.num_blocks, band, add).least(stages)
    return found / ranks.most
