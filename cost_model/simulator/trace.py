"""A timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

In: a timeline. Out: the JSON object of the trace event format: one process per pipeline rank,
one thread per stream, an arrow from each message to the compute that it starts, and a counter
of the bytes held. Times are in microseconds. Source: Trace Event Format, Google 2016,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from typing import Any

from .actions import BACKWARD, FORWARD, INPUT_BACKWARD, SEND_FORWARD, SENDS, Action, ActionKind
from .timeline import STREAMS, Event, Stream, Timeline

TraceEvent = dict[str, Any]

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "SEND_F": "send forward",
    "SEND_B": "send backward",
    "GATHER": "gather parameters",
    "REDUCE": "sum gradients",
    "STEP": "optimizer",
}
"""Category that an event of each kind of action has in a Chrome trace."""

MICROSECONDS = 1e6


def chrome_trace(timeline: Timeline, rank_names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a timeline in Chrome's trace event format, as a dict for ``json.dump``. ``rank_names``
    name the trace's processes, by default each pipeline rank with its number of devices."""
    names = rank_names or tuple(map(rank_name, range(len(timeline.events)), timeline.replicas))
    events: list[TraceEvent] = []
    for rank, own in enumerate(timeline.events):
        events += labels(rank, names[rank], {event.stream for event in own})
    events += timeline_events(timeline, range(len(timeline.events)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step_seconds": float(timeline.step_seconds),
            "bubble_fraction": float(timeline.bubble_fraction),
            "num_devices": timeline.num_devices,
        },
    }


def timeline_events(
    timeline: Timeline,
    processes: Sequence[int],
    *,
    begins_seconds: float = 0.0,
    name: str = "",
    drawn: Container[int] | None = None,
) -> Iterator[TraceEvent]:
    """Yield a timeline as Chrome trace events: slices for actions, arrows for messages, counters of
    memory. ``processes``: id of the trace's process for each rank; ``begins_seconds``: time in the
    trace at which the timeline begins; ``name``: prefix that keeps the ids of its arrows apart from
    other timelines in the trace. Only ranks in ``drawn`` (None: all) get slices and memory."""
    takers = _takers(timeline)
    for rank, own in enumerate(timeline.events):
        is_drawn = drawn is None or rank in drawn
        found: list[TraceEvent] = []
        for event in own:
            if is_drawn:
                found.append(_slice(rank, event))
            if event.action.kind in SENDS:
                found += _flow(rank, event, takers, name)
        if is_drawn:
            found += _counter(rank, timeline.memory_bytes[rank])
        for each in found:
            at = each["ts"] + begins_seconds * MICROSECONDS
            yield {**each, "pid": processes[each["pid"]], "ts": at}


def rank_name(rank: int, replicas: int) -> str:
    """Return the name in traces of a pipeline rank that represents ``replicas`` devices.

    >>> rank_name(3, 1), rank_name(0, 8)
    ('pipeline rank 3', 'pipeline rank 0 (8 devices)')
    """
    return f"pipeline rank {rank}" + (f" ({replicas} devices)" if replicas > 1 else "")


def labels(
    process: int, name: str, streams: Collection[Stream], order: int | None = None
) -> Iterator[TraceEvent]:
    """Yield the Chrome trace events that name process ``process`` and the ``streams`` that it uses
    (its threads). ``order``: its position in the display, by default its id."""
    yield _metadata("process_name", process, name=name)
    yield _metadata("process_sort_index", process, sort_index=process if order is None else order)
    for thread, stream in enumerate(STREAMS):
        if stream in streams:
            yield _metadata("thread_name", process, thread, name=stream)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(what: str, rank: int, thread: int = 0, **arguments: object) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": arguments}


def _event(phase: str, rank: int, stream: Stream, seconds: float, **facts: object) -> TraceEvent:
    thread, microseconds = STREAMS.index(stream), float(seconds) * MICROSECONDS
    return {"ph": phase, "pid": rank, "tid": thread, "ts": microseconds, **facts}


def _slice(rank: int, event: Event) -> TraceEvent:
    action = event.action
    arguments = {"stage": action.stage}
    if action.microbatch >= 0:
        arguments["micro-batch"] = action.microbatch
    duration = float(event.end_seconds - event.start_seconds) * MICROSECONDS
    facts = {"name": str(action), "cat": NAMES[action.kind], "dur": duration, "args": arguments}
    return _event("X", rank, event.stream, event.start_seconds, **facts)


Takers = dict[Action, tuple[int, Event]]
"""Maps the receive action of a message to the compute that needs it, as (rank, event)."""


def _takers(timeline: Timeline) -> Takers:
    takers: Takers = {}
    for rank, events in enumerate(timeline.events):
        for event in (each for each in events if each.stream == "compute"):
            kind, stage, m, part = event.action
            if kind == FORWARD:
                takers[Action("RECV_F", stage, m, part)] = (rank, event)
            elif kind in (BACKWARD, INPUT_BACKWARD):
                takers[Action("RECV_B", stage, m, part)] = (rank, event)
    return takers


def _flow(rank: int, event: Event, takers: Takers, name: str) -> Iterator[TraceEvent]:
    """Yield the two trace events of an arrow from the send of a message to the compute that needs
    it. ``takers``: compute (rank, event) by receive action; ``name``: prefix of the id."""
    kind, stage, m, part = event.action
    receive: ActionKind = "RECV_F" if kind == SEND_FORWARD else "RECV_B"
    receiver, taker = takers[Action(receive, event.to, m, part)]
    common = {
        "name": "activations" if kind == SEND_FORWARD else "gradients",
        "cat": "message",
        "id": f"{name}{kind}-{stage}-{event.to}-{m}-{part}",
    }
    yield _event("s", rank, event.stream, event.start_seconds, **common)
    yield _event("f", receiver, taker.stream, taker.start_seconds, **common, bp="e")


def _counter(rank: int, changes: Sequence[tuple[float, int]]) -> Iterator[TraceEvent]:
    for second, held in changes:
        yield _event("C", rank, "compute", second, name="memory", args={"bytes": held})
