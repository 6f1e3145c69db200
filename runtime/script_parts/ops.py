"""Ops of a script that compute differently on a rank's part than on the whole tensor.

Other such functions are copied from ``passes``; a script has these in another form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as scripts have it
from torch import Tensor

from ...passes.ops.local_loss import _classes, _split_class_rows
from ...passes.ops.random_ops import _UNIFORM_BITS, _shifted, random_bits, step_key
from ...passes.ops.windowed import windowed_attention
from .mesh import Mesh, all_gather, all_to_all, take_part
from .stages import Draw

__all__ = ["F"]


def split_cross_entropy(
    mesh: Mesh,
    logits: Tensor,
    target: Tensor,
    count: Tensor | float,
    *,
    axes: tuple[str, ...],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy summed over rows, divided by ``count``; ``axes`` split classes."""
    classes = _classes(mesh, logits, axes, ignore_index, label_smoothing)  # type: ignore[arg-type]
    rows = _split_class_rows(mesh, logits, target, classes)  # type: ignore[arg-type]
    return (rows.sum() / count).to(logits.dtype)


def activate(activation: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply an expert's activation function, between its two matrix products, to ``rows``."""
    return activation(rows)


def attend_upto(
    end: int, query: Tensor, key: Tensor, value: Tensor, *, window: int = 0, **options: Any
) -> Tensor:
    """Compute causal attention of queries that end at position ``end`` - 1 of the keys, each over
    ``window`` keys at the most if it is not 0."""
    key, value = (each.narrow(-2, 0, end) for each in (key, value))
    if window:
        return windowed_attention(query, key, value, window=window, **options)
    rows = query.shape[-2]
    seen = torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(end - rows)
    return F.scaled_dot_product_attention(query, key, value, seen, **options)


def exchanged_split(
    mesh: Mesh, matrix: Tensor, *, sizes: list[int], dim: int, wanted: tuple[int | None, ...]
) -> list[Tensor]:
    """Cut a matrix, sharded along its other dimension, along ``dim`` into parts of the given sizes.

    ``wanted`` has for each mesh axis the dimension along which it shards a part (None: it does
    not). If one axis shards the parts, all parts travel in one all-to-all, sorted by rank.
    """
    places = [(axis, at) for axis, at in zip(mesh.shape, wanted, strict=True) if at is not None]
    if len(places) > 1:
        for axis, _ in reversed(places):
            matrix = all_gather(matrix, mesh, axis, dim=1 - dim)
        parts = list(torch.split(matrix, sizes, dim))
        for axis, at in places:
            parts = [take_part(part, mesh, axis, dim=at) for part in parts]
        return parts
    ((axis, _),) = places
    count = mesh.size(axis)
    shares = [part.chunk(count, dim) for part in torch.split(matrix, sizes, dim)]
    by_rank = torch.cat([share[to] for to in range(count) for share in shares], dim)
    own_rows = all_to_all(by_rank, mesh, axis, split_dim=dim, concat_dim=1 - dim)
    return list(torch.split(own_rows, [size // count for size in sizes], dim))


class Dropout(torch.autograd.Function):
    """Dropout whose mask depends on places in the whole tensor, drawn again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: float, number: int, key: int, start: tuple[int, ...]
    ) -> Tensor:
        ctx.how = p, number, key, start
        threshold = min(round((1 - p) * (1 << 32)) - (1 << 31), (1 << 31) - 1)
        bits = random_bits(x.shape, start, number=number, key=key, device=x.device)
        return (x * (bits < threshold)).mul_(1 / (1 - p) if p < 1 else 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return Dropout.forward(ctx, gradients[0], *ctx.how), None, None, None, None


def dropout(
    x: Tensor,
    p: float,
    mesh: Mesh,
    draw: Draw,
    *,
    number: int,
    split: dict[str, int],
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Apply dropout number ``number`` of a block to ``x``; other arguments: ``start_of``."""
    start = start_of(x, mesh, draw, split=split, rows=rows)
    key = step_key(draw.seed, draw.batch)
    result: Tensor = Dropout.apply(x, p, draw.first + number, key, start)  # type: ignore[no-untyped-call]
    return result


def uniform(
    like: Tensor,
    mesh: Mesh,
    draw: Draw,
    *,
    number: int,
    split: dict[str, int],
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Draw numbers in [0, 1) of the shape and dtype of ``like``, as ``dropout`` draws."""
    start = start_of(like, mesh, draw, split=split, rows=rows)
    width = {torch.bfloat16: 8, torch.float16: 11}.get(like.dtype, _UNIFORM_BITS)
    key, number = step_key(draw.seed, draw.batch), draw.first + number
    bits = random_bits(like.shape, start, number=number, key=key, device=like.device)
    return _shifted(bits, 32 - width, 32).to(like.dtype).mul_(1 / (1 << width))


def start_of(
    x: Tensor, mesh: Mesh, draw: Draw, *, split: dict[str, int], rows: tuple[int, int] | None
) -> tuple[int, ...]:
    """Return the indices in the whole batch's tensor of the first element of ``x``, a rank's part.

    ``split`` maps an axis to the dimension that it splits; ``rows`` is the batch dimension and its
    size in a micro-batch.
    """
    start, sizes = [0] * x.dim(), list(x.shape)
    for axis, dim in reversed(split.items()):
        start[dim] += mesh.coordinate(axis) * sizes[dim]
        sizes[dim] *= mesh.size(axis)
    if rows is not None:
        start[rows[0]] += draw.microbatch * rows[1]
    return tuple(start)
