"""Ring attention: keys and values pass from rank to rank, and no rank holds all of them.

In: this rank's parts of queries (..., L, D), keys and values (..., L, E). Out: the attention of its
queries to the keys of all ranks. ``planner.ops.attention`` has the algorithm and its source.

In a step a rank attends to the part of one rank, while it sends this part to the next rank along
the mesh axis. A kernel returns results o and, for each query, the logarithm s of the sum of the
exponentials of its scores. Of two parts, s = log(exp s1 + exp s2) and o = o1 + w (o2 - o1) with
w = sigmoid(s2 - s1), in float32 at least. With s of all keys, the backward of a part needs nothing
of the others: its scores are exp(x - s).

With causality, rank r of n has chunks 2r and 2n - 1 - 2r of 2n (``swapped``), the earlier one
first. Of the ranks with an earlier first chunk, all queries see the first chunk and none the
second; of the others, the queries of the second chunk see both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.graph.layout import Mesh
from .attention_parts import Attended, AttentionInParts, attend, attend_backward, merge
from .collectives import Alone, Communicator, Parts, Rank, Running, swap
from .lower_right import split_in_half


class Seen(NamedTuple):
    """Queries from number ``first`` on and the keys up to number ``end``, of one step. Each of
    these queries sees all of these keys or, if ``is_causal``, those up to its own position."""

    first: int
    end: int
    is_causal: bool


def ring_attention(
    rank: Rank,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ring: tuple[int, ...],
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention for this rank's queries; the mesh axis of ``ring`` splits the positions of
    queries, keys and values. If queries have more heads than keys and values, a group of them reads
    each head of these."""
    (axis,) = ring
    own = tuple(each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
    if is_causal:
        own = (*swapped(rank, axis, own[0]), *swapped(rank, axis, *own[1:]))
    whole = Ring(rank, axis, scale, is_causal)
    made: Tensor = AttentionInParts.apply(whole, *own)  # type: ignore[no-untyped-call]
    result = swapped_back(rank, axis, made) if is_causal else made
    return result.view(*query.shape[:-1], value.shape[-1])


def swapped(rank: Rank, axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors with this rank's first half of positions and the mirrored rank's second half,
    in the order of positions; one message sends the halves of all tensors."""
    halves = [split_in_half(each) for each in tensors]
    sent = torch.cat([second.flatten() for _, second in halves])
    received = swap(sent, (axis,), rank.communicator)
    parts = torch.split(received, [each.numel() for _, each in halves])
    taken = [part.view(second.shape) for part, (_, second) in zip(parts, halves, strict=True)]
    order = 1 if _keeps_earlier(rank.communicator, axis) else -1
    pairs = zip(halves, taken, strict=True)
    return tuple(torch.cat([first, second][::order], -2) for (first, _), second in pairs)


def swapped_back(rank: Rank, axis: int, tensor: Tensor) -> Tensor:
    """Return a tensor, in the order of ``swapped``, for this rank's own positions."""
    length = tensor.shape[-2]
    sizes, order = [length - length // 2, length // 2], 1
    if not _keeps_earlier(rank.communicator, axis):
        sizes, order = sizes[::-1], -1
    kept, taken = torch.split(tensor, sizes, -2)[::order]
    return torch.cat([kept, swap(taken, (axis,), rank.communicator)], -2)


def _keeps_earlier(communicator: Communicator, axis: int) -> bool:
    """Return whether this rank's chunk 2r is before the chunk 2n - 1 - 2r that it takes."""
    return 2 * communicator.coordinate(axis) < communicator.size(axis)


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring of the ranks along a mesh axis, for attention with ``scale``. With ``is_causal`` tensors
    are in the order of ``swapped``."""

    rank: Rank
    axis: int
    scale: float | None
    is_causal: bool

    def sources(self) -> list[int]:
        """Return the rank whose keys and values this rank has in each step."""
        size, place = self._size_and_place()
        return [(place - step) % size for step in range(size)]

    def pass_on(self, rows: Tensor) -> Running:
        """Start to send ``rows`` to the next rank, and to receive as many from the one before."""
        size, place = self._size_and_place()
        sent, received = [0] * size, [0] * size
        sent[(place + 1) % size] = received[(place - 1) % size] = len(rows)
        parts = Parts(lambda: (tuple(sent), tuple(received), ()))
        return self.rank.communicator.exchange(rows, parts, (self.axis,))

    def seen(self, source: int, length: int) -> Seen:
        """Return the pairs of this rank's queries and the keys of the rank ``source`` that are
        seen; both have ``length`` positions."""
        size, place = self._size_and_place()
        if not self.is_causal or source == place:
            return Seen(0, length, self.is_causal)
        own, other = (min(2 * each, 2 * size - 1 - 2 * each) for each in (place, source))
        longer = length - length // 2
        if other < own:
            return Seen(0, longer if 2 * source < size else length // 2, False)
        return Seen(longer if 2 * place < size else length // 2, length, False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """Return the results of this rank's queries, in their dtype, and their statistics."""
        length, wide = query.shape[-2], torch.promote_types(query.dtype, torch.float32)
        moved, *sources = torch.cat([key.flatten(), value.flatten()]), *self.sources()
        found = Attended(query, query)
        for step, source in enumerate(sources):
            running = self.pass_on(moved) if step + 1 < len(sources) else None
            seen = self.seen(source, length)
            own = (query[..., seen.first :, :], *_cut(moved, key, value, seen.end))
            part = attend(*own, is_causal=seen.is_causal, scale=self.scale)
            if step == 0:
                found = Attended(part.out.to(wide, copy=True), part.statistic.clone())
            else:
                merge(found, part, seen.first)
            moved = moved if running is None else running.wait()
        return Attended(found.out.to(query.dtype), found.statistic)

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], whole: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's queries, keys and values (``inputs``)."""
        query, key, value = inputs
        length, wide = query.shape[-2], torch.promote_types(query.dtype, torch.float32)
        moved, *sources = torch.cat([key.flatten(), value.flatten()]), *self.sources()
        of_query = torch.zeros_like(query, dtype=wide)
        home, sums = torch.zeros_like(moved), torch.zeros_like(moved)
        under_way: Running | None = None
        for step, source in enumerate(sources):
            running = self.pass_on(moved) if step + 1 < len(sources) else None
            first, end, is_causal = self.seen(source, length)
            own = (query[..., first:, :], *_cut(moved, key, value, end))
            of_rows = Attended(whole.out[..., first:, :], whole.statistic[..., first:])
            found = attend_backward(
                gradient[..., first:, :], own, of_rows, is_causal=is_causal, scale=self.scale
            )
            of_query[..., first:, :] += found[0]
            if under_way is not None:
                sums = under_way.wait()
            for into, part in zip(
                _cut(sums if step else home, key, value, end), found[1:], strict=True
            ):
                into += part
            if step:
                under_way = self.pass_on(sums)
            moved = moved if running is None else running.wait()
        if under_way is not None:
            home += under_way.wait()
        return of_query.to(query.dtype), *_cut(home, key, value, length)

    def _size_and_place(self) -> tuple[int, int]:
        communicator = self.rank.communicator
        return communicator.size(self.axis), communicator.coordinate(self.axis)


def _cut(moved: Tensor, key: Tensor, value: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values, up to number ``end``, that a message of both has; ``key`` and
    ``value`` have their shapes."""
    keys, values = torch.split(moved, [key.numel(), value.numel()])
    return keys.view(key.shape)[..., :end, :], values.view(value.shape)[..., :end, :]


class _Still(Alone):
    """Communicator of the first of ``num_ranks`` ranks that all have its tensors."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def size(self, axis: int) -> int:
        return self._num_ranks


def _measured(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_ranks: int,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    is_causal: bool,
) -> Tensor:
    """Compute one rank's part of ring attention, in as many steps as on ``num_ranks`` ranks."""
    rank = Rank(Mesh(("cp",), (num_ranks,)), (0,), _Still(num_ranks))
    return ring_attention(rank, query, key, value, ring=(0,), is_causal=is_causal, scale=scale)


for _name, _is_causal in (("ring_attention", False), ("balanced_ring_attention", True)):
    torch.library.define(
        f"autoparallel::{_name}",
        "(Tensor query, Tensor key, Tensor value, int num_ranks, float? scale=None, "
        "bool enable_gqa=False) -> Tensor",
    )
    torch.library.impl(
        f"autoparallel::{_name}",
        "CompositeImplicitAutograd",
        partial(_measured, is_causal=_is_causal),
    )
