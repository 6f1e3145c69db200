"""What rank 0 has, on every rank."""

from __future__ import annotations

from typing import Any

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


def gather_values(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class SharedCount:
    """A number that rank ``source`` has in every step, for ranks that have not.

    Collective over all ranks, but only a rank that gives no number waits.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._running: tuple[dist.Work | None, Tensor] | None = None

    def __call__(self, count: int | None) -> int:
        """The number: this rank's own, if it has one, else the source's."""
        if self._running is not None and self._running[0] is not None:
            self._running[0].wait()
        box = torch.tensor(0 if count is None else count)
        work = dist.broadcast(box, src=self._source, async_op=True)
        self._running = (work, box)
        if count is not None:
            return count
        if work is not None:
            work.wait()
        return int(box)
