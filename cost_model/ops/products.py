"""Seconds of a matrix product or of fused attention on a GPU: tiles dealt out in waves.

In: a device, a product (batch, m, n, k) of m×k by k×n, its dtype. Out: seconds of the kernel
on the device. The output is cut into tiles, each computed by one unit (an SM), so that a
product takes whole waves::

    tiles   = batch · ⌈m / tile_m⌉ · ⌈n / tile_n⌉
    waves   = ⌈tiles · splits / units⌉
    busy    = waves · 2 · tile_m · tile_n · ⌈k / splits⌉ / (rate of a unit · reuse)
    math    = (fill + busy) / alignment
    seconds = launch + √(math² + (bytes / bandwidth)²)

of the tile and the splits of k that give the least. ``reuse`` is below 1 for small tiles, which
load more bytes per FLOP. ``splits`` above 1 are for products of fewer tiles than units; they
pay a float32 write and read of the output. ``alignment`` is below 1 where rows do not start at
multiples of 16 bytes, so that the loads that feed tensor cores are narrower. The root stands
for the knee of the roofline, where loads and math of one kernel contend; far from it the
larger of the two counts.

A product never gets faster by growing in one dimension at the same alignment: each candidate
tile's time is monotone, and growing only takes candidates (splits) away.

Sources: NVIDIA, "Matrix multiplication background" (tile and wave quantization, alignment).
The constants are fitted on products on A100 alone; with them and the preset efficiencies the
18 FP8 products on H100 and H200 of Azure/AI-benchmarking-guide@8fd0c6e come out within 10 %.
"""

from __future__ import annotations

import math

from ..cluster.cluster import Device

Product = tuple[int, int, int, int]
"""Shape of a batched matrix product of m×k by k×n: (batch, m, n, k)."""

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (2, 4, 8)
REUSE_ELEMENTS = 4000.0
"""Number of elements of an output tile at which a kernel reaches half the FLOP rate of an
infinitely large tile. Fitted on the eight cuBLASLt products on A100 of
Azure/AI-benchmarking-guide@8fd0c6e."""
FILL_SECONDS = 3e-6
"""Seconds in which a kernel fills its pipeline of loads and stores its last tile; fitted on the
same products as ``REUSE_ELEMENTS``."""
ALIGNED_RATE = {16: 1.0, 8: 0.65, 4: 0.65, 2: 0.36, 1: 0.36}
"""Share of a product's FLOP rate that is reached, by the alignment of its rows in bytes, in formats
of two bytes or less.

Fitted on output heads of 50257, 25128, 12564 and 6282 columns in float16 on A100, of which
the second is aligned: 83, 230, 150 and 146 TFLOP/s (VIA-Research/vTrain, single node).
"""
ATTENTION_ROWS = 128
"""Queries (forward) or keys (backward) in a block of FlashAttention-2 that one SM computes."""
MIN_SPLIT = 256

DTYPE_BYTES = {"float64": 8, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_LARGEST = 256 * 128


def reuse(area: int) -> float:
    """Return the FLOP rate that a matrix-product kernel reaches with output tiles of ``area``
    elements, as a share of its rate with the largest tile.

    >>> reuse(256 * 128)
    1.0
    """
    return area / (area + REUSE_ELEMENTS) * (_LARGEST + REUSE_ELEMENTS) / _LARGEST


_TILE_FLOPS = tuple((m, n, 2 * m * n / reuse(m * n)) for m, n in TILES)
"""For each output tile: its two sides, and the FLOPs that an SM, at the rate of the largest tile,
could do in the time in which it advances this tile by one element of k."""


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a floating dtype; 2 for dtypes not in ``DTYPE_BYTES``."""
    return DTYPE_BYTES.get(dtype, 2)


def alignment(product: Product, dtype: str) -> float:
    """Return the share (0 to 1) of its FLOP rate that a product (batch, m, n, k) reaches given how
    its rows, of n or k elements, are aligned in memory. The products of its backward have rows of
    the same lengths, so the share holds for them too.

    >>> alignment((1, 1024, 50257, 1024), "float16")
    0.36
    """
    size = element_bytes(dtype)
    if size > 2:
        return 1.0
    return ALIGNED_RATE[math.gcd(math.gcd(product[2], product[3]) * size, 16)]


def product_seconds(
    device: Device,
    product: Product,
    dtype: str,
    *,
    flops_per_second: float,
    bytes_per_second: float,
    aligned: float = 1.0,
) -> float:
    """Return the seconds of one matrix product (batch, m, n, k), without kernel launch, on a device
    with known ``num_units`` (SMs). ``flops_per_second`` is the rate of all units with the largest
    output tile; ``aligned`` is the share of it that ``alignment`` returns."""
    if min(product) <= 0:
        return 0.0
    flops = _wave_flops(product, device.num_units, flops_per_second / bytes_per_second)
    busy = (FILL_SECONDS + flops / flops_per_second) / aligned
    return math.hypot(busy, product_bytes(product, dtype) / bytes_per_second)


def product_bytes(product: Product, dtype: str) -> float:
    """Return the bytes of the factors and the output of a product (batch, m, n, k); an element of
    the output has at least 2 bytes."""
    batch, m, n, k = product
    size = element_bytes(dtype)
    return batch * ((m * k + k * n) * size + m * n * max(size, 2))


def _wave_flops(product: Product, units: int, flops_per_byte: float) -> float:
    """Return the FLOPs that all ``units`` (SMs) could do while a product (batch, m, n, k) runs in
    waves of output tiles, with the best size of tiles and the best number of splits of k.
    ``flops_per_byte``: FLOPs that the device can do in the time in which it moves a byte."""
    batch, m, n, k = product
    best = math.inf
    for tile_m, tile_n, tile_flops in _TILE_FLOPS:
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        best = min(best, -(-tiles // units) * k * tile_flops)
        if tiles < units:
            extra = 8 * batch * m * n * flops_per_byte / units
            for splits in SPLITS:
                part = max(-(-k // splits), MIN_SPLIT)
                best = min(best, -(-tiles * splits // units) * part * tile_flops + extra)
    return best * units


def attention_seconds(
    device: Device,
    product: Product,
    flops: float,
    *,
    flops_per_second: float,
    backward: bool = False,
) -> float:
    """Return the seconds of fused attention's arithmetic, without kernel launch, whose blocks are
    distributed over the SMs in waves. ``product`` is (batch · heads, queries, keys, head size),
    ``flops`` the number that the kernel executes. An SM computes a block of ``ATTENTION_ROWS``
    queries of one head in the forward, or of as many keys in the backward."""
    heads, queries, keys, _ = product
    rows = keys if backward else queries
    if heads * rows <= 0:
        return 0.0
    blocks = heads * -(-rows // ATTENTION_ROWS)
    waves = -(-blocks // device.num_units)
    of_block = flops / (heads * rows) * ATTENTION_ROWS
    return FILL_SECONDS + waves * device.num_units * of_block / flops_per_second
