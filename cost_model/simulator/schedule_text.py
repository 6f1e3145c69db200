"""A schedule as text: a row per pipeline rank, a cell per slot of time, micro-batches by number.

In: a schedule and its timeline, in which all times are multiples of the shortest action. Out:
lines. ``F`` forward, ``B`` whole backward, ``I`` and ``W`` its halves, the micro-batch after it;
small letters are a rank's further chunks, ``s`` an update of an asynchronous schedule; dots are
idle. An action of several slots is drawn over all of them. Where a line is too long the picture
goes on below.
"""

from __future__ import annotations

from .actions import COMPUTE, STEP, Action, Schedule
from .timeline import Timeline


def draw_schedule(schedule: Schedule, timeline: Timeline, width: int) -> tuple[str, ...]:
    """The picture in lines of at most ``width`` characters.

    >>> from .actions import parse_table
    >>> from .simulator import StageCosts, simulate
    >>> table = parse_table("0F0 0SEND_F0 0RECV_B0 0B0\\n1RECV_F0 1F0 1B0 1SEND_B0")
    >>> schedule = Schedule("example", 1, (0, 1), table)
    >>> timeline = simulate(schedule, StageCosts((1.0, 1.0), (2.0, 2.0)))
    >>> print("\\n".join(draw_schedule(schedule, timeline, 40)))
    rank 0  F0 .  .  .  B0 --
    rank 1  .  F0 B0 -- .  .
    """
    rows = _cells(schedule, timeline)
    cell = max(len(text) for row in rows for text in row) + 1
    digits = len(str(schedule.num_ranks - 1))
    head = len("rank ") + digits + 2
    per_line = max(1, (width - head + 1) // cell)
    length = max(len(row) for row in rows)
    lines: list[str] = []
    for first in range(0, length, per_line):
        if first:
            lines.append("")
        for rank, row in enumerate(rows):
            texts = "".join(f"{text:<{cell}}" for text in row[first : first + per_line])
            lines.append(f"rank {rank:>{digits}}  {texts}".rstrip())
    return tuple(lines)


def _cells(schedule: Schedule, timeline: Timeline) -> list[list[str]]:
    """For each rank what is in each slot."""
    events = [
        [e for e in row if e.action.kind in COMPUTE and e.end_seconds > e.start_seconds]
        for row in timeline.events
    ]
    slot = min(e.end_seconds - e.start_seconds for row in events for e in row)
    count = round(max(e.end_seconds for row in events for e in row) / slot)
    rows = []
    for rank, row in enumerate(events):
        cells = ["."] * count
        stages = schedule.stages(rank)
        updates = _updated_after(schedule, rank)
        for event in row:
            first, last = round(event.start_seconds / slot), round(event.end_seconds / slot)
            text = _text(event.action, stages.index(event.action.stage))
            last = max(last, first + 1)
            cells[first:last] = [text] + ["--"] * (last - first - 1)
            if event.action in updates:
                cells[last - 1] = cells[last - 1] + "s" if last - first == 1 else "-s"
        rows.append(cells[:count])
    return rows


def _text(action: Action, chunk: int) -> str:
    kind = action.kind if chunk == 0 else action.kind.lower()
    part = "abcdefghijklmnopqrstuvwxyz"[action.slice % 26] if action.slice else ""
    return f"{kind}{action.microbatch}{part}"


def _updated_after(schedule: Schedule, rank: int) -> set[Action]:
    """The computes that an update follows, where there are several updates."""
    row = schedule.table[rank]
    if schedule.weights == "flushed":
        return set()
    found: set[Action] = set()
    last: Action | None = None
    for action in row:
        if action.kind in COMPUTE:
            last = action
        elif action.kind == STEP and last is not None:
            found.add(last)
    return found
