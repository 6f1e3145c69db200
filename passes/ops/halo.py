"""Attention with a window on split positions: a rank receives only the keys before its own.

In: this rank's parts of queries (..., L, D), keys and values (..., L, E). Out: the attention of its
queries to windows of W keys. The first of a rank's queries sees the last W - 1 positions before the
rank's own, its halo. One exchange brings their keys and values: the last min(L, W - 1) of the rank
before, and of the ranks before that as many of the rest as each has. In the backward the gradients
of a halo travel back to the rank that sent it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .collectives import Parts, Rank, exchange
from .windowed import windowed_attention


def halo_attention(
    rank: Rank,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ring: tuple[int, ...],
    window: int,
    scale: float | None = None,
) -> Tensor:
    """Compute attention for this rank's queries, each over ``window`` keys; the mesh axis of
    ``ring`` splits the positions of queries, keys and values. If queries have more heads than keys
    and values, a group of them reads each head of these."""
    (axis,) = ring
    place, length = rank.communicator.coordinate(axis), key.shape[-2]
    away = [other - place for other in range(rank.communicator.size(axis))]
    numbers = [min(max(window - 1 - (abs(each) - 1) * length, 0), length) for each in away]
    sent, received = (
        tuple(number if sign * each > 0 else 0 for each, number in zip(away, numbers, strict=True))
        for sign in (1, -1)
    )
    if window > 1:
        rows = torch.cat([each.movedim(-2, 0).flatten(1) for each in (key, value)], 1)
        rows = torch.cat([rows[length - number :] for number in sent])
        halo = exchange(rank, rows, Parts(lambda: (sent, received, ())), ring)
        widths = [key[..., 0, :].numel(), value[..., 0, :].numel()]
        key, value = map(_joined, torch.split(halo, widths, 1), (key, value))
    enable_gqa = query.shape[-3] != key.shape[-3]
    return windowed_attention(query, key, value, window=window, scale=scale, enable_gqa=enable_gqa)


def _joined(rows: Tensor, own: Tensor) -> Tensor:
    """Return the tensor ``own`` (..., L, E) behind the positions ``rows``, one in each row."""
    before = rows.view(-1, *own.shape[:-2], own.shape[-1]).movedim(0, -2)
    return torch.cat([before, own], -2)


_NAME = "autoparallel::halo_attention"
torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, int halo, float? scale=None, bool enable_gqa=False, "
    "*, int window) -> Tensor",
)


@torch.library.impl(_NAME, "CompositeImplicitAutograd")
def _measured(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    halo: int,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int,
) -> Tensor:
    """Compute one rank's part of attention whose halo has ``halo`` positions, all zero."""
    key, value = (functional.pad(each, (0, 0, halo, 0)) for each in (key, value))
    return windowed_attention(query, key, value, window=window, scale=scale, enable_gqa=enable_gqa)
