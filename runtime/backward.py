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
        ctx: Any, tensor: Tensor, begin: Callable[[], None], end: Callable[[], None]
    ) -> Tensor:
        ctx.begin, ctx.end = begin, end
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.begin()
        end = ctx.end
        # Queued twice: fully_shard queues its own last work when the backward is under way.
        _at_end(lambda: _at_end(end))
        return gradients[0], None, None


def around_backward(tensor: Tensor, begin: Callable[[], None], end: Callable[[], None]) -> Tensor:
    """``tensor``, such that its backward calls ``begin`` first and ``end`` when all is done."""
    result: Tensor = _Boundary.apply(tensor, begin, end)  # type: ignore[no-untyped-call]
    return result


def _at_end(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)
