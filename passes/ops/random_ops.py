"""Random numbers that depend on no generator and no rank: counter-based.

Every element's number is a hash of four things: the step's key (seed and step), the number of the
call in the forward, and the element's coordinates in the global tensor, the whole batch included.
So any rank can draw its own part of any tensor, for any layout and micro-batch and again in a
recomputed forward, and all parts together equal the numbers of one device. Nothing is saved for the
backward: it draws the mask again.

The hash: all coordinates except the last are mixed in turn into 64 bits per row (splitmix64,
Steele, Lea and Flood 2014); the last coordinate gives 32 bits per column; a row and a column are
combined by two rounds of xor, multiply and shift in 32 bits. The idea of counters is Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3". On a GPU one kernel computes all of this
(``random_kernel``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .collectives import Rank

DROPOUT = "autoparallel.counter_dropout.default"
UNIFORM = "autoparallel.counter_uniform.default"

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROW_FACTOR, _LAST_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
_UNIFORM_BITS = 24


@dataclass(slots=True)
class Draws:
    """State of a rank's random ops: key of the training step and number of the micro-batch; and
    ``routed``, the number of tokens that each expert got, by layer of experts (None: not
    counted)."""

    key: int = 0
    microbatch: int = 0
    routed: dict[str, Tensor] | None = None

    @contextmanager
    def repeated(self, key: int, microbatch: int) -> Iterator[None]:
        """Make random ops draw the numbers of step ``key`` and ``microbatch`` within a ``with``
        block, to repeat that forward."""
        before = self.key, self.microbatch
        self.key, self.microbatch = key, microbatch
        try:
            yield
        finally:
            self.key, self.microbatch = before


def step_key(seed: int, step: int) -> int:
    """Return the key of a training step's random numbers, as a signed 64-bit integer.

    >>> step_key(0, 1) == step_key(0, 2), step_key(0, 1) == step_key(1, 1)
    (False, False)
    """
    return _signed(_mix(_mix(seed) + step))


def _mix(value: int) -> int:
    """Return the splitmix64 hash of a 64-bit integer, unsigned."""
    value = (value + _GAMMA) % _WORD
    value = (value ^ value >> 30) * _FIRST % _WORD
    value = (value ^ value >> 27) * _SECOND % _WORD
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD >> 1 else value


def _shifted(value: Tensor, bits: int, width: int) -> Tensor:
    """Shift each element right by ``bits``, as if it were an unsigned integer of ``width`` bits."""
    return (value >> bits).bitwise_and_((1 << width - bits) - 1)


def _mixed(value: Tensor) -> Tensor:
    """Replace each element of an int64 tensor by its splitmix64 hash, in place; return the
    tensor."""
    value += _signed(_GAMMA)
    value.bitwise_xor_(_shifted(value, 30, 64)).mul_(_signed(_FIRST))
    value.bitwise_xor_(_shifted(value, 27, 64)).mul_(_signed(_SECOND))
    return value.bitwise_xor_(_shifted(value, 31, 64))


def _seeds(number: int, key: int) -> tuple[int, int]:
    """Return the seeds for hashing rows and columns in random call ``number`` of a forward; ``key``
    is the training step's."""
    seed = _mix(key % _WORD ^ _mix(number))
    return _signed(seed), _signed(_mix(seed))


def one_kernel(like: Tensor) -> Callable[..., Tensor] | None:
    """Return ``random_kernel.draw``, a single Triton kernel, if it supports the tensor; else None,
    and ``random_bits`` is used, which takes about 60 kernels. Triton comes with PyTorch for CUDA
    and needs a C compiler. Float64, used only in verification, is not supported."""
    is_taken = like.is_cuda and like.is_contiguous() and like.dim() <= 6 and like.itemsize <= 4
    return _kernel() if is_taken else None


@cache
def _kernel() -> Callable[..., Tensor] | None:
    if find_spec("triton") is None or not (which("gcc") or which("clang")):
        return None
    from .random_kernel import draw

    return draw


