"""Linear layers whose frozen weight is held in NF4 and dequantized where it is used.

In: a weight of floats. Out: one tensor of bytes (``pack_nf4``): the elements, two in a byte, then a
scale of 8 bits for each block of 64, a float32 factor for each group of 256 scales, and the float32
mean of the scales. torchao quantizes; the elements are those of its ``to_nf4``, and ``unpack_nf4``
returns bit for bit what its tensor's ``get_original_weight`` does, in less memory. ``nf4_linear``
keeps the bytes for its backward, which dequantizes again, as torchao does.

Sources: Dettmers et al. 2023, QLoRA (arXiv:2305.14314), section 3;
torchao/quantization/quantize_/workflows/nf4/nf4_tensor.py of https://github.com/pytorch/ao.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...cost_model.ops.memory import NF4_BLOCK, NF4_GROUP, nf4_bytes
from .eight_bits import torchao_needed

CHUNK = 2**22
"""Elements that are dequantized at a time, so that what a kernel writes for the next one is small
and stays in a cache."""

VALUES = (
    *(-1.0000, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0000),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0000),
)
"""Values of the 16 codes, as torchao rounds them."""

aten = torch.ops.aten


@cache
def load_nf4() -> Any:
    """Return torchao's class of tensors in NF4. Raises MachineError AP413 without torchao."""
    with torchao_needed("training with weights in NF4", "leave base=nf4 out of --lora"):
        from torchao.quantization import NF4Tensor
    return NF4Tensor


def pack_nf4(weight: Tensor) -> Tensor:
    """Quantize a weight, in its dtype (float64: in float32); return its bytes. Raises MachineError
    AP413 if torchao is not installed."""
    given = _computed(weight.detach().contiguous())
    made = load_nf4().from_tensor(given, NF4_BLOCK, NF4_GROUP // NF4_BLOCK)
    factors = torch.cat((made.quantization_factor, made.scaler_mean.reshape(1))).float()
    parts = (made.quantized_data, made.quantized_scalers, factors)
    return torch.cat([part.view(torch.uint8) for part in parts])


def unpack_nf4(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantize the bytes of a weight of this shape."""
    if dtype == torch.float64:
        return unpack_nf4(packed, shape, torch.float32).double()
    numel = prod(shape)
    sizes = (numel // 2, numel // NF4_BLOCK)
    data, scales, factors = torch.split(packed, [*sizes, nf4_bytes(numel) - sum(sizes)])
    factors = factors.view(torch.float32).to(dtype)
    scales = scales.view(torch.int8).view(-1, NF4_GROUP // NF4_BLOCK)
    scales = (scales / factors[:-1, None]).to(dtype).view(-1, 1) + factors[-1]
    is_fake = isinstance(packed, FakeTensor)
    pairs = (_pairs.__wrapped__ if is_fake else _pairs)(dtype, packed.device)
    made = torch.empty(numel, dtype=dtype, device=packed.device)
    parts = (
        torch.split(made, CHUNK),
        torch.split(data, CHUNK // 2),
        torch.split(scales, CHUNK // NF4_BLOCK),
    )
    for part, own, rows in zip(*parts, strict=True):
        whole = part.view(pairs.dtype)
        torch.index_select(pairs, 0, own.int(), out=whole)
        part.view(-1, NF4_BLOCK).mul_(rows)
    return made.view(*shape)


def round_nf4(weight: Tensor) -> Tensor:
    """Return a weight as a linear layer reads it that holds it in NF4. Raises MachineError AP413 if
    torchao is not installed."""
    return unpack_nf4(pack_nf4(weight), weight.shape, weight.dtype)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return for each byte its two values, as one integer of their size together."""
    values = torch.tensor(VALUES, dtype=dtype)
    pairs = torch.cartesian_prod(values, values)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).view(-1).to(device)


def _computed(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype == torch.float64 else weight


class _Linear(torch.autograd.Function):
    """Linear op that dequantizes its weight in the forward, and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        made: Tensor = aten.linear.default(data, unpack_nf4(packed, shape, data.dtype), bias)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        of_bias = gradients[0].flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, of_bias, None
        weight = unpack_nf4(packed, ctx.shape, gradients[0].dtype)
        return gradients[0] @ weight, None, of_bias, None


def nf4_linear(data: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Compute the linear op of data ``[..., in]`` with the weight ``[out, in]`` of this ``shape``
    that ``packed`` holds."""
    made: Tensor = _Linear.apply(data, packed, bias, shape)  # type: ignore[no-untyped-call]
    return made
