"""Causal attention in which a position sees a window of positions, in time that grows with it.

Query i sees the keys j with i - window < j <= i. The queries are the last of the keys' positions.
They are attended in chunks as long as a window, each with the keys of two chunks, by torch's own
kernels under a mask of one chunk; no mask of all positions is written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute causal attention of L queries (..., L, D), which are the last L of S positions, over
    keys and values (..., S, E), each query over ``window`` keys."""
    rows, before = query.shape[-2], min(key.shape[-2] - query.shape[-2], window - 1)
    start = key.shape[-2] - rows - before
    key, value = (each.narrow(-2, start, rows + before) for each in (key, value))
    if enable_gqa:  # the kernels that take masks read no groups on GPUs
        count = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(count, -3) for each in (key, value))
    first = rows if rows < 2 * window else window + rows % window
    end = before + first
    made = _banded(query[..., :first, :], key[..., :end, :], value[..., :end, :], window, scale)
    if first == rows:
        return made
    folded = [_chunks(query[..., first:, :], window, window)]
    folded += [_chunks(each[..., end - window :, :], 2 * window, window) for each in (key, value)]
    found = _banded(folded[0], folded[1], folded[2], window, scale)
    shape = (query.shape[0], -1, *found.shape[1:])
    return torch.cat([made, found.view(shape).transpose(1, 2).flatten(2, 3)], -2)


def _chunks(rows: Tensor, length: int, step: int) -> Tensor:
    """Cut ``rows`` (batch, heads, positions, size) into chunks of ``length`` positions, of which
    one begins every ``step`` positions; return them as (batch · chunks, heads, length, size)."""
    return rows.unfold(-2, length, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _banded(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None) -> Tensor:
    rows, columns = query.shape[-2], key.shape[-2]
    every = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    last = columns - rows
    seen = every.tril(last).triu(last - window + 1)
    return functional.scaled_dot_product_attention(query, key, value, seen, scale=scale)
