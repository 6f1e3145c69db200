"""Linear layers that compute their three products with 8-bit factors, by torchao.

In: local tensors of a linear op that the plan computes in fp8. Out: the op's result, whose backward
casts too: input and weight to float8_e4m3fn, the gradient to float8_e5m2, each scaled as a whole by
its largest value when it is used. Weights, activations and gradients themselves stay in bfloat16.
torchao's own autograd function does this; ``of_data`` and ``of_weights`` are the halves of its
backward, for schedules that compute them separately. On a CPU torchao emulates the products: it
rounds the factors to 8 bits and multiplies them in float32.

Source: torchao/float8/float8_linear.py of https://github.com/pytorch/ao, whose linear layer
torchtitan uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...planner.errors import MachineError

MULTIPLE = 16
"""Number that must divide all sides of a matrix product for torch's 8-bit kernels."""

aten = torch.ops.aten


@dataclass(frozen=True)
class _Torchao:
    """Functions of torchao that compute matrix products with 8-bit factors, in one
    configuration."""

    product: Any
    cast: Any
    roles: Any
    products: Any
    config: Any

    def __call__(self, data: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = self.product.apply(data, weight.t(), self.products, self.config)
        return result

    def gradient(self, rows: Tensor) -> Tensor:
        how = self.config.cast_config_grad_output
        return self._cast(rows, how, self.roles.GRAD_OUTPUT)

    def data(self, rows: Tensor) -> Tensor:
        return self._cast(rows, self.config.cast_config_input, self.roles.INPUT)

    def weight(self, weight: Tensor) -> Tensor:
        return self._cast(weight, self.config.cast_config_weight, self.roles.WEIGHT)

    def _cast(self, tensor: Tensor, how: Any, role: Any) -> Tensor:
        found: Tensor = self.cast(
            tensor,
            how.target_dtype,
            self.products,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
        )
        return found


@contextmanager
def torchao_needed(use: str, otherwise: str) -> Iterator[None]:
    """Raise MachineError AP413 if torchao, which ``use`` needs, cannot be imported in the ``with``
    block; ``otherwise``: how to go on without it."""
    try:
        yield
    except ImportError as error:
        raise MachineError(
            "AP413",
            f"{use} needs torchao",
            why=f"it cannot be imported: {error}",
            fix=f"pip install 'torchao>=0.18', on every machine, or {otherwise}",
        ) from error


@cache
def load_torchao(emulate: bool) -> _Torchao:
    """Return torchao's 8-bit matrix products with one scale per tensor, emulated in higher
    precision with ``emulate``. Raises MachineError AP413 without torchao."""
    with torchao_needed("training in fp8", "plan with --precision bf16"):
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import (
            GemmInputRole,
            LinearMMConfig,
            ScaledMMConfig,
        )
    config = Float8LinearConfig(emulate=emulate)
    each = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    products = LinearMMConfig(
        *(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in each)
    )
    return _Torchao(
        matmul_with_hp_or_float8_args, hp_tensor_to_float8_dynamic, GemmInputRole, products, config
    )


def eight_bit_linear(data: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer of data ``[..., in]`` and weight ``[out, in]`` with factors cast to 8
    bits. If a side of the product is no multiple of ``MULTIPLE``, as kernels require, factors are
    not cast. Raises MachineError AP413 if torchao is not installed."""
    if not _fits(data, weight):
        plain: Tensor = aten.linear.default(data, weight, bias)
        return plain
    result = _torchao(data)(data, weight)
    return result if bias is None else result + bias


def of_data(gradient: Tensor, weight: Tensor, data: Tensor, rest: Sequence[Any]) -> Tensor:
    """Return the gradient of ``data`` in ``eight_bit_linear``, given the ``gradient`` of its
    output; ``rest`` is unused."""
    if not _fits(data, weight):
        return gradient @ weight
    eight_bits = _torchao(data)
    rows = eight_bits.gradient(_rows(gradient))
    return torch.mm(rows, eight_bits.weight(weight.t()).t()).reshape(data.shape)


def of_weights(
    gradient: Tensor, data: Tensor, shapes: Sequence[Any], rest: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Return the gradients, of these ``shapes``, of weight and bias (None if absent) in
    ``eight_bit_linear``, given the ``gradient`` of its output."""
    rows, own = _rows(gradient), _rows(data)
    bias = rows.sum(0).reshape(shapes[1]) if len(shapes) > 1 and shapes[1] is not None else None
    if _are_multiples(*rows.shape, own.shape[-1]):
        eight_bits = _torchao(data)
        return (torch.mm(eight_bits.gradient(rows).t(), eight_bits.data(own)), bias)[: len(shapes)]
    return (rows.t() @ own, bias)[: len(shapes)]


def _torchao(data: Tensor) -> _Torchao:
    return load_torchao(emulate=data.device.type != "cuda")


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _fits(data: Tensor, weight: Tensor) -> bool:
    return _are_multiples(data.numel() // max(data.shape[-1], 1), *weight.shape)


def _are_multiples(*sides: int) -> bool:
    return all(side and side % MULTIPLE == 0 for side in sides)