def random_bits(
    shape: Sequence[int],
    start: Sequence[int] | None,
    *,
    number: int,
    key: int,
    device: torch.device,
) -> Tensor:
    """Return 32 random bits (int32) for each element of a box of a global tensor. ``shape``: of the
    box; ``start``: coordinates of its first element (default: zeros); ``number``: number of the
    random call in the forward; ``key``: of the training step."""
    sizes, first = list(shape) or [1], list(start or ()) or [0] * max(len(shape), 1)
    row_seed, column_seed = _seeds(number, key)

    def coordinates(dim: int) -> Tensor:
        return torch.arange(first[dim], first[dim] + sizes[dim], device=device)

    rows = torch.full((1,) * (len(sizes) - 1), row_seed, dtype=torch.int64, device=device)
    for dim in range(len(sizes) - 1):
        along = coordinates(dim).view(-1, *(1,) * (len(sizes) - 2 - dim))
        rows = _mixed(rows ^ along * _signed(_GAMMA))
    columns = _mixed(coordinates(len(sizes) - 1) + column_seed)
    low, high = rows.to(torch.int32), (rows >> 32).to(torch.int32)
    bits = low.unsqueeze(-1) ^ columns.to(torch.int32)
    bits.mul_(_ROW_FACTOR).bitwise_xor_(_shifted(bits, 15, 32))
    return bits.add_(high.unsqueeze(-1)).mul_(_LAST_FACTOR).view(tuple(shape))


@torch.library.custom_op("autoparallel::counter_dropout", mutates_args=())
def counter_dropout(
    x: Tensor, p: float, *, number: int, key: int = 0, start: Sequence[int] | None = None
) -> Tensor:
    """Apply dropout to ``x``, a box of a global tensor that begins at coordinates ``start``: set a
    share ``p`` to zero and scale the rest up. ``number``: of the random call; ``key``: of the
    step."""
    threshold = min(round((1 - p) * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    scale = 1 / (1 - p) if p < 1 else 0.0
    draw = one_kernel(x)
    if draw is not None:
        seeds = _seeds(number, key)
        return draw(x, start, seeds=seeds, threshold=threshold, scale=scale, drops=True)
    bits = random_bits(x.shape, start, number=number, key=key, device=x.device)
    return (x * (bits < threshold)).mul_(scale)


@counter_dropout.register_fake
def _(
    x: Tensor, p: float, *, number: int, key: int = 0, start: Sequence[int] | None = None
) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.p, ctx.options = inputs[1], dict(keyword_only_inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.autoparallel.counter_dropout(gradient, ctx.p, **ctx.options), None


counter_dropout.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("autoparallel::counter_uniform", mutates_args=())
def counter_uniform(
    like: Tensor, *, number: int, key: int = 0, start: Sequence[int] | None = None
) -> Tensor:
    """Draw random numbers in [0, 1) of the shape and dtype of ``like``, a box of a global tensor
    that begins at coordinates ``start``. They have as many bits as the dtype's mantissa, at most
    24; more would round some up to 1."""
    width = min(_UNIFORM_BITS, 1 - round(math.log2(torch.finfo(like.dtype).eps)))
    scale, draw = 1 / (1 << width), one_kernel(like)
    if draw is not None:
        seeds = _seeds(number, key)
        return draw(like, start, seeds=seeds, threshold=0, scale=scale, drops=False, width=width)
    bits = random_bits(like.shape, start, number=number, key=key, device=like.device)
    return _shifted(bits, 32 - width, 32).to(like.dtype).mul_(scale)


@counter_uniform.register_fake
def _(like: Tensor, *, number: int, key: int = 0, start: Sequence[int] | None = None) -> Tensor:
    return torch.empty_like(like)


def dropout_part(
    rank: Rank,
    x: Tensor,
    p: float,
    *,
    number: int,
    start: tuple[int, ...],
    batch: tuple[int, int] | None,
) -> Tensor:
    """Compute dropout of ``x``, one rank's part of a tensor that begins at coordinates ``start``;
    ``batch`` is (batch dimension, its size in a micro-batch), if there is one."""
    options = _place(rank, start, batch)
    result: Tensor = torch.ops.autoparallel.counter_dropout(x, p, number=number, **options)
    return result


def uniform_part(
    rank: Rank,
    like: Tensor,
    *,
    number: int,
    start: tuple[int, ...],
    batch: tuple[int, int] | None,
) -> Tensor:
    """Draw the random numbers in [0, 1) of one rank's part of a tensor, which begins at coordinates
    ``start``; ``batch`` is (batch dimension, its size in a micro-batch), if there is one."""
    options = _place(rank, start, batch)
    result: Tensor = torch.ops.autoparallel.counter_uniform(like, number=number, **options)
    return result


def _place(rank: Rank, start: tuple[int, ...], batch: tuple[int, int] | None) -> dict[str, Any]:
    """Return the step's key, and the coordinates at which a rank's part begins in the whole batch's
    tensor. ``start`` has its coordinates in the micro-batch's tensor; ``batch`` is (batch
    dimension, its size in a micro-batch), if there is one."""
    place = list(start)
    if batch is not None:
        dim, rows = batch
        place[dim] += rank.draws.microbatch * rows
    return {"key": rank.draws.key, "start": place}
