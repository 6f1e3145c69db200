"""Random numbers that depend on their position, not on earlier draws.

A tensor's draw is cut into tiles, a grid that follows from its shape alone. Each tile is drawn by
torch's own kernel from the default generator, seeded by the key of the build and the number of the
tile, which counts through all draws of the build. So any box of a tensor has the same values on any
rank, at the cost of the tiles that it touches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, prod

import torch
from torch import Tensor

from ...planner.graph.layout import Region

TILE = 1 << 14
"""Most elements of a tile. Per tile, seeding and copying take 10 µs, drawing 120 µs, and its 64 KB
stay in the cache: 130 million normal numbers per second, against 60 million for whole tensors in
newly allocated memory."""

_ROWS = 4
"""Factor by which the length of dimension 0 counts more in ``tile_shape``: it is split more finely,
as ZeRO shards along it."""


@cache
def tile_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tiles in which random numbers for a tensor of ``shape`` are drawn:
    the longest dimension is halved until a tile has at most ``TILE`` elements. By halving, shards
    over 2, 4, 8, … ranks begin and end at edges of tiles.

    >>> tile_shape((4096, 14336)), tile_shape((10, 3))
    ((64, 224), (10, 3))
    """
    extents = list(shape)
    while prod(extents) > TILE:
        lengths = [
            size * (_ROWS if dim == 0 else 1) if size > 1 else 0 for dim, size in enumerate(extents)
        ]
        longest = lengths.index(max(lengths))
        extents[longest] = ceil(extents[longest] / 2)
    return tuple(extents)


def num_tiles(shape: tuple[int, ...]) -> int:
    """Return the number of tiles in which random numbers for a tensor of ``shape`` are drawn.

    >>> num_tiles((4096, 14336)), num_tiles(())
    (4096, 1)
    """
    return max(1, prod(_grid(shape)))


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    extents = tile_shape(shape)
    return tuple(ceil(size / part) for size, part in zip(shape, extents, strict=True) if part)


def draw_box(
    target: Tensor,
    shape: tuple[int, ...],
    box: Region,
    draw: Callable[[Tensor], object],
    seed_of: Callable[[int], int],
) -> None:
    """Fill ``target`` with the part ``box`` of a tensor of ``shape`` whose random numbers are drawn
    tile by tile. ``draw(tile)`` fills a contiguous tile from torch's default generator, which is
    seeded with ``seed_of(i)`` for tile ``i``."""
    if not all(stop > start for start, stop in box):
        return
    extents, grid = tile_shape(shape), _grid(shape)
    memory = torch.empty(prod(extents), dtype=target.dtype)
    touched = [
        range(start // part, ceil(stop / part))
        for (start, stop), part in zip(box, extents, strict=True)
    ]
    for place in itertools.product(*touched):
        low = [at * part for at, part in zip(place, extents, strict=True)]
        sizes = [min(p, s - at) for p, s, at in zip(extents, shape, low, strict=True)]
        tile = memory[: prod(sizes)].view(sizes)
        torch.default_generator.manual_seed(seed_of(_number(place, grid)))
        draw(tile)
        source, sink = [], []
        for (start, stop), at, size in zip(box, low, sizes, strict=True):
            first, last = max(start, at), min(stop, at + size)
            source.append(slice(first - at, last - at))
            sink.append(slice(first - start, last - start))
        target[tuple(sink)].copy_(tile[tuple(source)])


def _number(place: Sequence[int], grid: Sequence[int]) -> int:
    number = 0
    for at, count in zip(place, grid, strict=True):
        number = number * count + at
    return number


def tile_seed(key: int, number: int) -> int:
    """Return the seed (32 bits, as torch's CPU generator uses) of tile ``number`` of a model build
    with ``key``; tiles below 2**32 have different seeds. MurmurHash's finalizer, which permutes
    32-bit numbers, is applied twice, each time after half of ``key`` is mixed in."""
    mixed = _permuted((number + key) & 0xFFFFFFFF)
    return _permuted(mixed ^ (key >> 32 & 0xFFFFFFFF))


def _permuted(value: int) -> int:
    value = (value ^ value >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16
