"""A timeline as text: one line per pipeline rank, one character per slice of the step.

====  ===================================================
F B   forward and backward, ``f b`` of every second chunk
W     backward of weights alone
s     optimizer
r g   waiting for gradients to be summed, for parameters
.     bubble: nothing to do, or waiting for a message
====  ===================================================

A character shows what takes most of its slice.
"""

from __future__ import annotations

from collections.abc import Iterator

from .timeline import Event, Timeline

BUBBLE = "."
GLYPHS = {"F": "F", "B": "B", "I": "B", "W": "W", "STEP": "s", "REDUCE": "r", "GATHER": "g"}


def draw(timeline: Timeline, width: int, *, limit: int = 16) -> tuple[str, ...]:
    """A line of ``width`` characters per rank; beyond ``limit`` ranks the middle ones are left out.

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
    lines = [
        f"rank {rank:>{digits}}  {_row(timeline, rank, width)}"
        for rank in shown
    ]  # fmt: skip
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
    """The compute events, and the parts of collectives between them: compute hides the rest."""
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
