"""``register_schedule``: pipeline schedules of the user.

In: a function that returns the order of forwards and backwards on each pipeline rank. Out: the
function, and a schedule of that name for the checks, the simulator and the executor.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from autoparallel.cost_model.simulator.actions import Table, parse_action
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.step import known_schedule
from autoparallel.planner.requests.request import MOST_CHUNKS
from autoparallel.planner.schedules.catalogue import SCHEDULES, ScheduleInfo, Size, counted
from autoparallel.planner.schedules.held import half_pairs, splits, stage_half_pairs
from autoparallel.planner.schedules.schedules import (
    ALIASES,
    register,
    registered_schedule,
    size_text,
)
from autoparallel.target.target import running_user_code

Function = TypeVar("Function", bound=Callable[..., Any])


def register_schedule(
    name: str,
    *,
    chunks: int | tuple[int, int] = 1,
    shape: Literal["loop", "v"] = "loop",
    split_backward: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as a pipeline schedule, for ``--parallel schedule=name``.

    ::

        @autoparallel.register_schedule("all-then-all")
        def all_then_all(num_ranks, num_microbatches):
            for rank in range(num_ranks):
                yield [f"{rank}{kind}{m}" for kind in "FB" for m in range(num_microbatches)]

    It returns a row for each rank, a list or a text with spaces: ``1F0`` is the forward of
    micro-batch 0 in stage 1, ``1B0`` its backward; with ``split_backward`` also ``1I0`` and
    ``1W0``, gradients of inputs and of weights. For a size that it cannot have it raises
    ValueError with the reason. ``chunks``: the number of stages of each rank, stage ``s`` on rank
    ``s % num_ranks``; with ``shape="v"`` every second chunk goes back to rank 0. With a pair
    (least, most) the function gets the number as a third argument.

    Raises UsageError AP168 for a name that another schedule has, and for wrong arguments. When a
    table is first needed, AP162 if the function fails, AP159 if the table is wrong.
    """
    if not isinstance(name, str):
        raise _refused(name, "", "it has no name", '@autoparallel.register_schedule("my-1f1b")')

    def mark(function: Function) -> Function:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
        low, high = chunks if isinstance(chunks, tuple) else (chunks, chunks)
        _check_name(name, where, function.__module__)
        if not 1 <= low <= high <= MOST_CHUNKS or shape not in ("loop", "v"):
            fix = f'1 to {MOST_CHUNKS} chunks, or a pair (least, most) of these; "loop" or "v"'
            raise _refused(name, where, f"chunks={chunks} and shape={shape!r}", fix)
        is_v = shape == "v"
        orders = partial(_table, name, function, where, isinstance(chunks, tuple))
        text = (inspect.getdoc(function) or "registered").partition("\n")[0]
        info = ScheduleInfo(name, text, where, orders, counted(orders, v_shape=is_v), "", "")
        register(replace(info, chunks=(low, high), is_v=is_v, splits_backward=split_backward))
        for cached in (splits, half_pairs, stage_half_pairs, known_schedule):
            cached.cache_clear()
        return function

    return mark


def _check_name(name: str, where: str, module: str) -> None:
    """Raise UsageError AP168 for an invalid name, or the name of a schedule from another file."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise _refused(name, where, "its name has other signs", 'a-z, 0-9, ".", "_" and "-"')
    if name in SCHEDULES or name in ALIASES:
        raise _refused(name, where, "it is built in", f'another name, such as "my-{name}"')
    known, file = registered_schedule(name), where.rpartition(":")[0]
    if known and module != "__main__" and known.source.rpartition(":")[0] != file:
        raise _refused(name, where, f"it is also defined at {known.source}", "another name")


def _table(name: str, function: Any, where: str, is_ranged: bool, size: Size) -> Table:
    """Return the table of actions, a row per rank, that a user's schedule function gives for a
    size. With ``is_ranged`` the function takes the number of chunks too.

    Raises UsageError AP162 if it fails, AP153 if it refuses the size, AP159 for a wrong action.
    """
    with running_user_code("AP162", f"schedule {name!r} fails on {size_text(size)}", where):
        try:
            made = function(*size[: 3 if is_ranged else 2])
            lines = made.strip().splitlines() if isinstance(made, str) else made
            rows = [row.split() if isinstance(row, str) else list(map(str, row)) for row in lines]
        except ValueError as error:
            what = f"schedule {name!r} does not run on {size_text(size)}"
            fix = "other numbers in --parallel"
            raise UsageError("AP153", what, why=str(error), where=where, fix=fix) from error
    try:
        return tuple(tuple(map(parse_action, row)) for row in rows)
    except ValueError as error:
        what = f"schedule {name!r} on {size_text(size)}: {error}"
        raise UsageError("AP159", what, where=where, fix='rows as "0F0 0F1 0B0 0B1"') from error


def _refused(name: object, where: str, why: str, fix: str) -> UsageError:
    return UsageError("AP168", f"{name!r} cannot be a schedule", why=why, where=where, fix=fix)
