"""Running code when a backward ends: the one use of autograd's engine callbacks.

``torch.autograd.Variable._execution_engine.queue_callback`` is what ``fully_shard`` and DDP
use for the same; it has no public name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, begin: Callable[[], None], end: Callable[[], None], tensor: Tensor
    ) -> Tensor:
        ctx.begin, ctx.end = begin, end
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        ctx.begin()
        end = ctx.end
        # Queued twice: fully_shard queues its own last work when the backward is under way.
        _at_end(lambda: _at_end(end))
        return None, None, gradients[0]


def around_backward(
    tensors: tuple[Tensor, ...], begin: Callable[[], None], end: Callable[[], None]
) -> tuple[Tensor, ...]:
    """``tensors``, such that a backward calls ``begin`` before anything else and ``end`` when all
    is done, once for each of them that it goes through; what the others are made of gets no
    gradient."""
    return tuple(_Boundary.apply(begin, end, each) for each in tensors)  # type: ignore[no-untyped-call]


def _at_end(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)
