"""Batch normalization: one canonical form, and the statistics of a split batch.

Captured, ``aten.batch_norm`` writes to its running buffers outside of its schema. Here it becomes
``_native_batch_norm_legit_functional``, which returns their new values; the stage keeps them
(``Graph.updates``), so that recomputing a block does not update them twice.

If the batch is split, the ranks exchange the mean m_i and variance v_i of their parts, of equal
size, and combine them (Chan et al. 1979): m = mean m_i, v = mean v_i + mean (m_i − m)². With x̂ =
(x − m) / σ and weight w the gradient of x is

    w / σ · (g − mean g − x̂ · mean(g x̂))

whose two means are over the whole batch: one all-reduce. The weight's and the bias'
gradients stay partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...planner.graph.graph import Ref, TensorSpec
from .collectives import Rank

BATCH_NORM = "aten.batch_norm.default"
BATCH_NORM_WITH_BUFFERS = "aten._native_batch_norm_legit_functional.default"
BATCH_NORMS = (BATCH_NORM, BATCH_NORM_WITH_BUFFERS, "aten._native_batch_norm_legit.no_stats")

_WHOLE = torch.ops.aten._native_batch_norm_legit_functional.default

Specs = tuple[TensorSpec, ...]


def batch_norm_call(
    path: str, args: tuple[Any, ...], outputs: Specs, spec_of: Callable[[Ref], TensorSpec]
) -> tuple[str, tuple[Any, ...], Specs]:
    """Return (op path, arguments, output shapes and dtypes) of a captured batch norm in canonical
    form. With running buffers in training it is the functional op with five outputs, else
    ``batch_norm`` with one."""
    if path == "aten._native_batch_norm_legit.no_stats":
        tensor, weight, bias, _, momentum, eps = args
        called = (tensor, weight, bias, None, None, True, momentum, eps, False)
        return BATCH_NORM, called, outputs[:1]
    if path == BATCH_NORM and not (args[5] and isinstance(args[3], Ref)):
        return path, args, outputs
    mean, variance = spec_of(args[3]), spec_of(args[4])
    statistics = replace(mean, requires_grad=False)
    held = (statistics, replace(variance, requires_grad=False))
    return BATCH_NORM_WITH_BUFFERS, args[:8], (outputs[0], statistics, statistics, *held)


def batch_norm(
    rank: Rank,
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    axes: tuple[int, ...],
) -> Tensor:
    """Compute a batch norm in training mode on one rank, with statistics of the batch sharded over
    mesh axes ``axes``."""
    return _normalize(rank, tensor, weight, bias, eps=eps, axes=axes)[0]


def batch_norm_with_buffers(  # noqa: PLR0913
    rank: Rank,
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float,
    eps: float,
    axes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute a batch norm in training mode on one rank, with statistics of the batch sharded over
    mesh axes ``axes``. Return the result, the batch's mean and 1/σ, and the new running mean and
    variance."""
    if not axes and tensor.dtype == running_mean.dtype:
        made: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _WHOLE(
            tensor, weight, bias, running_mean, running_var, True, momentum, eps
        )
        return made
    result, mean, variance = _normalize(rank, tensor, weight, bias, eps=eps, axes=axes)
    count = tensor.numel() // tensor.shape[1]
    for axis in axes:
        count *= rank.communicator.size(axis)
    with torch.no_grad():
        unbiased = (variance * (count / (count - 1))).to(running_var.dtype)
        new_mean = running_mean.lerp(mean.to(running_mean.dtype), momentum)
        new_variance = running_var.lerp(unbiased, momentum)
        scale = (variance + eps).rsqrt()
    return result, mean, scale, new_mean, new_variance


def _normalize(
    rank: Rank,
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    axes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized tensor (scaled and shifted), and mean and biased variance per channel
    of the whole batch over all ranks of ``axes``."""
    with torch.no_grad():
        mean, variance = _statistics(rank, tensor, axes)
    normal: Tensor = _Normal.apply(tensor, mean, (variance + eps).rsqrt(), rank, axes)  # type: ignore[no-untyped-call]
    shape = [1, -1] + [1] * (tensor.dim() - 2)
    result = normal if weight is None else normal * weight.view(shape)
    result = result if bias is None else result + bias.view(shape)
    return result.to(tensor.dtype), mean, variance


def _statistics(rank: Rank, tensor: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    exact = tensor if tensor.dtype == torch.float64 else tensor.float()
    dims = [dim for dim in range(tensor.dim()) if dim != 1]
    variance, mean = torch.var_mean(exact, dims, correction=0)
    for axis in axes:
        pairs = rank.communicator.all_gather(torch.stack([mean, variance])[None], axis, 0)
        spread, mean = torch.var_mean(pairs[:, 0], 0, correction=0)
        variance = pairs[:, 1].mean(0) + spread
    return mean, variance


class _Normal(torch.autograd.Function):
    """Autograd function for (x − m) / σ per channel (dimension 1), with mean m and deviation σ of
    the whole batch over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, mean: Tensor, scale: Tensor, rank: Rank, axes: tuple[int, ...]
    ) -> Tensor:
        shape = [1, -1] + [1] * (tensor.dim() - 2)
        result = (tensor.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(tensor, mean, scale)
        ctx.rank, ctx.axes = rank, axes
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        tensor, mean, scale = ctx.saved_tensors
        gradient = gradients[0]
        shape = [1, -1] + [1] * (tensor.dim() - 2)
        normal = (tensor.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        dims = [dim for dim in range(tensor.dim()) if dim != 1]
        means = torch.stack([gradient.mean(dims), (gradient * normal).mean(dims)])
        for axis in ctx.axes:
            communicator = ctx.rank.communicator
            means = communicator.all_reduce(means, axis) / communicator.size(axis)
        own, along = means[0].view(shape), means[1].view(shape)
        result = (gradient - own - normal * along) * scale.view(shape)
        return result.to(tensor.dtype), None, None, None, None
