"""Tensors of test cases of ops."""

from __future__ import annotations

import torch
from torch import Tensor


def f(*shape: int) -> Tensor:
    """A differentiable tensor."""
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def single(*shape: int) -> Tensor:
    """A differentiable tensor in float32, for ops that take no float64."""
    return torch.randn(shape).requires_grad_()


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()


def unit(*shape: int) -> Tensor:
    """A differentiable tensor inside (0, 1)."""
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def fixed(*shape: int) -> Tensor:
    """A floating tensor without gradient."""
    return torch.randn(shape, dtype=torch.float64)


def below(high: int, *shape: int) -> Tensor:
    """Integers in [0, high)."""
    return torch.randint(0, high, shape)


def distinct(high: int, *shape: int, dim: int) -> Tensor:
    """Integers in [0, high), no two the same along ``dim``."""
    order = torch.rand([high if at == dim else size for at, size in enumerate(shape)]).argsort(dim)
    return order.narrow(dim, 0, shape[dim])


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.4


def labels(high: int, *shape: int) -> Tensor:
    """Class labels, some of them ignored (-100)."""
    return torch.where(torch.rand(shape) > 0.3, below(high, *shape), -100)
