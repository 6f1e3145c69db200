"""Process groups with a limit that lets a watchdog speak first.

In: how long a rank may make no progress. Out: groups whose collectives may take a minute longer.
NCCL ends a process whose collective takes longer than the limit of its group, 10 minutes unless one
is given, and says neither which action it was at nor which rank failed to come. A group that torch
makes has torch's own limit, not that of the default group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MARGIN_SECONDS = 60.0


def time_limit(timeout_seconds: float | None) -> timedelta | None:
    """The limit of a group under a watchdog that waits for ``timeout_seconds``."""
    return None if timeout_seconds is None else timedelta(seconds=timeout_seconds + MARGIN_SECONDS)


def new_group(
    ranks: Sequence[int] | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """A group with the limit of the default group. Collective over all ranks."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend)
    share_limit(group)
    return group


def share_limit(group: dist.ProcessGroup) -> None:
    """Gives ``group`` the limit of the default group, if that is longer."""
    world = dist.group.WORLD
    limits = [] if world is None else [each.options._timeout for each in _backends(world)]
    if limits:
        _allow(group, max(limits))


def allow_seconds(timeout_seconds: float) -> None:
    """Gives the groups of this process at least the limit of ``time_limit``."""
    limit = time_limit(timeout_seconds)
    assert limit is not None
    for group in dist.distributed_c10d._world.pg_map if dist.is_initialized() else ():
        _allow(group, limit)


def _allow(group: Any, limit: timedelta) -> None:
    for backend in _backends(group):
        if backend.options._timeout < limit:
            backend._set_default_timeout(limit)


def _backends(group: Any) -> Iterator[Any]:
    """The backends of a group that this rank is in, of those that have limits."""
    if not isinstance(group, dist.ProcessGroup):
        return  # it stands for a group of other ranks
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(getattr(backend, "options", None), "_timeout"):
            yield backend
