"""The variants of a plan's training step: every number of rows and positions that it can run.

In: the captured program, the plan, lengths of buckets, the plans of smaller batches. Out: for
each a ``Variant``: what a micro-batch runs, by which schedule, and the programs of a stage. The
planned batch is one variant of several:

==================  ============================================================================
planned             whole sequences, or those slices of them that the plan has (TeraPipe)
a bucket            the first positions of the sequences, cut as the first slice of one is
a smaller batch     whole sequences of fewer rows (``runtime.data.small_batches``)
==================  ============================================================================

A bucket is exact wherever padding is (``planner.padding``): positions after a batch's last one,
which nothing depends on, are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...cost_model.simulator.actions import Schedule
from ...passes.local.stage_cut import Boundary, boundaries, with_replicas
from ...passes.local.stage_program import OfSlice, StageProgram, build_stage
from ...passes.ops.collectives import Communicator
from ...passes.ops.random_ops import Draws
from ...passes.programs.program import Program
from ...planner.asynchronous import check_asynchronous
from ...planner.errors import UsageError
from ...planner.padding import find_padding
from ...planner.plan import Plan
from ...planner.plan_schedule import schedule_of, updating_plan
from ...planner.precision import with_precision
from ...planner.pricing.sequence_slices import SequenceSlice, sequence_slice, slice_bounds
from ...planner.replicas import check_replicas
from ...planner.sequence_places import find_places


class BatchShape(NamedTuple):
    """The rows of a global batch, and its positions where they are those of a bucket.

    ``capture`` numbers the captures of the model, whose code may have changed since planning.
    """

    rows: int
    length: int | None = None
    capture: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of a plan's step. ``program`` has whole sequences, and a micro-batch's rows.

    ``slices`` are what runs a micro-batch, one after another: one, of whole sequences or of a
    bucket, or those of the plan.
    """

    shape: BatchShape
    program: Program
    plan: Plan
    schedule: Schedule
    slices: tuple[SequenceSlice, ...]

    def crossing(self) -> list[tuple[Boundary, ...]]:
        """The values that cross stages, of each slice."""
        found = [boundaries(each.graph, each.blocks, each.plan) for each in self.slices]
        count = len(self.plan.stages)
        return [with_replicas(each, count) for each in found] if self.schedule.parts else found


def crossing_pairs(program: Program, plan: Plan) -> frozenset[tuple[int, int]]:
    """The pairs of stages between which a value goes."""
    found = boundaries(program.graph, program.blocks, plan)
    return frozenset((b.source_stage, b.target_stage) for b in found)


def variant_of(program: Program, plan: Plan, capture: int = 0) -> Variant:
    """The step of a plan on the batch that the plan is for: the planned one, or a smaller.

    ``capture`` is the number of the program among the captures of the model.

    Raises PlanError AP547 and AP548 where replicas or slices would not give the same result, and
    UsageError AP158 where an asynchronous schedule cannot run it.
    """
    check_asynchronous(plan, program.graph, program.blocks)
    program = program.with_batch_size(plan.microbatch_size)
    if plan.model.precision == "fp8":
        program = replace(program, graph=with_precision(program.graph, "fp8"))
    graph, blocks = program.graph, program.blocks
    schedule = schedule_of(plan, crossing_pairs(program, plan))
    if schedule.parts:
        check_replicas(graph)
    step = updating_plan(plan, schedule)
    slices: tuple[SequenceSlice, ...] = (
        SequenceSlice(graph, blocks, step, tuple(() for _ in plan.stages)),
    )
    if plan.slices:
        places = find_places(graph)
        slices = tuple(
            sequence_slice(graph, blocks, step, places, bounds)
            for bounds in slice_bounds(plan.slices)
        )
    shape = BatchShape(plan.model.global_batch, capture=capture)
    return Variant(shape, program, plan, schedule, slices)


def bucket_variants(planned: Variant, lengths: Sequence[int]) -> tuple[Variant, ...]:
    """The planned step at each of ``lengths``, which are in ascending order.

    Raises PlanError AP560 where a shorter batch would train another way, and UsageError AP561
    for lengths that cannot be.
    """
    if not lengths:
        return ()
    program, whole = planned.program, planned.slices[0]
    length, _ = find_padding(program.graph)
    is_ascending = list(lengths) == sorted(set(lengths))
    if not is_ascending or lengths[0] < 1 or lengths[-1] >= length:
        raise _refused(
            f"buckets of {', '.join(map(str, lengths))} positions",
            f"the plan is for {length}, which is a bucket too",
        )
    if planned.plan.slices:
        raise _refused("buckets", f"schedule {planned.plan.schedule} runs slices of the sequences")
    places, found = find_places(program.graph), []
    for each in lengths:
        first = sequence_slice(program.graph, whole.blocks, whole.plan, places, (0, each))
        alone = replace(first, carried=whole.carried)  # no slice follows
        shape = planned.shape._replace(length=each)
        found.append(replace(planned, shape=shape, slices=(alone,)))
    return tuple(found)


def bucket_of(lengths: Sequence[int], length: int | None) -> int | None:
    """The shortest bucket that a batch of ``length`` fits; None where only whole sequences do.

    >>> bucket_of((4, 6), 3), bucket_of((4, 6), 6), bucket_of((4, 6), 7), bucket_of((4, 6), None)
    (4, 6, None, None)
    """
    return next((each for each in lengths if length is not None and length <= each), None)


def stage_programs(
    variant: Variant,
    stage: int,
    *,
    coordinates: tuple[int, ...],
    communicator: Communicator,
    draws: Draws | None = None,
) -> tuple[StageProgram, ...]:
    """What the rank at ``coordinates`` of a stage runs of each slice, without what is carried.

    ``draws`` are those of the stage's programs of another variant, if it has one.
    """
    index, found = variant.schedule.part(stage), []
    is_first = draws is None and not variant.plan.slices
    draws = Draws() if draws is None else draws
    for each in variant.slices:
        carried = each.carried[index]
        of_slice = OfSlice(variant.program.graph, tuple(c.made for c in carried), draws)
        program = build_stage(
            each.graph, each.blocks, each.plan, stage_index=index, coordinates=coordinates,
            communicator=communicator, of_slice=None if is_first else of_slice,
            outputs=variant.program.returned,
        )  # fmt: skip
        earlier = {c.earlier for c in carried}
        inputs = {name: held for name, held in program.inputs.items() if name not in earlier}
        found.append(replace(program, inputs=inputs))
    return tuple(found)


def _refused(what: str, why: str) -> UsageError:
    return UsageError(
        "AP561", f"{what} are not possible", why=why,
        fix="use lengths in ascending order, all below the planned one",
    )  # fmt: skip
