"""Causal attention of a sequence's last queries: ``autoparallel::lower_right_attention``.

With L queries and S keys, query i sees the keys up to S - L + i: the mask is aligned to its lower
right corner, where ``is_causal`` of PyTorch's attention aligns it to the upper left one. On a GPU
no mask is written: FlashAttention has this alignment (Dao 2023, FlashAttention-2, version 2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LOWER_RIGHT = "autoparallel.lower_right_attention.default"

_NAME = "autoparallel::lower_right_attention"
torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, float? scale=None, "
    "bool enable_gqa=False) -> Tensor",
)


@torch.library.impl(_NAME, "CompositeImplicitAutograd")
def lower_right_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Queries (..., L, D) of the last L of S positions; keys (..., S, D), values (..., S, E)."""
    rows, columns = query.shape[-2], key.shape[-2]
    mask: Tensor | None = None
    if rows != columns and query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # it imports torch._dynamo

        mask = causal_lower_right(rows, columns)
    elif rows != columns:
        every = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        mask = every.tril(columns - rows)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal=mask is None, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
