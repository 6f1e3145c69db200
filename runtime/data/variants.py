"""Variants of a plan's training step: every number of rows and positions that it can run.

In: the captured program, the plan, lengths of buckets, numbers of rows. Out: for each a
``Variant``: the programs of a micro-batch, their schedule, and the programs of a stage. The planned
batch is one variant of several:

==================  ============================================================================
planned             whole sequences, or the plan's slices of them (TeraPipe)
a bucket            the first positions of the sequences, cut like a first slice; an axis that
                    splits positions may split its rows instead (``bucket_layouts``)
a smaller batch     whole sequences of fewer rows (``smaller_batch``)
==================  ============================================================================

A bucket is exact wherever padding is (``planner.dims.padding``): positions after a batch's last
one, which nothing depends on, are not computed. Other shorter sequences are padded to the planned
length (``SequencePadding``), or refused on every rank before any of them has sent a message.

A smaller batch has the plan's layouts, and micro-batches no larger than planned. Rows that the data
axis does not divide are shared out unevenly (``planner.variants.shares``), where the plan has one
stage; a rank without rows then computes on a row of weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import NamedTuple

import torch
from torch import Tensor

from ...cost_model.simulator.actions import Schedule
from ...passes.local.input_rows import StageRows, rows_of_stages
from ...passes.local.stage_cut import Boundary, boundaries, with_replicas
from ...passes.local.stage_program import OfSlice, StageProgram, build_stage
from ...passes.ops.collectives import Communicator
from ...passes.ops.random_ops import Draws
from ...passes.programs.program import Program
from ...planner.configured.bucket_layouts import layouts_divide, with_fastest_layouts
from ...planner.costs.basis import DEFAULT, Basis
from ...planner.costs.precision import with_precision
from ...planner.dims.padding import Padding, find_padding
from ...planner.dims.sequence_places import find_places
from ...planner.errors import AutoparallelError, PlanError, UsageError
from ...planner.evaluate.step import schedule_of, updating_plan
from ...planner.graph.graph import Graph
from ...planner.plan import Plan, StagePlan
from ...planner.variants.asynchronous import check_asynchronous
from ...planner.variants.replicas import check_replicas
from ...planner.variants.sequence_slices import SequenceSlice, sequence_slice, slice_bounds
from ...planner.variants.shares import share_of, why_not
from ..messages.shared_objects import share_value


class BatchShape(NamedTuple):
    """Shape of a global batch: its number of rows, and the sequence length that it is padded to
    (None: the planned length). ``capture`` numbers the traces of the model, which is traced again
    when its code changes."""

    rows: int
    length: int | None = None
    capture: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """The training step of a plan for batches of one ``shape``. ``program`` is the model with whole
    sequences and the rows of one micro-batch. ``slices`` are the parts of the sequences that each
    micro-batch is computed in, one after another: a single slice unless the plan slices
    sequences."""

    shape: BatchShape
    program: Program
    plan: Plan
    schedule: Schedule
    slices: tuple[SequenceSlice, ...]

    def crossing(self) -> list[tuple[Boundary, ...]]:
        """Return, for each slice of the sequences, the values that stages send to other stages."""
        found = [boundaries(each.graph, each.blocks, each.plan) for each in self.slices]
        count = len(self.plan.stages)
        return [with_replicas(each, count) for each in found] if self.schedule.parts else found


def crossing_pairs(program: Program, plan: Plan) -> frozenset[tuple[int, int]]:
    """Return the pairs (source, target) of stage indices between which the forward sends a
    value."""
    found = boundaries(program.graph, program.blocks, plan)
    return frozenset((b.source_stage, b.target_stage) for b in found)


def variant_of(program: Program, plan: Plan, capture: int = 0) -> Variant:
    """Return the training step of ``plan``, which may also be a plan derived for a smaller batch.

    ``capture`` is the number of ``program`` among the traces of the model.

    Raises PlanError AP547 and AP548 where copies of stages (Chimera) or slices of the sequences
    would change the result, UsageError AP158 where an asynchronous schedule cannot run the model.
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


Buckets = Mapping[int, int] | Sequence[int | tuple[int, int]]
"""Buckets as users give them: lengths, or pairs of a length and the rows of a batch (by default as
many as planned)."""


