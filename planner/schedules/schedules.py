"""Construction of pipeline schedules: tables of the actions of each pipeline rank.

In: a schedule's name, the numbers of stages and micro-batches. Out: the action table, which the
checks, the simulator and the interpreter share. A schedule is defined by the order of its compute
actions alone (``orders``, ``zero_bubble``); ``catalogue`` describes each; one rule adds
sends and receives (``messages``). Schedules that users register are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from ...cost_model.simulator.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
    Edges,
    Row,
    Schedule,
    Table,
    Wiring,
    chain,
    format_table,
)
from ..errors import PlanError, UsageError
from .catalogue import LOOPED, SCHEDULES, ScheduleInfo, Size, stages_of_ranks
from .check import check_schedule
from .messages import complete
from .orders import (
    depths,
    gpipe,
    inference,
    one_forward_one_backward,
    per_update_of_2bw,
    round_size,
    two_ways,
)

__all__ = ["LOOPED", "SCHEDULES", "ScheduleInfo", "build_schedule", "find_schedule", "in_flight"]

ALIASES: Mapping[str, str] = {"interleaved-1f1b": "interleaved"}


def find_schedule(name: str) -> ScheduleInfo:
    """Return the schedule of this name. Raises UsageError AP150 if there is none.

    >>> find_schedule("interleaved-1f1b").name
    'interleaved'
    """
    found = SCHEDULES.get(ALIASES.get(name, name)) or registered_schedule(name)
    if found is None:
        raise UsageError(
            "AP150",
            f"unknown schedule {name!r}",
            where="schedule",
            fix=f"use one of {', '.join((*SCHEDULES, *REGISTERED))}, or define it: "
            f'@autoparallel.register_schedule("{name}") in the model file',
        )
    return found


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    ahead: int = 0,
    edges: Edges | None = None,
    slices: tuple[int, ...] = (),
) -> Schedule:
    """Build the action table of the schedule ``name``.

    ``edges``: (producer, consumer) stages; by default each stage needs the stage before.
    ``num_chunks``: stages per rank; in looped schedules stage ``s`` is on rank ``s % (num_stages /
    num_chunks)``, V-shaped schedules have two. For Chimera ``num_stages`` counts one of its two
    directions. ``slices``: lengths of sequence slices, for TeraPipe only. A receive is posted
    ``ahead`` forwards and backwards before the action that needs its message. Raises UsageError for
    an unknown name, an empty pipeline, or unsupported numbers of chunks and micro-batches.

    >>> from autoparallel.cost_model.simulator.actions import format_table
    >>> print(format_table(build_schedule("1f1b", 2, 2).table))
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE 0STEP
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE 1STEP
    """
    info = find_schedule(name)
    if num_stages < 1 or num_microbatches < 1:
        raise UsageError(
            "AP151",
            f"cannot build a schedule of {num_stages} stages and {num_microbatches} micro-batches",
            why="a pipeline has at least one stage and one micro-batch",
            where="schedule",
        )
    if edges is not None and edges != chain(num_stages):
        return _of_graph(info, num_stages, num_microbatches, edges, ahead)
    chunks = info.chunks[0] if num_chunks is None else num_chunks
    size = _size(info, num_stages, num_microbatches, chunks)
    if slices and info.name != "terapipe":
        raise _bad(
            f"schedule {info.name!r} does not split sequences into slices", "schedule terapipe"
        )
    parts: tuple[int, ...] = ()
    ways: Edges | None = None
    if info.name == "chimera":
        parts, ways = two_ways(size.num_ranks)
    orders = info.orders(size._replace(num_slices=len(slices) or 1))
    rest = complete(orders, ahead=ahead, edges=ways, parts=parts)
    return Schedule(
        info.name,
        num_microbatches,
        *rest,
        edges=ways,
        parts=parts,
        slices=slices,
        weights=info.weights,
    )


def compute_orders(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """Return the forwards and backwards of each rank in the order of a schedule, without messages.

    >>> from autoparallel.cost_model.simulator.actions import format_table
    >>> print(format_table(compute_orders("1f1b", 2, 2)))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    info = find_schedule(name)
    return info.orders(_size(info, num_stages, num_microbatches, num_chunks))


