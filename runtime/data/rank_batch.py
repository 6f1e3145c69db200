"""The part of a global batch that one rank reads for one micro-batch.

In: the global batch, or a rank's share of it (``ShareBatch``). Out: for micro-batch ``j`` of ``m``,
the rank's region of rows ``[j*B/m, (j+1)*B/m)`` under each input's layout. If a stage needs all
rows of an input (its layout does not split them, or the counting of the loss reads them), they are
gathered from the ranks' shares once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...passes.local.input_rows import HeldRows, StageRows
from ...passes.ops.collectives import Communicator
from ...planner.errors import UsageError
from ...planner.graph.graph import TensorSpec
from ...planner.graph.layout import Region, local_region, region_slices, whole_region

if TYPE_CHECKING:
    from ...passes.local.stage_program import HeldValue, StageProgram
    from ..messages.device_queue import DeviceQueue


class ShareBatch(dict[str, Tensor]):
    """Dict of a rank's inputs by name, with only the rows ``held`` that the rank reads. ``dims``
    maps each input that has rows to its batch dimension. ``whole`` has the inputs of which the rank
    needs all rows, once ``gather_whole`` has filled it."""

    def __init__(
        self, tensors: Mapping[str, Tensor], held: HeldRows, dims: Mapping[str, int]
    ) -> None:
        super().__init__(tensors)
        self.held = held
        self.dims = dims
        self.whole: dict[str, Tensor] = {}

    def held_spec(self, name: str, spec: TensorSpec) -> TensorSpec:
        """Return the shape and dtype of input ``name`` in one micro-batch with only this rank's
        rows; ``spec`` has all rows of the micro-batch."""
        if name not in self.dims:
            return spec
        shape = list(spec.shape)
        shape[self.dims[name]] = shape[self.dims[name]] // self.held.total * self.held.rows
        return replace(spec, shape=tuple(shape))


def whole_batch(
    shares: Sequence[tuple[HeldRows, Mapping[str, Tensor]]], dims: Mapping[str, int]
) -> dict[str, Tensor]:
    """Assemble the global batch from ``shares``: for each rank the rows that it has, and its
    inputs. ``dims`` maps each input that has rows to its batch dimension."""
    ordered = sorted(shares, key=lambda share: share[0].part)  # a part without rows is not first
    whole = dict(ordered[0][1])
    for name, dim in dims.items():
        rows: dict[int, Tensor] = {}
        for held, tensors in ordered:
            by_row = _unflattened(tensors[name], dim, (held.size, -1)).unbind(dim)
            rows = dict(zip(held.indices(), by_row, strict=True)) | rows
        whole[name] = torch.cat([rows[index] for index in sorted(rows)], dim)
    return whole


def gather_whole(
    batch: ShareBatch,
    rows: StageRows,
    part: int,
    communicator: Communicator,
    device: torch.device,
) -> None:
    """All-gather the inputs of which every rank of a stage needs all rows, and put them into
    ``batch.whole``, on ``device``. Collective over the ranks of the stage. ``rows`` says how the
    stage divides a micro-batch; this rank has part number ``part``."""
    own = rows.held(part, batch.held.num_microbatches)
    for name in rows.whole if len(rows.sizes) > 1 else ():
        dim = rows.inputs[name]
        tensor = _of_part(batch[name], dim, batch.held, own).to(device)
        batch.whole[name] = _gathered(
            tensor, dim, rows, tensor.shape[dim + 1] // own.rows, communicator
        )


def _of_part(tensor: Tensor, dim: int, held: HeldRows, own: HeldRows) -> Tensor:
    """Cut the rows ``own`` of each micro-batch from a tensor with the rows ``held``, which include
    them. ``dim`` is the batch dimension; in the result two dimensions replace it: (micro-batch,
    row)."""
    count = held.num_microbatches
    per_row = tensor.shape[dim] // held.size
    by_microbatch = _unflattened(tensor, dim, (count, held.rows * per_row))
    return by_microbatch.narrow(dim + 1, (own.first - held.first) * per_row, own.rows * per_row)


def _gathered(
    tensor: Tensor, dim: int, rows: StageRows, per_row: int, communicator: Communicator
) -> Tensor:
    """All-gather a tensor of shape (…, micro-batch, rows, …), with its micro-batches at ``dim``,
    along its rows. Return all ranks' rows in the order of the global batch, with the two dimensions
    merged. ``per_row`` is the number of entries along the dimension per row of the batch."""
    sizes, most = rows.sizes, max(rows.sizes)
    missing = most * per_row - tensor.shape[dim + 1]
    if missing:
        shape = [*tensor.shape]
        shape[dim + 1] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim + 1)
    for axis in reversed(rows.axes):
        tensor = communicator.all_gather(tensor.contiguous(), axis, dim + 1)
    parts = _unflattened(tensor, dim + 1, (len(sizes), most * per_row)).unbind(dim + 1)
    kept = [
        part.narrow(dim + 1, 0, size * per_row) for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(kept, dim + 1).flatten(dim, dim + 1)


def _unflattened(tensor: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def step_inputs(
    batch: Mapping[str, Tensor],
    programs: Sequence[StageProgram],
    num_microbatches: int,
    queue: DeviceQueue,
) -> dict[int, dict[str, Tensor]]:
    """Return this rank's inputs of a stage for a whole step, copied to the device: a dict of inputs
    by name for each computation. Slice ``j`` of micro-batch ``m``, which ``programs[j]`` computes,
    has the number ``m * len(programs) + j``; without slices there is one program.

    All copies are begun here, before the first input is needed. Raises as ``local_inputs`` does.
    """
    units = [(m, program) for m in range(num_microbatches) for program in programs]
    found = [local_inputs(batch, program, m, num_microbatches) for m, program in units]
    copies = iter(queue.to_device([part for inputs in found for part in inputs.values()]))
    return {unit: {name: next(copies) for name in inputs} for unit, inputs in enumerate(found)}


def local_inputs(
    batch: Mapping[str, Tensor],
    program: StageProgram,
    microbatch: int,
    num_microbatches: int,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Return this rank's part of each input that the stage reads in micro-batch ``microbatch``.
    Floating inputs are cast to the dtype they were captured in. Raises UsageError (AP130) where the
    batch lacks an input or has another shape than the plan."""
    inputs = {}
    for name, held in program.inputs.items():
        if name not in batch:
            raise _missing(name, batch)
        whole, region = _whole_and_part(program, held)
        rows = batch_rows(batch, name, whole, microbatch, num_microbatches)
        region = _within(region, whole.shape, rows.shape, batch)
        inputs[name] = local_part(rows, region, held.spec.dtype, device)
    return inputs


