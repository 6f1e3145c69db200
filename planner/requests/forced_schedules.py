"""What a schedule that is forced asks of a pipeline, checked before anything is searched.

In: a request, the number of blocks. Out: errors for what cannot be, with what to try.
"""

from __future__ import annotations

from ..errors import UsageError
from ..schedules.schedules import LOOPED, build_schedule, find_schedule
from .request import CHUNKED_NAMES, Request


def check_forced_schedule(request: Request, num_blocks: int) -> None:
    """Raises UsageError AP546 for stages per rank that cannot be, AP153 for an odd number of
    Chimera's ranks, AP549 where positions are split in two ways."""
    forced = request.forced
    _check_chunks(request)
    if request.forces_chunks and forced.pp is not None:
        _check_ranks(forced.schedule, forced.pp)
        if forced.pp * forced.least_chunks > num_blocks:
            raise refused(
                f"pp={forced.pp} × chunks={forced.least_chunks} stages, but the model has "
                f"{num_blocks} blocks",
                "fewer chunks",
            )
    if forced.schedule == "chimera":
        _check_ranks(forced.schedule, forced.pp or 1)
        build_schedule("chimera", forced.pp or 1, 2)
    if forced.schedule == "terapipe" and (forced.cp or 1) > 1:
        raise UsageError(
            "AP549", "cp and schedule=terapipe both split the positions of sequences",
            where="--parallel", fix="remove cp",
        )  # fmt: skip


def _check_chunks(request: Request) -> None:
    forced = request.forced
    count = forced.least_chunks
    if count > 1 and forced.schedule not in (*LOOPED, *CHUNKED_NAMES):
        raise refused(
            f"chunks={forced.chunks} with schedule={forced.schedule or 'not given'}",
            f"schedule=, one of {', '.join(LOOPED)}",
        )
    if count > 1 and forced.schedule is not None:
        low, high = find_schedule(forced.schedule).chunks
        if not low <= count <= high:
            raise refused(f"chunks={count} with schedule={forced.schedule}", f"chunks={high}")


def _check_ranks(schedule: str | None, num_ranks: int) -> None:
    if num_ranks < 2:
        raise refused(f"schedule={schedule} needs a pipeline of several ranks", "pp=2 or more")


def refused(what: str, fix: str) -> UsageError:
    """AP546: what cannot be of several stages per rank."""
    return UsageError("AP546", what, where="--parallel", fix=fix)
