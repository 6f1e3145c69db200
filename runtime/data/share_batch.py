"""A rank's share of the global batch, and what its stages need beyond it.

In: the inputs that one rank has of a step, and which rows they are. Out: a ``ShareBatch``, which
``runtime.data.rank_batch`` reads like a global batch. Inputs of which a stage needs all rows (their
layout does not split them, or the counting of the loss reads them) are gathered over the ranks that
have the other parts, once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...passes.local.input_rows import HeldRows, StageRows
from ...passes.ops.collectives import Communicator
from ...planner.graph import TensorSpec


class ShareBatch(dict[str, Tensor]):
    """Inputs by name, of which this rank has the rows ``held``; of ``whole`` it has all.

    ``dims`` maps each input that has rows to the dimension that counts them.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], held: HeldRows, dims: Mapping[str, int]
    ) -> None:
        super().__init__(tensors)
        self.held = held
        self.dims = dims
        self.whole: dict[str, Tensor] = {}

    def held_spec(self, name: str, spec: TensorSpec) -> TensorSpec:
        """The spec of this rank's rows of a micro-batch, from that of all of them."""
        if name not in self.dims:
            return spec
        shape = list(spec.shape)
        shape[self.dims[name]] = shape[self.dims[name]] // self.held.total * self.held.rows
        return replace(spec, shape=tuple(shape))


def whole_batch(
    shares: Sequence[tuple[HeldRows, Mapping[str, Tensor]]], dims: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the global batch from all ranks' shares of it, each with the rows that it has.

    ``dims`` is as of ``ShareBatch``.
    """
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
    """Completes those inputs of a stage of which each of its ranks needs all rows.

    Collective over the stage. ``part`` is this rank's of the stage's rows.
    """
    own = rows.held(part, batch.held.num_microbatches)
    for name in rows.whole if len(rows.sizes) > 1 else ():
        dim = rows.inputs[name]
        tensor = _of_part(batch[name], dim, batch.held, own).to(device)
        batch.whole[name] = _gathered(
            tensor, dim, rows, tensor.shape[dim + 1] // own.rows, communicator
        )


def _of_part(tensor: Tensor, dim: int, held: HeldRows, own: HeldRows) -> Tensor:
    """One part's rows, as (micro-batch, rows) at ``dim``, of what a rank holds."""
    count = held.num_microbatches
    per_row = tensor.shape[dim] // held.size
    by_microbatch = _unflattened(tensor, dim, (count, held.rows * per_row))
    return by_microbatch.narrow(dim + 1, (own.first - held.first) * per_row, own.rows * per_row)


def _gathered(
    tensor: Tensor, dim: int, rows: StageRows, per_row: int, communicator: Communicator
) -> Tensor:
    """All parts of (…, micro-batch, rows, …) side by side, and the micro-batches in order."""
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
