"""Objects and CPU tensors that ranks share, over a process group that supports them.

A script may have made its process group for GPUs alone, which supports neither; then
``control_group`` is a further group. Collectives of a stage and messages never run on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.errors import AutoparallelError
from .groups import new_group

T = TypeVar("T")

PULSE_SECONDS = 5.0
"""Time between the messages by which rank 0 tells waiting ranks that it is alive."""

_CONTROL: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Gloo group for Python objects and CPU tensors, by the default process group at the time."""
_OCCASIONS: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Gloo group for collectives between steps, by the default process group at the time."""


def control_group() -> dist.ProcessGroup | None:
    """Return the gloo group for Python objects and CPU tensors; None if the default group itself
    serves. Its first call is collective over all ranks."""
    if not dist.is_initialized() or "gloo" in str(dist.get_backend_config()):
        return None
    return _kept_group(_CONTROL)


def occasion_group() -> dist.ProcessGroup:
    """Return the group of all ranks for collectives that only occur between steps, as in an
    evaluation.

    A rank that starts such a collective alone then waits. In a group that steps use too, its
    message would be taken for a message of the other ranks' steps. The first call is collective
    over all ranks.
    """
    return _kept_group(_OCCASIONS)


def _kept_group(kept: dict[dist.ProcessGroup, dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the gloo group of all ranks that ``kept`` has for the present default process group;
    make the group if it is missing, which is collective over all ranks."""
    world = dist.group.WORLD
    assert world is not None
    if world not in kept:
        kept.clear()
        kept[world] = new_group(backend="gloo")
    return kept[world]


def group_for(tensor: Tensor) -> dist.ProcessGroup | None:
    """Return the group of all ranks for a collective on ``tensor``: ``control_group()`` for a
    tensor in CPU memory, else None, which stands for the default group."""
    return control_group() if tensor.device.type == "cpu" else None


def share_value(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value, pickled, on every rank of the program. Collective.

    ``group`` is a group of all ranks that supports objects, by default ``control_group()``.
    """
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=control_group() if group is None else group)
    return box[0]


def share_text(text: str | None) -> str:
    """Return rank 0's text on every rank. Collective."""
    found = share_value(text)
    assert found is not None
    return found


def on_first(make: Callable[[], T]) -> T | None:
    """Run ``make`` on rank 0; return its result there, None on other ranks; raise its error on all.
    Collective."""
    value: T | None = None
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            value = make()
        except Exception as found:  # noqa: BLE001 - raised below, after the others have it
            error = found
    is_ours = error is None or isinstance(error, AutoparallelError)
    shown = error if is_ours else RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
    others = share_value(shown)
    if error is not None:
        raise error
    if others is not None:
        raise others
    return value


def share_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with rank 0's values, given a tensor of that shape on every rank.
    Collective."""
    shared = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(shared, src=0, group=group_for(shared))
    return shared


def share_in_place(tensor: Tensor) -> None:
    """Overwrite ``tensor`` with rank 0's values; every rank passes a tensor of the same shape.
    Collective over all ranks."""
    if tensor.layout != torch.strided:
        tensor.copy_(share_value(tensor))
    elif tensor.is_contiguous():
        dist.broadcast(tensor, src=0, group=group_for(tensor))
    else:
        tensor.copy_(share_tensor(tensor))


def gather_values(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in the order of ranks, on every rank. Collective.

    ``group``: see ``share_value``.
    """
    if not dist.is_initialized():
        return [value]
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value, group=control_group() if group is None else group)
    return found


def gather_on_first(value: T) -> list[T]:
    """Return on rank 0 every rank's value, in the order of ranks; on other ranks an empty list.
    Collective."""
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found, dst=0, group=control_group())
    return found or []


class Pulse:
    """Long work on rank 0 alone, which reports its progress to the other, waiting ranks. Every
    report is passed to a callback on every rank, so that neither a watchdog nor a time limit of the
    process group ends the ranks that wait."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        self._tell, self._sent_seconds = tell, time.monotonic()

    def tell(self, what: str) -> None:
        """Report the progress of the work from rank 0 to the other ranks."""
        self._tell(what)
        if time.monotonic() - self._sent_seconds > PULSE_SECONDS:
            share_value((False, what))
            self._sent_seconds = time.monotonic()

    def value(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; return its result on every rank. Collective."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = work()
            share_value((True, found))
            return found
        while True:
            message = share_value(None)
            assert message is not None
            is_done, content = message
            if is_done:
                return content
            self._tell(f"waiting for rank 0: {content}")


class SharedCount:
    """Broadcast of a number per step from rank ``source`` to the ranks that do not know it. Every
    call is collective over all ranks; a rank that knows the number does not wait."""

    def __init__(self, source: int) -> None:
        self.source = source
        self._running: tuple[dist.Work | None, Tensor] | None = None

    def __call__(self, count: int | None) -> int:
        """Return ``count`` if this rank has it, else the count that rank ``source`` sends."""
        if self._running is not None and self._running[0] is not None:
            self._running[0].wait()
        box = torch.tensor(0 if count is None else count)
        work = dist.broadcast(box, src=self.source, group=group_for(box), async_op=True)
        self._running = (work, box)
        if count is not None:
            return count
        if work is not None:
            work.wait()
        return int(box)
