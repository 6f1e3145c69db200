"""Timelines and schedules as text: a row per pipeline rank.

A timeline has one character per slice of the step, which shows the longest part of the slice:

====  ===================================================
F B   forward and backward, ``f b`` of every second chunk
W     backward of weights alone
s     optimizer
r g   waiting for gradients to be summed, for parameters
.     bubble: nothing to do, or waiting for a message
====  ===================================================

A schedule, of whose timeline all times are multiples of the shortest action, has a cell per such
slot: ``F`` forward, ``B`` whole backward, ``I`` and ``W`` its halves, the micro-batch after it;
small letters are a rank's further chunks, ``s`` an update of an asynchronous schedule; dots are
idle. An action of several slots is drawn over all of them. Where a line is too long the picture
goes on below.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import COMPUTE, STEP, Action, Schedule
from .timeline import Event, Timeline

BUBBLE = "."
GLYPHS = {"F": "F", "B": "B", "I": "B", "W": "W", "STEP": "s", "REDUCE": "r", "GATHER": "g"}


def draw(timeline: Timeline, width: int, *, limit: int = 16) -> tuple[str, ...]:
    """Draw a timeline with a line of text per pipeline rank, ``width`` characters long. If there
    are more than ``limit`` ranks, only the first and last of them are drawn.

    >>> from .actions import Schedule, parse_table
    >>> from .simulator import StageCosts, simulate
    >>> table = parse_table("0F0 0SEND_F0 0RECV_B0 0B0\\n1RECV_F0 1F0 1B0 1SEND_B0")
    >>> costs = StageCosts((1.0, 1.0), (2.0, 2.0))
    >>> print("\\n".join(draw(simulate(Schedule("example", 1, (0, 1), table), costs), 12)))
    rank 0  FF......BBBB
    rank 1  ..FFBBBB....
    """
    count = len(timeline.events)
    head = count if count <= limit else limit // 2
    shown = [*range(head), *range(max(head, count - limit // 2), count)]
    digits = len(str(count - 1))
    lines = [f"rank {rank:>{digits}}  {_row(timeline, rank, width)}" for rank in shown]
    if len(shown) < count:
        lines.insert(head, f"{'…':>{5 + digits}}  {count - len(shown)} more")
    return tuple(lines)


def _row(timeline: Timeline, rank: int, width: int) -> str:
    slot = timeline.step_seconds / width
    if not slot:
        return BUBBLE * width
    chunks = {
        stage: position
        for position, stage in enumerate(sorted({e.action.stage for e in timeline.events[rank]}))
    }
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for event in _spans(timeline.events[rank]):
        glyph = GLYPHS[event.action.kind]
        if glyph in "FBW" and chunks[event.action.stage] % 2:
            glyph = glyph.lower()
        first = min(int(event.start_seconds / slot), width - 1)
        last = min(int(event.end_seconds / slot), width - 1)
        for column in range(first, last + 1):
            start = max(event.start_seconds, column * slot)
            part = min(event.end_seconds, (column + 1) * slot) - start
            shares[column][glyph] = shares[column].get(glyph, 0.0) + part
    return "".join(_glyph(share, slot) for share in shares)


def _glyph(share: dict[str, float], slot: float) -> str:
    busy = sum(share.values())
    if busy < slot / 2:
        return BUBBLE
    return max(share, key=lambda glyph: share[glyph])


def _spans(events: tuple[Event, ...]) -> Iterator[Event]:
    """Yield a rank's compute events, and the parts of collectives in which it does not compute."""
    compute = [event for event in events if event.stream == "compute"]
    yield from compute
    for event in events:
        if event.action.kind not in ("REDUCE", "GATHER"):
            continue
        now = event.start_seconds
        for other in compute:
            if other.end_seconds <= now:
                continue
            if other.start_seconds >= event.end_seconds:
                break
            if other.start_seconds > now:
                yield event._replace(start_seconds=now, end_seconds=other.start_seconds)
            now = other.end_seconds
        if now < event.end_seconds:
            yield event._replace(start_seconds=now)


def draw_schedule(schedule: Schedule, timeline: Timeline, width: int) -> tuple[str, ...]:
    """Draw a schedule with a row of equal time slots per pipeline rank, wrapped into lines of at
    most ``width`` characters. "F0" is the forward of micro-batch 0, "--" continues it, "." is idle.

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
    """Return the text of each time slot of each rank, such as "F0"; the shortest action fills a
    slot."""
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
    """Return the forwards and backwards of a rank directly after which an asynchronous schedule
    updates weights; none for a synchronous schedule."""
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
