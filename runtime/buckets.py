"""Batches of several lengths: of a few lengths given, a step runs the shortest that fits.

In: the program, the plan, the lengths. Out: for each length the graph of the first positions, cut
from the planned one as the first slice of a sequence is, and which of them a batch runs. That is
exact wherever padding is (``planner.padding``): positions after a batch's last one, which nothing
depends on, are not computed. The batch is the same on every rank, so every rank knows its length
before the first receive is posted, and nothing is agreed on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from ..passes.program import Program
from ..passes.random_ops import Draws
from ..passes.stage_program import OfSlice, StageProgram
from ..planner.arranged.sequence_places import find_places
from ..planner.arranged.sequence_slices import SequenceSlice, sequence_slice
from ..planner.errors import UsageError
from ..planner.graph import Graph
from ..planner.padding import find_padding
from ..planner.plan import Plan


def bucket_graphs(
    program: Program, plan: Plan, lengths: Sequence[int]
) -> tuple[SequenceSlice, ...]:
    """What a step runs at each of ``lengths``, which are in ascending order.

    Raises PlanError AP560 where a shorter batch would train another way, and UsageError AP561
    for lengths that cannot be.
    """
    if not lengths:
        return ()
    planned, _ = find_padding(program.graph)
    is_ascending = list(lengths) == sorted(set(lengths))
    if not is_ascending or lengths[0] < 1 or lengths[-1] >= planned:
        raise _refused(
            f"buckets of {', '.join(map(str, lengths))} positions",
            f"the plan is for {planned}, which is a bucket too",
        )
    if plan.slices:
        raise _refused("buckets", f"schedule {plan.schedule} runs slices of the sequences")
    places = find_places(program.graph)
    return tuple(
        sequence_slice(program.graph, program.blocks, plan, places, (0, length))
        for length in lengths
    )


def bucket_programs(
    graphs: Sequence[SequenceSlice],
    whole: Graph,
    draws: Draws,
    build: Callable[[SequenceSlice, OfSlice], StageProgram],
) -> tuple[StageProgram, ...]:
    """A stage's programs of the buckets; ``draws`` are those of its program of whole sequences."""
    return tuple(build(each, OfSlice(whole, (), draws)) for each in graphs)


def bucket_of(lengths: Sequence[int], length: int | None) -> int:
    """Which program a batch of ``length`` runs: 0 of whole sequences, else 1 + the bucket.

    >>> bucket_of((4, 6), 3), bucket_of((4, 6), 6), bucket_of((4, 6), 7), bucket_of((4, 6), None)
    (1, 2, 0, 0)
    """
    at = len(lengths) if length is None else bisect_left(lengths, length)
    return 0 if at == len(lengths) else 1 + at


def _refused(what: str, why: str) -> UsageError:
    return UsageError(
        "AP561", f"{what} are not possible", why=why,
        fix="use lengths in ascending order, all below the planned one",
    )  # fmt: skip
