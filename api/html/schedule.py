"""Drawing of a step over time: compute, messages and waits of each pipeline rank.

In: a timeline. Out: SVG shapes, one row of lanes per rank, and the same events as numbers, with
which the page's script explains the event under the pointer: its kind, time, and reason for a wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.cost_model.simulator.actions import SENDS, Action
from autoparallel.cost_model.simulator.timeline import STREAMS, Event, Timeline
from autoparallel.html.charts import box

UNITS = 100_000
"""Width of a step in units of the drawing."""

COMPUTE_HEIGHT, LANE_HEIGHT, GAP = 22, 5, 8
KINDS = ("F", "B", "I", "W", "STEP", "SEND_F", "SEND_B", "REDUCE", "GATHER")
MOST_WITH_EDGES = 300
LEAST_WAIT = 1e-4
"""Share of the step below which waits are not listed."""

WAITS = ("message", "compute", "gather", "sync", "start", "end")
"""Reasons for a wait, in order: a message is in flight; the sending rank still computes; parameters
are gathered; gradients are reduced; the pipeline fills; the step ends for all ranks at once."""


STREAM_NAMES = {
    "compute": "compute",
    "send forward": "activations to later stages",
    "send backward": "gradients to earlier stages",
    "gradient sync": "sums of gradients",
    "parameter gather": "gathering of parameters",
    "host copies": "copies to and from the host",
}


@dataclass(frozen=True, slots=True)
class RankRow:
    """Drawn row of a pipeline rank: a lane per stream (compute, communication), and an SVG path of
    boxes per CSS class. ``busy`` (compute), ``exposed`` (communication): shares of the step."""

    name: str
    top: int
    height: int
    lanes: tuple[tuple[str, int, int], ...]
    shapes: Mapping[str, str]
    busy: float
    exposed: float


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """Drawing of a step's timeline, a row per rank; ``data`` are numbers for the page's script."""

    rows: tuple[RankRow, ...]
    height: int
    streams: tuple[str, ...]
    kinds: tuple[str, ...]
    data: Mapping[str, Any]

    @property
    def is_dense(self) -> bool:
        """True if boxes are too narrow to be drawn with borders."""
        return max(len(rank["events"]) for rank in self.data["ranks"]) > MOST_WITH_EDGES


def schedule_view(timeline: Timeline, names: Sequence[str]) -> ScheduleView:
    """Draw a step's timeline; ``names`` are the names of the pipeline ranks."""
    scale = UNITS / timeline.step_seconds
    ends = _Ends(timeline)
    used = [s for s in STREAMS if any(e.stream == s for events in timeline.events for e in events)]
    rows, tables, top = [], [], 0
    for rank, events in enumerate(timeline.events):
        lanes, y = [], top
        for stream in used:
            height = COMPUTE_HEIGHT if stream == "compute" else LANE_HEIGHT
            lanes.append((stream, y, height))
            y += height + 1
        compute = [e for e in events if e.stream == "compute"]
        shapes, table = _draw_boxes(events, compute, lanes, scale)
        table["waits"] = [_wait_row(wait, scale) for wait in _waits(timeline, rank, ends)]
        busy = sum(e.end_seconds - e.start_seconds for e in compute) / timeline.step_seconds
        exposed = timeline.exposed_seconds[rank] / timeline.step_seconds
        rows.append(RankRow(names[rank], top, y - top, tuple(lanes), shapes, busy, exposed))
        tables.append(table)
        top = y + GAP
    kinds = {e.action.kind for events in timeline.events for e in events}
    data = {
        "streams": [STREAM_NAMES[stream] for stream in used],
        "units": UNITS,
        "step": timeline.step_seconds,
        "kinds": KINDS,
        "waits": WAITS,
        "ranks": [
            {
                "name": row.name,
                "top": row.top,
                "height": row.height,
                "lanes": [[y, height] for _, y, height in row.lanes],
                **table,
            }
            for row, table in zip(rows, tables, strict=True)
        ],
    }
    return ScheduleView(
        tuple(rows), max(top - GAP, 1), tuple(used), tuple(k for k in KINDS if k in kinds), data
    )


def _wait_row(wait: Wait, scale: float) -> list[int]:
    start, length = round(wait.start * scale), round((wait.end - wait.start) * scale)
    return [start, length, WAITS.index(wait.why), wait.stage, wait.microbatch]


