"""What the Trace Event Format asks of a trace, checked.

Source: Trace Event Format, Google 2016,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the keys of each
phase, "Duration Events" (slices of a track nest), "Flow Events" (an id has a begin and an end that
bind to slices), "Counter Events" and "Metadata Events".
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

KEYS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts"},
}
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
ROUNDING = 1e-3
"""Microseconds."""

Event = dict[str, Any]


def faults(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a trace; nothing if it is one."""
    events = trace["traceEvents"]
    found = [fault for event in events for fault in _of_event(event)]
    if found:
        return found
    slices = [event for event in events if event["ph"] == "X"]
    return [*_nesting(slices), *_flows(events, slices), *_names(events, slices)]


def _of_event(event: Event) -> list[str]:
    if event.get("ph") not in KEYS:
        return [f"unknown phase: {event}"]
    found = [f"no {key}: {event}" for key in KEYS[event["ph"]] - event.keys()]
    numbers = [event.get(key, 0) for key in ("ts", "dur")]
    if not all(isinstance(each, int | float) and each >= 0 for each in numbers):
        found.append(f"not a time: {event}")
    if event["ph"] == "M" and METADATA.get(event["name"]) not in event.get("args", {}):
        found.append(f"unknown metadata: {event}")
    if event["ph"] == "C" and not all(
        isinstance(value, int | float) for value in event.get("args", {}).values()
    ):
        found.append(f"a counter without numbers: {event}")
    return found


def _tracks(slices: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for each in slices:
        tracks[each["pid"], each["tid"]].append(each)
    return tracks


def _nesting(slices: list[Event]) -> list[str]:
    """Slices of a track that overlap without one being inside the other."""
    found = []
    for own in _tracks(slices).values():
        open_ends: list[float] = []
        for each in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            end = each["ts"] + each["dur"]
            while open_ends and open_ends[-1] <= each["ts"] + ROUNDING:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + ROUNDING:
                found.append(f"overlaps another slice: {each}")
            open_ends.append(end)
    return found


def _flows(events: list[Event], slices: list[Event]) -> list[str]:
    """Arrows without two ends, against time, or with an end in no slice."""
    ends: dict[tuple[str, str, str], dict[str, list[Event]]] = defaultdict(
        lambda: {"s": [], "f": []}
    )
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]][event["ph"]].append(event)
    tracks, found = _tracks(slices), []
    for name, both in ends.items():
        if (len(both["s"]), len(both["f"])) != (1, 1):
            found.append(f"{len(both['s'])} begins and {len(both['f'])} ends of flow {name}")
            continue
        if both["s"][0]["ts"] > both["f"][0]["ts"] + ROUNDING:
            found.append(f"flow {name} ends before it begins")
        for event in (both["s"][0], both["f"][0]):
            own = tracks.get((event["pid"], event["tid"]), [])
            if not any(
                each["ts"] - ROUNDING <= event["ts"] <= each["ts"] + each["dur"] + ROUNDING
                for each in own
            ):
                found.append(f"an end of flow {name} is in no slice: {event}")
    return found


def _names(events: list[Event], slices: list[Event]) -> list[str]:
    """Tracks and processes that have slices and no name."""
    named = {(e["pid"], e.get("tid")) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    found = [f"track {track} has no name" for track in _tracks(slices).keys() - named]
    return found + [f"process {e['pid']} has no name" for e in slices if e["pid"] not in processes]
