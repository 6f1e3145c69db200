"""Process groups whose time limit is a minute longer than the watchdog's.

NCCL ends a process whose collective exceeds the time limit of its group (by default 10 minutes)
and names neither the action nor the rank that did not come. The watchdog does, so its limit has to
end first. ``torch.distributed.new_group`` uses torch's default limit, not the default group's;
``new_group`` of this module uses the default group's.
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


def gloo_group_beside(group: dist.ProcessGroup) -> Any:
    """Another group of gloo with the ranks of ``group``, whose messages meet none of its own.
    Collective over these ranks alone.

    It is not known to ``torch.distributed``, and has only the methods of ``ProcessGroupGloo``.
    ``new_group(use_local_synchronization=True)`` names a group by the number of groups that a
    process is in, and hangs where its ranks are in different numbers.
    """
    distributed: Any = dist.distributed_c10d
    rank, store = dist.get_rank(group), distributed._get_default_store()
    count = store.add(f"autoparallel/beside/{group.group_name}/{rank}", 1)
    beside = distributed.PrefixStore(f"autoparallel/beside/{group.group_name}/{count}", store)
    limits = [each.options._timeout for each in _backends(dist.group.WORLD)]
    limit = max(limits, default=distributed.default_pg_timeout)
    return distributed.ProcessGroupGloo(beside, rank, dist.get_world_size(group), limit)


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
    """The backends of a group that have a time limit; none where this rank is no member."""
    if not isinstance(group, dist.ProcessGroup):
        return  # torch's placeholder for a group that this rank is not in
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(getattr(backend, "options", None), "_timeout"):
            yield backend