def _draw_boxes(
    events: Sequence[Event],
    compute: Sequence[Event],
    lanes: Sequence[tuple[str, int, int]],
    scale: float,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return SVG paths of a rank's events by CSS class, and a row of numbers per event. ``compute``
    are the rank's compute events; ``scale`` is pixels per second."""
    paths: dict[str, list[str]] = {}
    table = []
    stages = sorted({event.action.stage for event in events})
    for event in events:
        lane = next(at for at, (stream, _, _) in enumerate(lanes) if stream == event.stream)
        _, y, height = lanes[lane]
        start, length = event.start_seconds, event.end_seconds - event.start_seconds
        kind = event.action.kind
        hidden = 0.0
        if event.stream == "compute":
            look: str = "B" if kind == "I" else kind
            look += " odd" if stages.index(event.action.stage) % 2 else ""
            paths.setdefault(look, []).append(_box(start, length, y, height, scale))
        else:
            exposed = _exposed_parts(event, compute)
            hidden = length - sum(b - a for a, b in exposed)
            paths.setdefault("hidden", []).append(_box(start, length, y, height, scale))
            for a, b in exposed:
                paths.setdefault("exposed", []).append(_box(a, b - a, y, height, scale))
        table.append(
            [
                round(start * scale),
                max(1, round(length * scale)),
                KINDS.index(kind),
                event.action.stage,
                event.action.microbatch,
                lane,
                round(hidden * scale),
            ]
        )
    return {look: "".join(parts) for look, parts in paths.items()}, {"events": table}


def _box(start: float, length: float, y: int, height: int, scale: float) -> str:
    return box(round(start * scale), y, max(1, round(length * scale)), height)


def _exposed_parts(event: Event, compute: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the parts (start, end) of an event's time in which its rank does not compute."""
    starts = [each.start_seconds for each in compute]
    first = max(0, bisect_left(starts, event.start_seconds) - 1)
    found, now = [], event.start_seconds
    for other in compute[first:]:
        if other.start_seconds >= event.end_seconds:
            break
        if other.start_seconds > now:
            found.append((now, other.start_seconds))
        now = max(now, other.end_seconds)
    if event.end_seconds > now:
        found.append((now, event.end_seconds))
    return found


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in which a rank does not compute. ``stage`` and ``microbatch`` identify the action that
    the rank waits for, -1 if none."""

    start: float
    end: float
    why: str
    stage: int = -1
    microbatch: int = -1


class _Ends:
    """Times of a timeline: when each message arrives, and when the action that computes it ends."""

    def __init__(self, timeline: Timeline) -> None:
        self.messages: dict[tuple[str, int, int, int], tuple[float, Action]] = {}
        for events in timeline.events:
            for event in events:
                action = event.action
                if action.kind in SENDS:
                    way = "F" if action.kind == "SEND_F" else "B"
                    key = (way, event.to, action.microbatch, action.slice)
                    if key not in self.messages or self.messages[key][0] < event.end_seconds:
                        self.messages[key] = event.end_seconds, action
        self.computed = {
            (("F" if e.action.kind == "F" else "B"), *e.action[1:]): e.end_seconds
            for events in timeline.events
            for e in events
            if e.action.kind in ("F", "B", "I") and e.stream == "compute"
        }


def _waits(timeline: Timeline, rank: int, ends: _Ends) -> list[Wait]:
    """Return the waits of a rank between its compute actions, in order, each with its reason."""
    events = timeline.events[rank]
    compute = [event for event in events if event.stream == "compute"]
    least = LEAST_WAIT * timeline.step_seconds
    found: list[Wait] = []
    now = 0.0
    for event in compute:
        if event.start_seconds - now > least:
            found.append(_wait(events, now, event, ends))
        now = max(now, event.end_seconds)
    if timeline.step_seconds - now > least:
        busy = _busy_after(events, now)
        found.append(Wait(now, timeline.step_seconds, "sync" if busy else "end"))
    return found


def _busy_after(events: Sequence[Event], now: float) -> bool:
    return any(e.end_seconds > now and e.action.kind == "REDUCE" for e in events)


def _wait(events: Sequence[Event], start: float, event: Event, ends: _Ends) -> Wait:
    """Return the wait of a rank from ``start`` until ``event``, with its reason."""
    kind, stage, microbatch, part = event.action
    end = event.start_seconds
    if kind == "STEP":
        return Wait(start, end, "sync", stage)
    way = "F" if kind == "F" else "B"
    message = ends.messages.get((way, stage, microbatch, part)) if kind != "W" else None
    if message is not None and message[0] > start:
        sender = message[1]
        computed = ends.computed.get((way, sender.stage, sender.microbatch, sender.slice), 0.0)
        why = "start" if start == 0 else "compute" if computed > start else "message"
        return Wait(start, end, why, sender.stage, microbatch)
    gathers = any(e.action.kind == "GATHER" and e.end_seconds > start for e in events)
    return Wait(start, end, "gather" if gathers else "message", stage, microbatch)
