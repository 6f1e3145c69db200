"""Cross entropy over rows and classes that are split across ranks.

The loss of a row with logits x, target t and label smoothing s over C classes is

    log Σ exp x  −  (1 − s) x_t  −  (s / C) Σ x

Split by class, the maximum, Σ exp, x_t and Σ x are reduced over the ranks (two
all-reduces: one maximum, one stacked sum); only one number per row is exchanged, and the
gradient softmax(x) − (1 − s) onehot(t) − s / C is local. Split by row, each rank divides
its sum by the count of all ranks' rows that are not ignored, so that the parts add up to
the mean.

Source: Megatron-LM's vocabulary-parallel cross entropy (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .collectives import Rank

MEAN, SUM = 1, 2


@dataclass(frozen=True, slots=True)
class _Classes:
    """Classes whose logits one rank holds: from ``start`` on, of ``total`` classes that are sharded
    over mesh axes ``axes``."""

    start: int
    total: int
    axes: tuple[int, ...]
    ignore_index: int
    smoothing: float


def cross_entropy(  # noqa: PLR0913
    rank: Rank,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    count: Tensor | None = None,
) -> Tensor:
    """Compute one rank's cross entropy of sharded logits, whose classes are dimension 1 (or the
    only dimension).

    ``count`` is the divisor of the mean; by default the number of rows over all ranks.

    ``axes``: the mesh axes that split the rows, and the axes that split the classes. On the axes of
    the classes the result is whole (I); on the axes of the rows it is a partial sum (P) when
    reduced, else split as the rows are.
    """
    row_axes, class_axes = axes
    if class_axes:
        rows = _split_class_rows(
            rank, logits, target, _classes(rank, logits, class_axes, ignore_index, label_smoothing)
        )
        if reduction not in (MEAN, SUM):
            return rows.to(logits.dtype)
        total = rows.sum().to(logits.dtype)
    else:
        how = "none" if reduction not in (MEAN, SUM) else "sum"
        total = functional.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=how,
            label_smoothing=label_smoothing,
        )
    if reduction != MEAN:
        return total
    if count is None:
        count = divisor(
            rank, target, weight, ignore_index=ignore_index, row_axes=row_axes, dtype=logits.dtype
        )
    return (total / count).to(logits.dtype)


def nll_loss(
    rank: Rank,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int,
    row_axes: tuple[int, ...],
    count: Tensor | None = None,
) -> Tensor:
    """Compute the mean negative log likelihood of rows sharded over mesh axes ``row_axes``: this
    rank's rows' share of the mean, so the results are partial sums. ``count``: divisor of the mean,
    if known."""
    total = functional.nll_loss(scores, target, weight, ignore_index=ignore_index, reduction="sum")
    if count is None:
        count = divisor(
            rank, target, weight, ignore_index=ignore_index, row_axes=row_axes, dtype=scores.dtype
        )
    return (total / count).to(scores.dtype)


def divisor(
    rank: Rank,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int,
    row_axes: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Return the divisor of a loss's mean: the number of rows on all ranks whose target is not
    ignored, weighted by class. It is float32 or float64, as half precision cannot count beyond some
    hundreds. ``dtype`` is that of the scores."""
    dtype = dtype if dtype == torch.float64 else torch.float32
    if target.is_floating_point():
        classes = target.shape[min(1, target.dim() - 1)]
        count = torch.full((), target.numel() // classes, dtype=dtype, device=target.device)
    else:
        count = count_targets(target, weight, ignore_index, dtype)
    if 0 in row_axes and rank.share is not None and rank.share.rows == 0:
        count = torch.zeros_like(count)
    for axis in row_axes:
        count = rank.communicator.all_reduce(count, axis)
    return count


def count_targets(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the number of targets that are not ``ignore_index``, each weighted by ``weight`` of
    its class."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return (weight.detach()[torch.where(kept, target, 0)] * kept).sum(dtype=dtype)


def _classes(
    rank: Rank, logits: Tensor, axes: tuple[int, ...], ignore_index: int, smoothing: float
) -> _Classes:
    local = logits.shape[min(1, logits.dim() - 1)]
    start, total = part_of(rank, local, axes)
    return _Classes(start, total, axes, ignore_index, smoothing)


def part_of(
    rank: Rank, local_size: int, axes: tuple[int, ...], *, mirrored: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Return the start of this rank's shard of a dimension that mesh axes ``axes`` split, and the
    whole size of that dimension. On the axes in ``mirrored`` the shard of the mirrored rank is
    meant. ``local_size``: size of each shard."""
    position, parts = 0, 1
    for axis in axes:
        size, own = rank.communicator.size(axis), rank.communicator.coordinate(axis)
        own = size - 1 - own if axis in mirrored else own
        position, parts = position * size + own, parts * size
    return position * local_size, parts * local_size


def _split_class_rows(rank: Rank, logits: Tensor, target: Tensor, classes: _Classes) -> Tensor:
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    rows: Tensor = _SplitClassLoss.apply(logits, target, classes, rank)  # type: ignore[no-untyped-call]
    return rows


class _SplitClassLoss(torch.autograd.Function):
    """Autograd function for the loss of each row, from targets (...) and this rank's logits (..., C
    / n) of C classes that n ranks share."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, classes: _Classes, rank: Rank) -> Tensor:
        exact = logits if logits.dtype == torch.float64 else logits.float()
        maximum = exact.amax(-1)
        for axis in classes.axes:
            maximum = rank.communicator.all_reduce(maximum.contiguous(), axis, "max")
        index, held = _local_target(target, classes, logits.shape[-1])
        sums = [(exact - maximum.unsqueeze(-1)).exp().sum(-1)]
        sums.append(exact.gather(-1, index.unsqueeze(-1)).squeeze(-1) * held)
        if classes.smoothing:
            sums.append(exact.sum(-1))
        stacked = torch.stack(sums)
        for axis in classes.axes:
            stacked = rank.communicator.all_reduce(stacked, axis)
        log_sum = maximum + stacked[0].log()
        rows = log_sum - (1 - classes.smoothing) * stacked[1]
        if classes.smoothing:
            rows = rows - classes.smoothing / classes.total * stacked[2]
        ctx.save_for_backward(logits, target, log_sum)
        ctx.classes = classes
        return rows.masked_fill(target == classes.ignore_index, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, log_sum = ctx.saved_tensors
        classes: _Classes = ctx.classes
        scale = gradients[0].masked_fill(target == classes.ignore_index, 0.0).unsqueeze(-1)
        index, held = _local_target(target, classes, logits.shape[-1])
        result = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        if classes.smoothing:
            result -= classes.smoothing / classes.total
        hit = ((classes.smoothing - 1) * held.to(result.dtype)).unsqueeze(-1)
        result.scatter_add_(-1, index.unsqueeze(-1), hit)
        return (result * scale).to(logits.dtype), None, None, None


def _local_target(target: Tensor, classes: _Classes, size: int) -> tuple[Tensor, Tensor]:
    """Return the targets relative to this rank's first class (0 for classes of other ranks), and a
    mask of the targets that are this rank's. ``size``: number of its classes."""
    index = target - classes.start
    held = (index >= 0) & (index < size)
    return torch.where(held, index, 0), held