def _within(
    region: Region, whole: tuple[int, ...], shape: Sequence[int], batch: Mapping[str, Tensor]
) -> Region:
    """Convert index ranges in an input's micro-batch with all rows (shape ``whole``) to index
    ranges in the rows that this rank was given (shape ``shape``)."""
    if tuple(shape) == whole:
        return region
    assert isinstance(batch, ShareBatch)
    held = batch.held
    found = []
    for (start, stop), size, present in zip(region, whole, shape, strict=True):
        first = held.first * (size // held.total) if present != size else 0
        found.append((start - first, stop - first))
    return tuple(found)


def batch_rows(
    batch: Mapping[str, Tensor],
    name: str,
    spec: TensorSpec,
    microbatch: int,
    num_microbatches: int,
) -> Tensor:
    """Return the rows of input ``name`` that belong to one micro-batch: all of them, or, of a
    ``ShareBatch``, the rank's. ``spec`` is the input in one micro-batch with all rows."""
    if isinstance(batch, ShareBatch):
        if name in batch.whole:
            return microbatch_rows(name, batch.whole[name], spec, microbatch, num_microbatches)
        spec = batch.held_spec(name, spec)
    return microbatch_rows(name, batch[name], spec, microbatch, num_microbatches)


def _whole_and_part(program: StageProgram, held: HeldValue) -> tuple[TensorSpec, Region]:
    """Return the shape and dtype of an input's micro-batch with all rows, and the index ranges of
    it that this rank reads."""
    spec, share = held.spec, program.share
    region = local_region(spec.shape, held.layout, program.mesh, program.coordinates)
    if share is None or not held.layout[0].is_shard:
        return spec, region
    dim = held.layout[0].dim
    per_row = spec.shape[dim] // share.batch_size
    shape = (*spec.shape[:dim], per_row * share.total, *spec.shape[dim + 1 :])
    first = share.first if share.rows else 0
    own = (per_row * first, per_row * (first + max(share.rows, 1)))
    return replace(spec, shape=shape), (*region[:dim], own, *region[dim + 1 :])


def check_batch(
    batch: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], num_microbatches: int
) -> None:
    """Raise UsageError (AP130) unless the batch has the plan's shapes. ``specs`` has, for every
    input of the model, its shape in one micro-batch: every rank checks all inputs, so that all
    ranks refuse a batch before any of them has sent a message."""
    for name, spec in specs.items():
        if name not in batch:
            raise _missing(name, batch)
        batch_rows(batch, name, spec, 0, num_microbatches)


def _missing(name: str, batch: Mapping[str, Tensor]) -> UsageError:
    return UsageError(
        "AP130",
        f"the batch has no {name!r}, which the model reads",
        why=f"it has {', '.join(sorted(batch)) or 'nothing'}",
    )


def microbatch_rows(
    name: str, tensor: Tensor, spec: TensorSpec, microbatch: int, num_microbatches: int
) -> Tensor:
    """Return the rows of one micro-batch of ``tensor``; a tensor without a batch dimension is
    returned whole."""
    if tuple(tensor.shape) == spec.shape:
        return tensor
    if tensor.dim() == len(spec.shape):
        differing = [
            dim
            for dim, (have, want) in enumerate(zip(tensor.shape, spec.shape, strict=True))
            if have != want
        ]
        dim = differing[0]
        if len(differing) == 1 and tensor.shape[dim] == num_microbatches * spec.shape[dim]:
            return tensor.narrow(dim, microbatch * spec.shape[dim], spec.shape[dim])
    raise UsageError(
        "AP130",
        f"batch input {name!r} has shape {tuple(tensor.shape)}",
        why=f"the plan is for {spec.shape}"
        + (f" in each of {num_microbatches} micro-batches" if num_microbatches > 1 else ""),
        fix="pass the global batch that was planned, or plan for this one",
    )


def local_part(
    tensor: Tensor,
    region: Region,
    dtype: str,
    device: torch.device | None = None,
) -> Tensor:
    """Cut the index ranges ``region`` from ``tensor``; return them on ``device``, in ``dtype`` if
    floating."""
    part = tensor
    if region != whole_region(tensor.shape):
        part = tensor[region_slices(region)]
    target = getattr(torch, dtype) if part.is_floating_point() else part.dtype
    return part.to(device=device, dtype=target).contiguous()
