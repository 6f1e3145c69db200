"""Functions of generated code for ops that differ between a part and the whole.

Each function takes the rank first and local tensors next.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...planner.graph.layout import REPLICATE, Step, shard
from ..ops.collectives import Parts, Rank, convert, exchange, place_along, swap
from ..ops.documents import MOST_CHUNKS, bounds_of, shared_chunks
from ..ops.halo import halo_attention
from ..ops.local_loss import part_of
from ..ops.lower_right import attend_upto, split_in_half
from ..ops.ring import ring_attention


def split_embedding(
    rank: Rank, weight: Tensor, indices: Tensor, *, padding_idx: int, axes: tuple[int, ...]
) -> Tensor:
    """Look up embedding rows in this rank's shard of a vocabulary that is split over mesh axes
    ``axes``. Rows of other shards are zero, so the results are partial sums."""
    start, _ = part_of(rank, weight.shape[0], axes)
    index = indices - start
    held = (index >= 0) & (index < weight.shape[0])
    if padding_idx >= 0:
        padding = padding_idx - start
        padding_idx = padding if 0 <= padding < weight.shape[0] else -1
    rows: Tensor = torch.ops.aten.embedding.default(
        weight, torch.where(held, index, 0), padding_idx
    )
    return rows.masked_fill(~held.unsqueeze(-1), 0.0)


def split_causal_attention(
    rank: Rank, query: Tensor, key: Tensor, value: Tensor, *, axes: tuple[int, ...], **options: Any
) -> Tensor:
    """Compute causal attention for this rank's queries, whose positions are split over mesh axes
    ``axes``; the rank has all keys and values. Ranks share packed documents by their lengths."""
    if axes and "documents" in options:
        return shared_document_attention(rank, query, key, value, axes=axes, **options)
    start, _ = part_of(rank, query.shape[-2], axes)
    return attend_upto(start + query.shape[-2], query, key, value, **options)


def balanced_causal_attention(
    rank: Rank,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axes: tuple[int, ...],
    balanced: tuple[int, ...],
    **options: Any,
) -> Tensor:
    """Compute causal attention for the first half of this rank's queries and the second half of its
    partner's, so that the ranks' work is balanced; return the results of this rank's own queries.
    The partner is the rank at the mirrored coordinate (n - 1 - i for i of n) of each axis of
    ``balanced``: see ``ops.attention``."""
    start, _ = part_of(rank, query.shape[-2], axes)
    partner_start, _ = part_of(rank, query.shape[-2], axes, mirrored=balanced)
    kept, sent = split_in_half(query)
    taken = swap(sent, balanced, rank.communicator)
    own = attend_upto(start + kept.shape[-2], kept, key, value, **options)
    other = attend_upto(partner_start + query.shape[-2], taken, key, value, **options)
    return torch.cat([own, swap(other, balanced, rank.communicator)], -2)


def shared_document_attention(
    rank: Rank,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axes: tuple[int, ...],
    documents: Tensor,
    **options: Any,
) -> Tensor:
    """Compute causal attention within packed documents for the chunks of queries that this rank
    gets (``shared_chunks``), whose positions are split over mesh axes ``axes``; return the results
    of its own queries. The rank has all keys and values, and the ids ``documents`` of all
    positions."""
    place, length = place_along(rank.communicator, axes), query.shape[-2]
    count = gcd(length, MOST_CHUNKS)
    bounds, window = bounds_of(documents), options.get("window", 0)
    taken = shared_chunks(bounds, rank.mesh.num_ranks(axes), count, window)
    own, options["documents"] = range(place * count, (place + 1) * count), documents
    if all(chunk // count == owner for owner, each in enumerate(taken) for chunk in each):
        return attend_upto((place + 1) * length, query, key, value, **options)
    order = [chunk - own.start for each in taken for chunk in each if chunk in own]
    sent = tuple(sum(chunk in own for chunk in each) for each in taken)
    received = tuple(
        sum(chunk // count == owner for chunk in taken[place]) for owner in range(len(taken))
    )
    chunks, parts = query.chunk(count, -2), Parts(lambda: (sent, received, ()))
    rows = exchange(rank, torch.stack([chunks[at].flatten() for at in order]), parts, axes)
    found = [
        attend_upto((at + 1) * (length // count), row.view(chunks[0].shape), key, value, **options)
        for at, row in zip(taken[place], rows, strict=True)
    ]
    rows = torch.stack([each.flatten() for each in found])
    rows = exchange(rank, rows, parts.back(), axes)
    results = dict(zip(order, rows, strict=True))
    return torch.cat([results[at].view(found[0].shape) for at in range(count)], -2)


def grouped_attention(
    rank: Rank,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: tuple[tuple[int, ...], tuple[int, ...]],
    axes: tuple[int, ...] = (),
    balanced: tuple[int, ...] = (),
    ring: tuple[int, ...] = (),
    **options: Any,
) -> Tensor:
    """Compute attention in which a group of heads of queries reads each head of keys and values.
    ``heads``: the mesh axes that split the heads of queries, and those that split the heads of
    keys; if these are fewer, the rank takes the heads that its queries read. With ``axes``
    attention is causal, and they split the positions of queries; ``balanced``: see
    ``balanced_causal_attention``; ``ring``: see ``ring_attention``."""
    if heads[0] != heads[1]:
        start, num_heads = part_of(rank, query.shape[-3], heads[0])
        held, num_read = part_of(rank, key.shape[-3], heads[1])
        first = start * num_read // num_heads - held
        number = max(1, query.shape[-3] * num_read // num_heads)
        key, value = (each.narrow(-3, first, number) for each in (key, value))
    if ring:
        attended = halo_attention if "window" in options else ring_attention
        return attended(rank, query, key, value, ring=ring, **options)
    count = 1 if "documents" in options else query.shape[-3] // key.shape[-3]
    if count > 1 and ("window" in options or query.dtype.itemsize <= 2):
        options["enable_gqa"] = True
    elif count > 1:
        key, value = (each.repeat_interleave(count, -3) for each in (key, value))
    if balanced:
        named = {"axes": axes, "balanced": balanced}
        return balanced_causal_attention(rank, query, key, value, **named, **options)
    if axes or not options.keys().isdisjoint(("window", "documents")):
        return split_causal_attention(rank, query, key, value, axes=axes, **options)
    return functional.scaled_dot_product_attention(query, key, value, **options)


def exchanged_split(
    rank: Rank, matrix: Tensor, *, sizes: list[int], dim: int, wanted: tuple[int | None, ...]
) -> list[Tensor]:
    """Cut a matrix, sharded over ranks along its other dimension, into parts of ``sizes`` along
    ``dim``; return this rank's shard of each part. ``wanted`` has for each mesh axis the dimension
    along which it shards a part, or None. If one axis shards the matrix, a single all-to-all
    exchanges all parts, sorted by receiving rank; otherwise the matrix is gathered first."""
    held, axes = shard(1 - dim), [axis for axis, at in enumerate(wanted) if at is not None]
    if len(axes) > 1:
        steps = tuple(Step(axis, held, REPLICATE) for axis in reversed(axes))
        parts = torch.split(convert(matrix, steps, rank.communicator), sizes, dim)
        own = tuple(
            Step(axis, REPLICATE, shard(at)) for axis, at in enumerate(wanted) if at is not None
        )
        return [convert(part, own, rank.communicator) for part in parts]
    (axis,) = axes
    count = rank.mesh.shape[axis]
    shares = [part.chunk(count, dim) for part in torch.split(matrix, sizes, dim)]
    by_rank = torch.cat([share[to] for to in range(count) for share in shares], dim)
    own_rows = convert(by_rank, (Step(axis, held, shard(dim)),), rank.communicator)
    return list(torch.split(own_rows, [size // count for size in sizes], dim))
