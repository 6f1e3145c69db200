"""Causal attention within the documents that are packed into a sequence.

In: queries (N, H, L, D), keys (N, G, S, D) and values (N, G, S, E) as in ``attention_parts``, and
ids of documents (N or 1, ..., S): a position sees the positions up to its own that have its id. The
queries are the last L of the first ``end`` positions. Out: results (N, H, L, E).

Documents are attended one after another, those of equal length that follow each other at once: time
grows with the sum of the squares of their lengths, and no mask is written. Of a document that
begins before the queries, these attend to the keys before them and to those at their own positions,
and both results are merged. On a GPU in 16 bits FlashAttention takes all documents at once, by
cumulative lengths; its causal mask is aligned to the last query and the last key of each document
(Dao 2023, FlashAttention-2, version 2.1). The host reads the bounds of documents once from a tensor
of ids.

If an id comes again after another one, or if documents are longer than a window, masks of chunks
of queries, or ``windowed_attention`` of each document, are used instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from .attention_parts import (
    Attended,
    AttentionInParts,
    attend,
    attend_backward,
    for_each_head,
    kernel_of,
    merge,
)
from .windowed import windowed_attention

aten = torch.ops.aten

CHUNK = 512
"""Queries of one mask, where masks are written."""

MOST_CHUNKS = 8
"""Chunks of a rank's queries that different ranks may attend, at the most."""

EVEN = 1.05
"""Pairs of the busiest rank relative to the mean, up to which queries stay where they are."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the documents of each sequence: 0, the first positions of later documents, and the
    number of positions. ``is_repeated``: some id comes again after another one."""

    rows: tuple[tuple[int, ...], ...]
    is_repeated: bool


def bounds_of(documents: Tensor) -> Bounds:
    """Return the bounds of the documents with these ids (..., S). A tensor keeps its bounds, so
    that all layers wait for a GPU once. Ids without values are of one document per sequence."""
    length = documents.shape[-1]
    rows = documents.detach().reshape(-1, length)
    if isinstance(documents, FakeTensor) or documents.is_meta:
        return Bounds(((0, length),) * len(rows), is_repeated=False)
    version = -1 if documents.is_inference() else documents._version
    kept: dict[int, Bounds] = vars(documents).get("autoparallel_bounds", {})
    if version not in kept:
        kept = {version: _read(rows.cpu())}
        documents.autoparallel_bounds = kept  # type: ignore[attr-defined]
    return kept[version]


def _read(rows: Tensor) -> Bounds:
    length, found, is_repeated = rows.shape[-1], [], False
    for row in rows:
        inner = (row[1:] != row[:-1]).nonzero().flatten() + 1
        ids = torch.cat([row[:1], row[inner]])
        is_repeated |= len(set(ids.tolist())) < len(ids)
        found.append((0, *inner.tolist(), length))
    return Bounds(tuple(found), is_repeated)


