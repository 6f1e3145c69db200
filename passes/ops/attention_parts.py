"""Kernels of attention to a part of the keys, whose results can be merged.

In: queries (N, H, L, D), keys (N, G, S, D) and values (N, G, S, E); a group of H / G heads of
queries reads each head of keys and values. Out: results (N, H, L, E), and statistics (N, H, L): the
logarithm of the sum of the exponentials of a query's scores, in float32 at least. The backward
takes results and statistics of all keys, and returns the gradients that belong to the part.

PyTorch's fused kernels compute both: on a CPU its FlashAttention, for heads of keys and values of
one size; on a GPU FlashAttention in 16 bits, else the memory-efficient kernel, which reads no
groups. For all others, as in float64 on a GPU, the scores are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

aten = torch.ops.aten

STATISTICS_ALIGNED = 32
"""Multiple to which the memory-efficient kernel pads the queries of its statistics
(kAlignLSE, ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h)."""


class Attended(NamedTuple):
    """Results and statistics."""

    out: Tensor
    statistic: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> Attended:
    """Compute attention to a part of the keys. With ``is_causal`` the queries are at the positions
    of the keys, as many of them, and see these up to their own."""
    kernel = kernel_of(query, key, value)
    if kernel == "cpu":
        return Attended(
            *aten._scaled_dot_product_flash_attention_for_cpu.default(
                query, key, value, 0.0, is_causal, scale=scale
            )
        )
    if kernel == "flash":
        found = aten._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return Attended(*found[:2])
    key, value = for_each_head(query, key, value)
    if kernel == "efficient":
        out, statistic, *_ = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return Attended(out, statistic[..., : query.shape[-2]])
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _scores(query.to(wide), key.to(wide), is_causal=is_causal, scale=scale)
    statistic = scores.logsumexp(-1)
    weights = (scores - statistic.unsqueeze(-1)).exp_()
    return Attended((weights @ value.to(wide)).to(query.dtype), statistic)


def attend_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    whole: Attended,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, ``inputs``, through their scores alone.
    ``gradient``: of the results; ``whole``: results and statistics of all keys."""
    query, key, value = inputs
    kernel = kernel_of(query, key, value)
    options: dict[str, Any] = {"scale": scale}
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return tuple(backward(gradient, *inputs, *whole, 0.0, is_causal, **options))
    if kernel == "flash":
        backward = aten._scaled_dot_product_flash_attention_backward.default
        lengths = query.shape[-2], key.shape[-2]
        none = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return tuple(
            backward(
                gradient,
                *inputs,
                *whole,
                None,
                None,
                *lengths,
                0.0,
                is_causal,
                none,
                none,
                **options,
            )
        )
    heads = for_each_head(query, key, value)
    if kernel == "efficient":
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        rows = query.shape[-2]
        statistic = functional.pad(whole.statistic, (0, -rows % STATISTICS_ALIGNED))
        none = torch.zeros((), dtype=torch.int64, device=query.device)
        wanted = [True, True, True, False]
        found = backward(
            *(gradient, query, *heads, None, whole.out, statistic, none, none, 0.0, wanted),
            is_causal,
            **options,
        )[:3]
    else:
        found = _written_backward(
            gradient, (query, *heads), whole, is_causal=is_causal, scale=scale
        )
    count = query.shape[-3] // key.shape[-3]
    of_query, *of_heads = found
    summed = (each.unflatten(-3, (-1, count)).sum(-3) if count > 1 else each for each in of_heads)
    return of_query, *summed


def merge(whole: Attended, part: Attended, first: int) -> None:
    """Merge the results of a part of the keys, for the queries from number ``first`` on, into
    ``whole``, whose results are in the dtype of statistics."""
    out, statistic = whole.out[..., first:, :], whole.statistic[..., first:]
    share = torch.sigmoid(part.statistic - statistic).unsqueeze(-1)
    out.lerp_(part.out.to(out.dtype), share)
    statistic.copy_(torch.logaddexp(statistic, part.statistic))


class AttentionInParts(torch.autograd.Function):
    """Autograd function of attention in parts, by an object with ``attend`` and ``backward``. A
    recomputed block that keeps the results of attention keeps its results, and runs no part
    again."""

    @staticmethod
    def forward(ctx: Any, parts: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = computed_once(lambda: parts.attend(query, key, value))
        ctx.parts = parts
        ctx.save_for_backward(query, key, value, *found)
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *whole = ctx.saved_tensors
        return None, *ctx.parts.backward(gradients[0], (query, key, value), Attended(*whole))


def computed_once(compute: Callable[[], Any]) -> Any:
    """Return the results of ``compute``, a part of a forward. If the forward is repeated in the
    backward by a mode that keeps results of expensive kernels, they are those of the first run."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if hasattr(mode, "once"):
            return mode.once(compute)
    return compute()


def kernel_of(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return the kernel for tensors of these shapes and this dtype: "cpu", "flash", "efficient" or
    "written"."""
    if not (query.numel() and key.numel()):
        return "written"  # kernels take no empty tensors
    size, is_half = query.shape[-1], query.dtype.itemsize == 2
    is_alike = size == value.shape[-1]
    if not query.is_cuda:
        return "cpu" if is_alike else "written"
    is_fake = isinstance(query, FakeTensor)  # there may be no GPU
    is_recent = is_fake or torch.cuda.get_device_capability(query.device) >= (8, 0)
    if is_recent and is_half and is_alike and size % 8 == 0 and size <= 256:
        return "flash"
    is_aligned = not (size | value.shape[-1]) % (8 if is_half else 4)
    return "efficient" if is_aligned and query.dtype != torch.float64 else "written"


def for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    count = query.shape[-3] // key.shape[-3]
    if count == 1:
        return key, value
    return key.repeat_interleave(count, -3), value.repeat_interleave(count, -3)


def _scores(query: Tensor, key: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-2, -1) * _factor(query, scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _factor(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _written_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    whole: Attended,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    given, query, key, value, out = (each.to(wide) for each in (gradient, *inputs, whole.out))
    scores = _scores(query, key, is_causal=is_causal, scale=scale)
    weights = (scores - whole.statistic.unsqueeze(-1)).exp_()
    of_weights = given @ value.transpose(-2, -1) - (given * out).sum(-1, keepdim=True)
    of_scores = weights * of_weights * _factor(query, scale)
    of_key, of_value = of_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ given
    dtype = gradient.dtype
    return (of_scores @ key).to(dtype), of_key.to(dtype), of_value.to(dtype)
