"""``random_ops`` as one kernel: every element hashes its coordinates and is read and written once.

Imported only if Triton is installed (``random_ops.one_kernel``). The bits are those of
``random_ops.random_bits``, and so are the results, bit for bit: the arithmetic is the same in the
same order, in 64 bits for a row and in 32 for an element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DIMS = 6
_BLOCK = 1024


@triton.jit
def _mixed(value):  # type: ignore[no-untyped-def] # splitmix64
    value = value + -7046029254386353131
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return value ^ ((value >> 31) & ((1 << 33) - 1))


@triton.jit
def _along(rows, rest, size, start):  # type: ignore[no-untyped-def]
    """Return the hash of each row with the index along the fastest dimension of ``rest`` mixed in.
    ``size`` and ``start``: this dimension's size, and its first global index."""
    return _mixed(rows ^ (rest % size + start) * -7046029254386353131)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["seed", "column_seed", "threshold", "f0", "f1", "f2", "f3", "f4", "f5"]
)
def _draw(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel has no tuples
    source,
    result,
    numel,
    columns,
    s1,
    s2,
    s3,
    s4,
    f0,
    f1,
    f2,
    f3,
    f4,
    f5,
    seed: tl.int64,
    column_seed: tl.int64,
    threshold,
    scale,
    leading: tl.constexpr,
    width: tl.constexpr,
    drops: tl.constexpr,
    block: tl.constexpr,
):
    """Compute random numbers or dropout for a box of a global tensor at coordinates (f0, f1, …)."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numel
    row = at // columns
    rows = row * 0 + seed
    # The slowest dimension comes first: its coordinate is the rest of the faster ones.
    if leading == 1:
        rows = _mixed(rows ^ (row + f0) * -7046029254386353131)
    if leading == 2:
        rows = _mixed(rows ^ (row // s1 + f0) * -7046029254386353131)
        rows = _along(rows, row, s1, f1)
    if leading == 3:
        rows = _mixed(rows ^ (row // (s2 * s1) + f0) * -7046029254386353131)
        rows = _along(rows, row // s2, s1, f1)
        rows = _along(rows, row, s2, f2)
    if leading == 4:
        rows = _mixed(rows ^ (row // (s3 * s2 * s1) + f0) * -7046029254386353131)
        rows = _along(rows, row // (s3 * s2), s1, f1)
        rows = _along(rows, row // s3, s2, f2)
        rows = _along(rows, row, s3, f3)
    if leading == 5:
        rows = _mixed(rows ^ (row // (s4 * s3 * s2 * s1) + f0) * -7046029254386353131)
        rows = _along(rows, row // (s4 * s3 * s2), s1, f1)
        rows = _along(rows, row // (s4 * s3), s2, f2)
        rows = _along(rows, row // s4, s3, f3)
        rows = _along(rows, row, s4, f4)
    column = _mixed(at % columns + f5 + column_seed)
    bits = (rows.to(tl.int32) ^ column.to(tl.int32)) * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & ((1 << 17) - 1))
    bits = (bits + (rows >> 32).to(tl.int32)) * (0x846CA68B - (1 << 32))
    if drops:
        value = tl.load(source + at, mask=inside).to(tl.float32)
        made = (value * (bits < threshold).to(tl.float32)) * scale
    else:
        made = ((bits >> (32 - width)) & ((1 << width) - 1)).to(tl.float32) * scale
    tl.store(result + at, made.to(result.dtype.element_ty), mask=inside)


def draw(
    like: Tensor,
    start: Sequence[int] | None,
    *,
    seeds: tuple[int, int],
    threshold: int,
    scale: float,
    drops: bool,
    width: int = 24,
) -> Tensor:
    """Compute dropout of ``like`` (with ``drops``), or random numbers in [0, 1) of its shape, for a
    box of a global tensor that begins at coordinates ``start``. Numbers have ``width`` bits.
    ``like`` is contiguous, of at most ``MAX_DIMS`` dimensions and 32 bits per element. ``seeds``:
    for the hashes of rows and of columns. Dropout keeps elements whose random bits are below
    ``threshold`` and multiplies them by ``scale``."""
    result, sizes = torch.empty_like(like), list(like.shape) or [1]
    first = list(start or [0] * len(sizes))
    leading = len(sizes) - 1
    padding = [0] * (MAX_DIMS - 1 - leading)
    shape = [*sizes[1:-1], *(1 for _ in range(MAX_DIMS - 2 - max(leading - 1, 0)))]
    if result.numel():
        grid = (triton.cdiv(result.numel(), _BLOCK),)
        _draw[grid](
            like,
            result,
            result.numel(),
            sizes[-1],
            *shape,
            *first[:-1],
            *padding,
            first[-1],
            *seeds,
            threshold,
            scale,
            leading=leading,
            width=width,
            drops=drops,
            block=_BLOCK,
        )
    return result