@lru_cache(maxsize=16)
def shared_chunks(
    bounds: Bounds, num_ranks: int, num_chunks: int, window: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank, the chunks of positions whose queries it attends, ``num_chunks`` each
    and in order, so that all ranks multiply about as many pairs: the chunk with most pairs goes to
    the rank with the fewest so far (Graham 1969, longest processing time first). Rank r keeps its
    own chunks, from number r · ``num_chunks`` on, if none then has ``EVEN`` times the mean."""
    own = tuple(tuple(range(r * num_chunks, (r + 1) * num_chunks)) for r in range(num_ranks))
    length = bounds.rows[0][-1] // (num_ranks * num_chunks)
    work = [0] * (num_ranks * num_chunks)
    for start, stop in (each for row in bounds.rows for each in pairwise(row)):
        for chunk in range(start // length, (stop - 1) // length + 1):
            low, high = max(start, chunk * length), min(stop, (chunk + 1) * length)
            work[chunk] += _pairs(high - start, window) - _pairs(low - start, window)
    if max(sum(work[c] for c in each) for each in own) * num_ranks <= EVEN * sum(work):
        return own
    loads, found = [0] * num_ranks, [list[int]() for _ in own]
    for chunk in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        free = (rank for rank in range(num_ranks) if len(found[rank]) < num_chunks)
        rank = min(free, key=lambda each: (loads[each], each != chunk // num_chunks))
        found[rank].append(chunk)
        loads[rank] += work[chunk]
    return tuple(tuple(sorted(each)) for each in found)


def _pairs(length: int, window: int) -> int:
    """Return the number of keys that the first ``length`` positions of a document see."""
    full = min(length, window) if window else length
    return full * (full + 1) // 2 + (length - full) * window


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    *,
    end: int,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention within documents for the last queries up to position ``end`` - 1.
    ``window``: number of positions that a query sees at the most; 0 sets no limit."""
    bounds = bounds_of(documents)
    if len(bounds.rows) < len(query):
        bounds = Bounds(bounds.rows * len(query), bounds.is_repeated)
    packed = Packed(bounds, end, scale)
    if bounds.is_repeated:
        return _under_masks(query, key, value, documents, end, window, scale)
    if window and window < max(b - a for row in bounds.rows for a, b in pairwise(row)):
        return packed.windowed(query, key, value, window)
    result: Tensor = AttentionInParts.apply(packed, query, key, value)  # type: ignore[no-untyped-call]
    return result


class Part(NamedTuple):
    """Queries ``own`` of ``number`` documents of a row, in each as many, the keys before them, and
    the keys at their positions. Only a single document has keys before its queries."""

    row: int
    number: int
    own: slice
    before: slice
    along: slice

    def of(self, rows: Tensor, at: slice) -> Tensor:
        """Return a view of the positions ``at`` of ``rows`` (N, H, L, ...), as (number, H, length
        of a document, ...)."""
        shape = (rows.shape[1], self.number, -1, *rows.shape[3:])
        return rows[self.row, :, at].view(shape).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Packed:
    """Attention with ``scale`` within documents, of the last queries up to position ``end`` - 1."""

    bounds: Bounds
    end: int
    scale: float | None

    def parts(self, length: int) -> Iterator[Part]:
        """Yield the documents with some of the ``length`` queries."""
        first = self.end - length
        for row, bounds in enumerate(self.bounds.rows):
            seen = [
                (start, max(start, first), min(stop, self.end))
                for start, stop in pairwise(bounds)
                if start < self.end and stop > first
            ]
            for _, same in groupby(seen, lambda each: (each[0] < each[1], each[2] - each[1])):
                own = list(same)
                start, low, high = *own[0][:2], own[-1][2]
                queries = slice(low - first, high - first)
                yield Part(row, len(own), queries, slice(start, low), slice(low, high))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """Return the results of the queries, in their dtype, and their statistics."""
        if kernel_of(query, key, value) == "flash":
            return self._attend_at_once(query, key, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        whole = Attended(out, query.new_empty(query.shape[:-1], dtype=wide))
        for part in self.parts(query.shape[-2]):
            rows = part.of(query, part.own)
            given = part.of(key, part.along), part.of(value, part.along)
            found = attend(rows, *given, is_causal=True, scale=self.scale)
            if part.before.start < part.before.stop:
                given = part.of(key, part.before), part.of(value, part.before)
                earlier = attend(rows, *given, is_causal=False, scale=self.scale)
                found = Attended(found.out.to(wide), found.statistic)
                merge(found, earlier, 0)
            for into, each in zip(whole, found, strict=True):
                part.of(into, part.own).copy_(each)
        return whole

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], whole: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values (``inputs``)."""
        if kernel_of(*inputs) == "flash":
            return self._backward_at_once(gradient, inputs, whole)
        query, key, value = inputs
        sums = tuple(map(torch.zeros_like, inputs))
        for part in self.parts(query.shape[-2]):
            own = part.own
            of_rows = Attended(part.of(whole.out, own), part.of(whole.statistic, own))
            for keys, is_causal in ((part.along, True), (part.before, False)):
                if keys.start == keys.stop:
                    continue
                given = part.of(query, own), part.of(key, keys), part.of(value, keys)
                found = attend_backward(
                    part.of(gradient, own), given, of_rows, is_causal=is_causal, scale=self.scale
                )
                for into, each, at in zip(sums, found, (own, keys, keys), strict=True):
                    part.of(into, at).add_(each)
        return sums  # type: ignore[return-value]

    def windowed(self, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Return results under a window that is shorter than some document."""
        found: dict[int, list[Tensor]] = {}
        for part in self.parts(query.shape[-2]):
            keys = slice(part.before.start, part.along.stop)
            given = part.of(query, part.own), part.of(key, keys), part.of(value, keys)
            out = windowed_attention(*given, window=window, scale=self.scale, enable_gqa=True)
            found.setdefault(part.row, []).append(out.transpose(0, 1).flatten(1, 2))
        return torch.stack([torch.cat(each, 1) for each in found.values()])

    def _attend_at_once(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        given = (query, key[..., : self.end, :], value[..., : self.end, :])
        flat = (each.transpose(1, 2).flatten(0, 1) for each in given)
        lengths = self._lengths(query)
        found = aten._flash_attention_forward.default(
            *flat, *lengths, 0.0, True, False, scale=self.scale
        )
        return Attended(found[0].unflatten(0, (len(query), -1)).transpose(1, 2), found[1])

    def _backward_at_once(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], whole: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = inputs
        given = (gradient, query, key[..., : self.end, :], value[..., : self.end, :], whole.out)
        flat = (each.transpose(1, 2).flatten(0, 1) for each in given)
        none = torch.zeros(2, dtype=torch.uint64, device=query.device)
        lengths = self._lengths(query)
        found = aten._flash_attention_backward.default(
            *flat, whole.statistic, *lengths, 0.0, True, none, none, scale=self.scale
        )
        of_query, *rest = (each.unflatten(0, (len(query), -1)).transpose(1, 2) for each in found)
        later = key.shape[-2] - self.end
        return of_query, *(functional.pad(each, (0, 0, 0, later)) for each in rest)

    def _lengths(self, query: Tensor) -> tuple[Any, ...]:
        """Return the cumulative lengths of queries and of keys up to ``end`` for each document, and
        the largest lengths of both."""
        first = self.end - query.shape[-2]
        seen = (
            (start, min(stop, self.end))
            for row in self.bounds.rows
            for start, stop in pairwise(row)
            if start < self.end
        )
        pairs = ((max(0, stop - max(start, first)), stop - start) for start, stop in seen)
        counts = tuple(zip(*pairs, strict=True))
        sums = ([0, *accumulate(each)] for each in counts)
        whole = (torch.tensor(each, dtype=torch.int32, device=query.device) for each in sums)
        return *whole, *map(max, counts)


def _under_masks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    end: int,
    window: int,
    scale: float | None,
) -> Tensor:
    """Compute attention under masks of ``CHUNK`` queries, whatever the order of the ids."""
    key, value = for_each_head(query, key, value)
    places = torch.arange(end, device=query.device)
    ids, first = documents.reshape(-1, 1, 1, documents.shape[-1]), end - query.shape[-2]
    parts = []
    for start in range(first, end, CHUNK):
        stop = min(start + CHUNK, end)
        own = slice(start, stop)
        keys = slice(max(0, start - window + 1) if window else 0, stop)
        back = places[own, None] - places[keys]
        seen = (ids[..., own].transpose(-2, -1) == ids[..., keys]) & (back >= 0)
        if window:
            seen = seen & (back < window)
        given = query[..., start - first : stop - first, :], key[..., keys, :], value[..., keys, :]
        parts.append(functional.scaled_dot_product_attention(*given, seen, scale=scale))
    return torch.cat(parts, -2)
