"""What rank 0 has, on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def share_text(text: str | None) -> str:
    """Rank 0's text on every rank. Collective."""
    box: list[str | None] = [text]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def share_tensor(tensor: Tensor) -> Tensor:
    """Rank 0's value of a tensor that every rank has. Collective."""
    shared = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(shared, src=0)
    return shared


def share_in_place(tensor: Tensor) -> None:
    """Give a tensor that every rank has rank 0's value. Collective."""
    if tensor.is_contiguous():
        dist.broadcast(tensor, src=0)
    else:
        tensor.copy_(share_tensor(tensor))
