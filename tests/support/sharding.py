"""Tensors laid out over ranks, as the package has them (``autoparallel.passes.local.parts``)."""

import torch
from torch import Tensor

from autoparallel.passes.local.parts import assert_close, collect, distribute, gradient_layout

__all__ = ["assert_close", "collect", "distribute", "gradient_layout", "random_tensor"]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)