def bucket_variants(
    planned: Variant, buckets: Buckets, basis: Basis = DEFAULT
) -> tuple[Variant, ...]:
    """Return, for each of ``buckets``, the ``planned`` step with sequences cut to its length and
    with its rows, in the fastest layouts by the prices of ``basis``.

    Lengths must be below the planned one, ascend, and be divided by the plan's degrees: else
    UsageError AP561. Raises UsageError AP836 where the plan cannot run so many rows, and PlanError
    AP560 where shorter sequences would give other training results."""
    given = sorted(buckets.items()) if isinstance(buckets, Mapping) else buckets
    batch = planned.plan.model.global_batch
    shapes = [(each, batch) if isinstance(each, int) else (each[0], each[1]) for each in given]
    if not shapes:
        return ()
    length, _ = find_padding(planned.program.graph)
    lengths = [each for each, _ in shapes]
    if shapes != sorted(set(shapes)) or lengths[0] < 1 or lengths[-1] >= length:
        raise _refused(
            f"buckets of {', '.join(map(str, lengths))} positions",
            f"the plan is for {length}, which is a bucket too",
        )
    if planned.plan.slices:
        raise _refused("buckets", f"schedule {planned.plan.schedule} runs slices of the sequences")
    try:
        places = {planned.plan.microbatch_size: find_places(planned.program.graph)}
    except PlanError as error:  # a sequence with a window or documents may be padded, not cut
        raise _refused("buckets", error.why) from error
    found = []
    for each, rows in shapes:
        step, program = planned, planned.program
        if rows != batch:
            program = program.of_global_batch(rows) or program
            most = length * planned.plan.microbatch_size // each  # as many positions as planned
            step = variant_of(program, smaller_batch(program, planned.plan, rows, most).plan)
        graph, (part,), size = step.program.graph, step.slices, step.plan.microbatch_size
        if size not in places:
            places[size] = find_places(graph)
        first = sequence_slice(graph, part.blocks, part.plan, places[size], (0, each))
        alone = replace(first, carried=part.carried)  # no slice follows
        shape = step.shape._replace(length=each)
        own = with_fastest_layouts(alone, part.blocks, basis)
        if not all(layouts_divide(own.graph, own.blocks, stage) for stage in own.plan.stages):
            why = "the plan's layouts do not divide so many into equal parts"
            raise _refused(f"buckets of {rows} rows of {each} positions", why)
        found.append(replace(step, shape=shape, slices=(own,)))
    return tuple(found)


def agreed(variant: Variant) -> Variant:
    """Return a bucket's variant with the layouts that rank 0 found. Collective over all ranks."""
    (part,) = variant.slices
    blocks, plan = share_value((part.blocks, part.plan))
    return replace(variant, slices=(replace(part, blocks=blocks, plan=plan),))


def bucket_of(shapes: Sequence[BatchShape], rows: int, length: int | None) -> int | None:
    """Return the smallest length among the buckets ``shapes`` for batches of ``rows`` rows that
    sequences of ``length`` positions fit into; None if there is none or ``length`` is None.

    >>> shapes = [BatchShape(2, 4), BatchShape(8, 4), BatchShape(2, 6)]
    >>> bucket_of(shapes, 2, 3), bucket_of(shapes, 2, 5), bucket_of(shapes, 8, 5)
    (4, 6, None)
    """
    lengths = [each.length for each in shapes if each.rows == rows and each.length is not None]
    return min((each for each in lengths if length is not None and length <= each), default=None)


def stage_programs(
    variant: Variant,
    stage: int,
    *,
    coordinates: tuple[int, ...],
    communicator: Communicator,
    draws: Draws | None = None,
) -> tuple[StageProgram, ...]:
    """Return the programs of ``stage`` for the rank at ``coordinates`` of its mesh, one for each
    slice of the sequences. Values that the slice before computes are not among a program's inputs.
    ``draws`` is the random-number state to share with programs of another variant (None: a new
    one)."""
    index, found = variant.schedule.part(stage), []
    is_first = draws is None and not variant.plan.slices
    draws = Draws() if draws is None else draws
    for each in variant.slices:
        carried = each.carried[index]
        of_slice = OfSlice(variant.program.graph, tuple(c.made for c in carried), draws)
        program = build_stage(
            each.graph,
            each.blocks,
            each.plan,
            stage_index=index,
            coordinates=coordinates,
            communicator=communicator,
            of_slice=None if is_first else of_slice,
            outputs=variant.program.returned,
        )
        earlier = {c.earlier for c in carried}
        inputs = {name: held for name, held in program.inputs.items() if name not in earlier}
        found.append(replace(program, inputs=inputs))
    return tuple(found)


