"""Tensors whose backward raises an error with advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoparallel.planner.errors import UsageError


class _RefuseGradient(torch.autograd.Function):
    """Identity function whose backward raises an error."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, error: UsageError) -> Tensor:
        ctx.error = error
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def refuse_gradient(code: str, what: str, why: str, fix: str) -> Callable[[Tensor], Tensor]:
    """Return a function on tensors: the backward through its result raises UsageError ``code``."""
    error = UsageError(code, what, why=why, fix=fix)

    def refuse(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            refused: Tensor = _RefuseGradient.apply(anchor, tensor, error)  # type: ignore[no-untyped-call]
        return refused

    return refuse
