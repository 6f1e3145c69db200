"""Reads at indices along a split dimension: each rank reads its own part.

Parts of other ranks read as zero, so the results are partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...planner.graph.graph import Ref
from ..ops.collectives import Rank
from ..ops.local_loss import part_of
from .local_op import Call, LocalOp


def _own(rank: Rank, indices: Tensor, size: int, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return ``indices`` relative to the start of this rank's shard of a dimension (0 for indices
    in other shards), and a mask of the indices in this shard. ``size``: its size; ``axes``: mesh
    axes that split the dimension."""
    start, total = part_of(rank, size, axes)
    local = torch.where(indices < 0, indices + total, indices) - start
    held = (local >= 0) & (local < size)
    return torch.where(held, local, 0), held


def split_index_select(
    rank: Rank,
    source: Tensor,
    dim: int,
    indices: Tensor,
    *,
    axes: tuple[int, ...],
    keep: bool = False,
) -> Tensor:
    """Index dimension ``dim`` of ``source``, which is sharded over mesh axes ``axes``, by
    ``indices``; results for entries of other ranks are zero. With ``keep``, a single index keeps
    the dimension."""
    if keep:
        indices = indices.reshape(-1)
    local, held = _own(rank, indices, source.shape[dim], axes)
    places: list[slice | Tensor] = [slice(None)] * dim
    picked = source[(*places, local)]
    shape = held.shape + (1,) * (picked.dim() - dim - held.dim())
    return picked.masked_fill(~held.view(shape), 0.0)


def split_gather(
    rank: Rank, source: Tensor, dim: int, indices: Tensor, *, axes: tuple[int, ...]
) -> Tensor:
    """Compute ``source.gather(dim, indices)`` along a dimension sharded over mesh axes ``axes``;
    results for entries of other ranks are zero."""
    local, held = _own(rank, indices, source.shape[dim], axes)
    return source.gather(dim, local).masked_fill(~held, 0.0)


def index(op: LocalOp) -> Call:
    """Return the call that computes ``x[:, i]`` on one rank's shards; the indexed dimension may be
    sharded."""
    indexed = [dim for dim, item in enumerate(op.node.args[1]) if isinstance(item, Ref)]
    axes = op.axes("self", indexed[0]) if len(indexed) == 1 else ()
    if not axes:
        return op.call()
    dim = indexed[0]
    return op.by_rank(split_index_select, op["self"], dim, op["indices"][dim], axes=axes)


def index_select(op: LocalOp) -> Call:
    """Return the call that computes ``index_select`` on one rank's shards; the indexed dimension
    may be sharded."""
    axes = op.axes("self", op.dim())
    if not axes:
        return op.call()
    return op.by_rank(split_index_select, op["self"], op.dim(), op["index"], axes=axes, keep=True)


def gather(op: LocalOp) -> Call:
    """Return the call that computes ``gather`` on one rank's shards; the indexed dimension may be
    sharded."""
    axes = op.axes("self", op.dim())
    if not axes:
        return op.call()
    return op.by_rank(split_gather, op["self"], op.dim(), op["index"], axes=axes)