def _refused(what: str, why: str) -> UsageError:
    return UsageError(
        "AP561",
        f"{what} are not possible",
        why=why,
        fix="use lengths in ascending order, all below the planned one, that the degrees divide",
    )


@dataclass(frozen=True, slots=True)
class SmallerBatch:
    """The plan for a smaller global batch than planned, and for each stage the division of a
    micro-batch's rows among its ranks (None: the stage reads no input)."""

    plan: Plan
    rows: tuple[StageRows | None, ...]


def smaller_batch(program: Program, plan: Plan, rows: int, most: int = 0) -> SmallerBatch:
    """Derive the plan for a global batch of ``rows`` rows, and the rows that each stage's ranks
    read. Micro-batches have at most ``most`` rows, or as many as planned. Raises UsageError AP836
    where the plan cannot run such a batch."""
    why = _why_none(program.graph, plan)
    uneven = why or _why_not_uneven(program, plan)
    crossing = crossing_pairs(program, plan)
    for size in range(min(rows, most or plan.microbatch_size), 0, -1):
        if why or rows % size:
            continue
        found = _even(program, plan, rows // size, size) if not plan.stages[0].shares else None
        if found is None and not uneven:
            found = _uneven(program, plan, rows // size, size)
        if found is not None and _can_be_scheduled(found, crossing):
            graph = program.graph.with_batch_size(size)
            return SmallerBatch(found, rows_of_stages(graph, program.blocks, found, counts=True))
    raise refused_batch(
        plan, rows, why or f"the plan's layouts do not divide the samples, and {uneven}"
    )


def refused_batch(plan: Plan, rows: int, why: str) -> UsageError:
    """Return the error (AP836) for a batch of ``rows`` rows that ``plan`` cannot run, with the
    reason ``why``."""
    return UsageError(
        "AP836",
        f"a batch of {rows} samples cannot be run by a plan for {plan.model.global_batch}",
        why=why,
        fix="drop such batches (drop_last=True of the DataLoader), or pad them",
    )


def _why_none(graph: Graph, plan: Plan) -> str:
    if not graph.batch_dims and plan.model.global_batch == 1:
        return "the model's code takes another path for several rows than for the planned one"
    if not graph.batch_dims:
        return "rows of the batch meet before the loss"
    if plan.slices:
        return f"schedule {plan.schedule} runs slices of the sequences"
    return ""


def _with_batch(plan: Plan, count: int, size: int, stages: Sequence[StagePlan]) -> Plan:
    model = replace(plan.model, global_batch=count * size)
    return replace(plan, num_microbatches=count, model=model, stages=tuple(stages))


def _even(program: Program, plan: Plan, count: int, size: int) -> Plan | None:
    graph = program.graph.with_batch_size(size)
    if not all(layouts_divide(graph, program.blocks, stage) for stage in plan.stages):
        return None
    return _with_batch(plan, count, size, plan.stages)


def _why_not_uneven(program: Program, plan: Plan) -> str:
    if len(plan.stages) > 1:
        return "a pipeline cannot have unequal shares of the batch"
    stage, graph = plan.stages[0], program.graph
    leaves = {node.name for node in graph if node.kind not in ("op", "input")}
    return why_not(
        graph,
        [*graph.by_name],
        lambda name: None if name in leaves else stage.layout_of(name, program.blocks),
    )


def _uneven(program: Program, plan: Plan, count: int, size: int) -> Plan | None:
    stage = plan.stages[0]
    shares = divide_rows(size, stage.shares or (1,) * stage.mesh.shape[0])
    for coordinate in range(len(shares)):
        share = share_of(shares, coordinate)
        assert share is not None
        if not layouts_divide(
            program.graph.with_batch_size(share.batch_size), program.blocks, stage
        ):
            return None
    return _with_batch(plan, count, size, (replace(stage, shares=shares),))


def divide_rows(rows: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split ``rows`` into whole numbers proportional to ``weights`` (largest-remainder method).

    >>> divide_rows(3, (1, 1)), divide_rows(1, (1, 1, 1)), divide_rows(4, (3, 5))
    ((2, 1), (1, 0, 0), (2, 2))
    """
    exact = [rows * weight / sum(weights) for weight in weights]
    found = [floor(each) for each in exact]
    order = sorted(range(len(weights)), key=lambda part: found[part] - exact[part])
    for part in order[: rows - sum(found)]:
        found[part] += 1
    return tuple(found)


def _can_be_scheduled(plan: Plan, crossing: frozenset[tuple[int, int]]) -> bool:
    try:
        schedule = schedule_of(plan, crossing)
    except AutoparallelError:
        return False
    return not schedule.is_asynchronous


class SequencePadding:
    """Function that pads batches of short sequences to the planned length; ``graph`` has the
    planned shapes of a micro-batch."""

    def __init__(
        self,
        graph: Graph,
        check: Callable[[int, Mapping[str, Padding]], None] = lambda length, paddings: None,
    ) -> None:
        """Make the padding for a model. ``check`` is called once, with the sequence length of the
        first short batch and the padding of each input; it may raise an error."""
        self._graph, self._check = graph, check
        self._is_checked = False
        self._found: tuple[int, Mapping[str, Padding]] | None = None

    @property
    def planned(self) -> int:
        """The planned sequence length."""
        if self._found is None:
            self._found = find_padding(self._graph)
        return self._found[0]

    def length(self, batch: Mapping[str, Tensor]) -> int | None:
        """Return the sequence length of a batch; None if its sequences have the planned length.
        Raises as ``__call__`` does."""
        if not any(self._is_shorter(name, tensor) for name, tensor in batch.items()):
            return None
        if self._found is None:
            self._found = find_padding(self._graph)
        length, paddings = self._found
        sizes = {
            name: {batch[name].shape[dim] for dim in padding.dims}
            for name, padding in paddings.items()
            if name in batch and batch[name].dim() > max(padding.dims)
        }
        lengths = set().union(*sizes.values())
        if len(lengths) != 1 or max(lengths) > length:
            raise _unequal_lengths(sizes, length)
        given = lengths.pop()
        if not self._is_checked:
            self._check(given, paddings)
            self._is_checked = True
        return given

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch with sequences padded to the planned length.

        Raises PlanError AP560 where padding would change the training result, and UsageError AP130
        where its inputs differ in length. A batch whose shapes differ from the plan's in another
        way is returned unchanged.
        """
        if self.length(batch) is None:
            return batch
        assert self._found is not None
        length, paddings = self._found
        return {
            name: pad_tensor(tensor, paddings[name], length) if name in paddings else tensor
            for name, tensor in batch.items()
        }

    def _is_shorter(self, name: str, tensor: Tensor) -> bool:
        """Return whether input ``name`` is shorter than planned in a non-batch dimension."""
        known = self._graph.by_name.get(name)
        if known is None or tensor.dim() != len(known.spec.shape):
            return False
        rows = self._graph.batch_dims.get(name, (None,))[0]
        return any(
            have < want
            for dim, (have, want) in enumerate(zip(tensor.shape, known.spec.shape, strict=True))
            if dim != rows
        )


def pad_tensor(tensor: Tensor, padding: Padding, length: int) -> Tensor:
    """Pad ``tensor`` with ``padding.value`` to ``length`` entries along each of the dimensions
    ``padding.dims``."""
    for dim in padding.dims:
        shape = [*tensor.shape]
        shape[dim] = length - shape[dim]
        tensor = torch.cat([tensor, tensor.new_full(shape, padding.value)], dim)
    return tensor


def _unequal_lengths(sizes: Mapping[str, set[int]], length: int) -> UsageError:
    words = ", ".join(
        f"{name} {' and '.join(map(str, sorted(found)))}" for name, found in sorted(sizes.items())
    )
    return UsageError(
        "AP130",
        "the inputs of the batch have sequences of several lengths",
        why=f"{words}; the plan is for {length}",
        fix="pass all inputs with the same number of positions",
    )