def can_have(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> bool:
    """Return whether a schedule supports these numbers of stages, micro-batches and stages per rank
    (``num_chunks``).

    >>> can_have("zbv", 4, 8, 2), can_have("zbv", 6, 8, 3), can_have("1f1b", 4, 8, 2)
    (True, False, False)
    """
    info = find_schedule(name)
    try:
        size = _size(info, num_stages, num_microbatches, num_chunks)
        if info.is_registered:
            info.orders(size)
    except UsageError as error:
        if error.code != "AP153":
            raise
        return False
    return True


def table_text(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> str:
    """Return the action table of a user's registered schedule as text, for cache keys; "" for a
    built-in schedule or an unsupported size."""
    size = name, num_stages, num_microbatches, num_chunks
    has_table = registered_schedule(name) is not None and can_have(*size)
    return format_table(compute_orders(*size)) if has_table else ""


def parts_of_ranks(name: str, num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank, the parts of the model that it holds, numbered from the input. A part
    is a stage; in Chimera two ranks hold each part.

    >>> parts_of_ranks("bfs", 2, 2), parts_of_ranks("zbv", 2, 2), parts_of_ranks("chimera", 2, 1)
    (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (1, 0)))

    Raises UsageError AP153 if the schedule does not support this number of stages per rank.
    """
    info, last = find_schedule(name), num_ranks * num_chunks - 1
    _check_chunks(info, num_chunks)
    if info.name == "chimera":
        return tuple((rank, last - rank) for rank in range(num_ranks))
    return stages_of_ranks(num_ranks, num_chunks, is_v=info.is_v)


def _of_graph(
    info: ScheduleInfo, num_stages: int, num_microbatches: int, edges: Edges, ahead: int
) -> Schedule:
    """Build the schedule for stages that form a directed acyclic graph with ``edges``. Raises
    UsageError AP154 if the schedule supports only chains."""
    if info.name not in OF_GRAPHS:
        raise UsageError(
            "AP154",
            f"schedule {info.name!r} does not support parallel branches of stages",
            where="schedule",
            fix=f"one of {', '.join(OF_GRAPHS)}",
        )
    orders = OF_GRAPHS[info.name](num_microbatches, depths(Wiring.of(num_stages, edges)))
    rest = complete(orders, ahead=ahead, edges=edges)
    return Schedule(info.name, num_microbatches, *rest, edges=edges)


OF_GRAPHS: Mapping[str, Callable[[int, tuple[int, ...]], Table]] = {
    "gpipe": lambda num_microbatches, depth: gpipe(len(depth), num_microbatches),
    "1f1b": lambda num_microbatches, depth: one_forward_one_backward(
        len(depth), num_microbatches, depth=depth
    ),
    "eager-1f1b": lambda num_microbatches, depth: one_forward_one_backward(
        len(depth), num_microbatches, depth=depth, eager=2
    ),
    "inference": lambda num_microbatches, depth: inference(len(depth), num_microbatches),
}
"""Orders of the schedules that support stages of any graph, as functions of stage depths."""


def in_flight(name: str, depth: int, num_stages: int, num_microbatches: int) -> int:
    """Return the most micro-batches whose activations a stage holds at once. ``depth``: number of
    stages on the longest path from it to a last stage, both included.

    >>> in_flight("1f1b", 2, 3, 8), in_flight("gpipe", 2, 3, 8), in_flight("gpipe", 1, 1, 8)
    (2, 8, 1)
    >>> in_flight("zb-h1", 2, 3, 8)
    3
    """
    if num_stages == 1:
        return 1
    info = find_schedule(name)
    if info.name in OF_GRAPHS:
        return info.in_flight(depth, num_microbatches, 0)
    num_stages = max(num_stages, depth)
    return info.in_flight(num_stages, num_microbatches, num_stages - depth, info.chunks[0])


def _size(info: ScheduleInfo, num_stages: int, num_microbatches: int, num_chunks: int) -> Size:
    """Return the schedule's parameters. Raises UsageError AP153 if it cannot have these numbers."""
    if num_chunks < 1 or num_stages % num_chunks:
        raise _bad(f"{num_stages} stages cannot be divided into {num_chunks} chunks per rank")
    _check_chunks(info, num_chunks)
    num_ranks = num_stages // num_chunks
    in_rounds = info.name in ("interleaved", "zb-h1") and num_chunks > 1
    if in_rounds and not round_size(num_ranks, num_microbatches):
        raise _bad(
            f"{num_microbatches} micro-batches cannot be divided into rounds of {num_ranks} ranks",
            f"a multiple of {num_ranks} micro-batches",
        )
    if info.name == "dualpipev" and num_microbatches < num_stages:
        raise _bad(
            f"schedule 'dualpipev' needs at least as many micro-batches as stages, {num_stages}"
        )
    if info.name == "chimera" and (num_ranks % 2 or num_microbatches < 2):
        raise _bad(
            "schedule 'chimera' needs an even number of ranks and at least two micro-batches"
        )
    updates = per_update_of_2bw(num_ranks, num_microbatches) if info.name == "pipedream-2bw" else 1
    return Size(num_ranks, num_microbatches, num_chunks, per_update=updates)


def _check_chunks(info: ScheduleInfo, num_chunks: int) -> None:
    """Raise UsageError AP153 if the schedule does not support ``num_chunks`` chunks per rank."""
    low, high = info.chunks
    if not low <= num_chunks <= high:
        has = "one chunk" if high == 1 else f"{low} chunks" if low == high else f"{low} to {high}"
        raise _bad(
            f"schedule {info.name!r} runs {has} per rank, not {num_chunks}",
            f"one of {', '.join(LOOPED)}" if high == 1 else f"chunks={low}",
        )


def _bad(what: str, fix: str = "") -> UsageError:
    return UsageError("AP153", what, where="schedule", fix=fix)


REGISTERED: dict[str, ScheduleInfo] = {}


def register(info: ScheduleInfo) -> None:
    """Add a schedule to this process's register; it replaces a schedule of the same name."""
    orders = lru_cache(maxsize=64)(partial(_checked_table, info))
    REGISTERED[info.name] = replace(info, orders=orders)


def registered_schedule(name: str | None) -> ScheduleInfo | None:
    """Return the registered schedule of this name, None if there is none."""
    return REGISTERED.get(name or "")


def _checked_table(info: ScheduleInfo, size: Size) -> Table:
    """Return the table that a user's schedule orders. Raises UsageError AP159 if it is not a
    correct training step."""
    table = info.orders(size)
    if len(table) != size.num_ranks:
        raise _fault(info, size, f"it has {len(table)} rows", fix="a row for each rank")
    placed = stages_of_ranks(size.num_ranks, size.num_chunks, is_v=info.is_v)
    for rank, (row, stages) in enumerate(zip(table, placed, strict=True)):
        _check_row(info, size, rank, row, stages)
    try:
        check_schedule(Schedule(info.name, size.num_microbatches, *complete(table)))
    except PlanError as error:
        what = error.what.removeprefix(f"schedule {info.name!r}: ")
        why, fix = error.why, "each stage has F, then B (or I, then W), of each micro-batch once"
        if what == "deadlock":
            what, fix = f"deadlock, {why}", "an order in which one of these ranks can go on"
            why = "RECV_F waits for F of the stage before, RECV_B for B or I of the stage after"
        raise _fault(info, size, what, why, fix) from error
    return table


def _check_row(info: ScheduleInfo, size: Size, rank: int, row: Row, stages: Sequence[int]) -> None:
    """Raise UsageError AP159 if the row of a user's schedule has an action that it must not have,
    or lacks a forward or backward of one of the rank's ``stages``."""
    backward = INPUT_BACKWARD if info.splits_backward else BACKWARD
    for action in row:
        why = fix = ""
        if action.kind not in COMPUTE or action.slice:
            why, fix = "messages, REDUCE and STEP are added by a rule", "F, B, I and W only"
        elif action.stage not in stages:
            why, fix = f"its stages are {', '.join(map(str, stages))}", "only these in its row"
        elif action.kind in (INPUT_BACKWARD, WEIGHT_BACKWARD) and not info.splits_backward:
            why, fix = "backwards are whole by default", "split_backward=True"
        if why:
            raise _fault(info, size, f"rank {rank} has {action}", why, fix)
    for action in (Action(kind, stage, 0) for stage in stages for kind in (FORWARD, backward)):
        if not any(other[:2] == action[:2] for other in row):
            why = "each stage splits some backwards" if info.splits_backward else ""
            raise _fault(info, size, f"{action} is missing", why, f"add it to rank {rank}")


def _fault(info: ScheduleInfo, size: Size, what: str, why: str = "", fix: str = "") -> UsageError:
    what = f"schedule {info.name!r} on {size_text(size)}: {what}"
    return UsageError("AP159", what, why=why, where=info.source, fix=fix)


def size_text(size: Size) -> str:
    """Describe the size of a schedule: its numbers of ranks, micro-batches, chunks."""
    chunks = f" of {size.num_chunks} chunks" if size.num_chunks > 1 else ""
    return f"{size.num_ranks} ranks{chunks} with {size.num_microbatches} micro-batches"
