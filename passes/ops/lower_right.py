"""Causal attention of some of a sequence's queries, in runs of positions.

``autoparallel::lower_right_attention`` takes the last queries, ``balanced_attention`` two runs:
each half of its queries is aligned to an end of its own among the keys.
``autoparallel::scaled_dot_product_attention`` is torch's op with two more arguments: with
``window`` query i sees the keys j with i - window < j <= i, with ``documents`` the keys whose ids
in this tensor are its own; its queries are the last of the keys' positions.

With L queries and S keys, query i sees the keys up to S - L + i: the mask is aligned to its lower
right corner, where ``is_causal`` of PyTorch's attention aligns it to the upper left one. On a GPU
no mask is written: FlashAttention has this alignment (Dao 2023, FlashAttention-2, version 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from .documents import document_attention
from .windowed import windowed_attention

_NAME = "autoparallel::lower_right_attention"
torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, float? scale=None, "
    "bool enable_gqa=False) -> Tensor",
)


@torch.library.impl(_NAME, "CompositeImplicitAutograd")
def lower_right_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute causal attention of L queries (..., L, D), which are the last L of S positions, over
    keys and values (..., S, E)."""
    rows, columns = query.shape[-2], key.shape[-2]
    mask: Tensor | None = None
    if isinstance(query, FakeTensor):  # no values to hide, and no mask on a GPU
        columns = rows
    if rows != columns and query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # it imports torch._dynamo

        mask = causal_lower_right(rows, columns)
    elif rows != columns:
        every = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        mask = every.tril(columns - rows)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=enable_gqa,
    )


_BALANCED = "autoparallel::balanced_attention"
torch.library.define(
    _BALANCED,
    "(Tensor query, Tensor key, Tensor value, int[] ends, float? scale=None, "
    "bool enable_gqa=False) -> Tensor",
)


@torch.library.impl(_BALANCED, "CompositeImplicitAutograd")
def balanced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[int],
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute causal attention for two halves of the queries (the first may have one more), where
    the last query of half i is at position ``ends[i]`` - 1 among the keys."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    halves = zip(split_in_half(query), ends, strict=True)
    return torch.cat([attend_upto(end, own, key, value, **options) for own, end in halves], -2)


def split_in_half(query: Tensor) -> tuple[Tensor, ...]:
    """Split queries into two halves along their positions; the first is longer if the number is
    odd."""
    length = query.shape[-2]
    return torch.split(query, [length - length // 2, length // 2], -2)


def attend_upto(
    end: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int = 0,
    documents: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute causal attention of queries, the last of which is at position ``end`` - 1 among the
    keys. Keys from ``end`` on are cut off, as no query sees them. ``window``: number of keys that a
    query sees, if not all; ``documents``: see ``documents``."""
    if documents is not None:
        options.pop("enable_gqa", None)
        given = query, key, value, documents
        return document_attention(*given, end=end, window=window, **options)
    key, value = (each.narrow(-2, 0, end) for each in (key, value))
    if window:
        return windowed_attention(query, key, value, window=window, **options)
    result: Tensor = torch.ops.autoparallel.lower_right_attention(query, key, value, **options)
    return result


_LIMITED = "autoparallel::scaled_dot_product_attention"
torch.library.define(
    _LIMITED,
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int window=0, "
    "Tensor? documents=None) -> Tensor",
)


@torch.library.impl(_LIMITED, "CompositeImplicitAutograd")
def _attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute ``attend_upto`` for the queries at the last positions; attention is causal, without a
    mask and without dropout."""
    if attn_mask is not None or dropout_p or not is_causal:
        raise ValueError(
            "attention with a window or documents is causal, without a mask and without dropout"
        )
    return attend_upto(key.shape[-2], query, key, value, **options)
