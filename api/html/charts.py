"""Charts of a page: axes and coordinates, candidates by time and memory, memory over time.

In: figures of candidates, or the memory of a rank by action. Out: coordinates as short text, ticks
at round values, the Pareto front, and labels that overlap neither points nor each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any

from autoparallel.analysis.facts import MEMORY_MEANINGS, in_order, named_memory
from autoparallel.cost_model.simulator.actions import Action
from autoparallel.cost_model.simulator.timeline import Event
from autoparallel.options.words import bytes_text, seconds_text

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 12, 34

FAR = 2.5
"""Multiple of the largest memory above which a memory limit is not drawn."""

LETTER = 6.6
"""Width of a letter of a label, in units of the drawing."""

MOST_OF_LIMIT = 1.3
"""Candidates whose memory exceeds this multiple of the limit are drawn at the edge."""

LEAST_SHARE = 0.01
"""Share of the peak below which memory categories are drawn together as "other"."""


def number(value: float) -> str:
    """Format a coordinate with at most two decimals.

    >>> number(3.0), number(2.71828), number(-0.001)
    ('3', '2.72', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def line(points: Iterable[tuple[float, float]]) -> str:
    """Return a line through points as an SVG path.

    >>> line([(1, 2), (3.5, 4)])
    'M1 2L3.5 4'
    """
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as part of an SVG path.

    >>> box(1, 2, 3, 4)
    'M1 2h3v4h-3z'
    """
    w = number(width)
    return f"M{number(x)} {number(y)}h{w}v{number(height)}h-{w}z"


def round_step(span: float, most: int) -> float:
    """Return the least step of 1, 2 or 5 times a power of ten with at most ``most`` in ``span``.

    >>> round_step(3.2, 5), round_step(90, 5)
    (1.0, 20.0)
    """
    least = span / max(most, 1)
    power = 10.0 ** floor(log10(least))
    return next(power * each for each in (1.0, 2.0, 5.0, 10.0) if power * each >= least * 0.999999)


def round_values(low: float, high: float, most: int = 6) -> list[float]:
    """Return multiples of a round step between ``low`` and ``high``.

    >>> round_values(0, 3.2), round_values(2.9, 3.5, 3)
    ([0.0, 1.0, 2.0, 3.0], [3.0, 3.2, 3.4])
    """
    if high <= low:
        return [low]
    step = round_step(high - low, most)
    first = ceil(low / step - 1e-9)
    return [round(each * step, 12) for each in range(first, floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Tick:
    """Tick of an axis: its coordinate and its text."""

    at: str
    text: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Map from values in [``low``, ``high``] to coordinates in [``start``, ``end``]."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = log10(low), log10(high), log10(max(value, 1e-300))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, values: Iterable[float], text: Callable[[float], str]) -> tuple[Tick, ...]:
        """Return a tick at each value, labelled by ``text``."""
        return tuple(Tick(number(self(value)), text(value)) for value in values)

    def ticks_of_seconds(self, most: int) -> tuple[Tick, ...]:
        """Return about ``most`` ticks at round seconds."""
        values = round_values(self.low, self.high, most)
        labels = dict(zip(values, distinct_seconds(values), strict=True))
        return self.ticks(values, labels.__getitem__)

    def ticks_of_bytes(self, most: int) -> tuple[Tick, ...]:
        """Return about ``most`` ticks at round values in GiB or MiB."""
        unit, name = (2**30, "GiB") if self.high >= 2**31 else (2**20, "MiB")
        values = round_values(self.low / unit, self.high / unit, most)
        return self.ticks((value * unit for value in values), lambda v: f"{v / unit:g} {name}")

    def ticks_of_powers(self, text: Callable[[float], str]) -> tuple[Tick, ...]:
        """Return a tick at each power of ten."""
        powers = range(ceil(log10(self.low)), floor(log10(self.high)) + 1)
        return self.ticks((10.0**power for power in powers), text)


def distinct_seconds(values: Sequence[float]) -> list[str]:
    """Return times as texts with as many digits as tell them apart.

    >>> distinct_seconds([1.0, 1.5]), distinct_seconds([34.56, 34.58, 34.6])
    (['1.00 s', '1.50 s'], ['34.56 s', '34.58 s', '34.60 s'])
    """
    texts = [seconds_text(value) for value in values]
    if len(set(texts)) == len(texts):
        return texts
    unit = texts[-1].rpartition(" ")[2]
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6}[unit]
    least = min(later - value for value, later in pairwise(values)) * scale
    digits = max(0, ceil(-log10(least)))
    return [f"{value * scale:.{digits}f} {unit}" for value in values]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Plan or baseline as a row of a table and a point of a chart, at coordinates ``x`` and ``y``.
    Unknown seconds or bytes are 0."""

    name: str
    kind: str
    step_seconds: float
    memory_bytes: float
    reason: str = ""
    label: str = ""
    difference: float | None = None
    is_on_front: bool = False
    x: str = ""
    y: str = ""
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """Text of a label, and the point where it starts."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class CandidateChart:
    """Chart of plans by memory and step time, with a line through the Pareto front."""

    candidates: tuple[Candidate, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit_x: str
    limit_text: str
    labels: tuple[Label, ...]


def candidate_chart(entries: Sequence[Candidate], limit: int) -> CandidateChart:
    """Return a chart of plans by memory and step time, compared in time with the first entry.
    ``limit`` is the usable memory in bytes. Some entry must have both seconds and bytes."""
    best = entries[0].step_seconds
    points = [(e.step_seconds, e.memory_bytes) for e in entries if e.step_seconds]
    points = [(step, held) for step, held in points if held]
    front = pareto_front([each for each in points if each[1] <= limit] or points)
    x, y, is_far = _scales(points, limit)

    def place(each: Candidate) -> Candidate:
        step, held = each.step_seconds, each.memory_bytes
        return replace(
            each,
            difference=step / best - 1 if step and best else None,
            is_on_front=(step, held) in front,
            x=number(x(min(held, x.high))) if step and held else "",
            y=number(y(step)) if step and held else "",
            is_beyond=held > x.high,
        )

    candidates = tuple(map(place, entries))
    corners = []
    for at, (step, held) in enumerate(front):
        corners += [(x(held), y(front[at - 1][0]))] if at else []
        corners.append((x(held), y(step)))
    return CandidateChart(
        candidates,
        line(corners),
        x.ticks_of_bytes(7),
        y.ticks_of_seconds(5),
        "" if is_far else number(x(limit)),
        f"limit {bytes_text(limit)}" + (" →" if is_far else ""),
        tuple(_labels(candidates)),
    )


def _scales(points: Sequence[tuple[float, float]], limit: int) -> tuple[Scale, Scale, bool]:
    """Return the axes of memory and time, and whether the memory limit lies outside the chart."""
    most, least = max(held for _, held in points), min(held for _, held in points)
    is_far = limit > FAR * most
    high = most * 1.1 if is_far else min(max(limit, most) * 1.05, MOST_OF_LIMIT * limit)
    x = Scale(min(least, high) * 0.95, high, LEFT, WIDTH - RIGHT)
    quick, slow = min(step for step, _ in points), max(step for step, _ in points)
    pad = max(slow - quick, 0.02 * slow) * 0.12
    return x, Scale(quick - pad, slow + pad, HEIGHT - BOTTOM, TOP), is_far


def _labels(candidates: Sequence[Candidate]) -> list[Label]:
    """Return the labels of candidates, beside their points; a label without room is left out."""
    points = [(float(each.x), float(each.y)) for each in candidates if each.x]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    found = []
    for each in candidates:
        if not each.x or not each.label:
            continue
        text = each.label
        if each.is_beyond:
            text += f", {bytes_text(each.memory_bytes)} →"
        x, y, wide = float(each.x), float(each.y), LETTER * len(text)
        places = [
            (left, y + down - 12, left + wide, y + down)
            for down in (4, 18, -10, 32, -24, 46, -38)
            for left in (x + 10, x - 10 - wide)
            if left >= LEFT and left + wide <= WIDTH and TOP < y + down < HEIGHT - BOTTOM
        ]
        place = next((own for own in places if not any(_do_overlap(own, it) for it in taken)), None)
        if place is not None:
            taken.append(place)
            found.append(Label(number(place[0]), number(place[3] - 2), text))
    return found


def _do_overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the pairs (seconds, bytes) that no other pair dominates, by ascending bytes.

    >>> pareto_front([(3, 1), (1, 3), (2, 2), (2.5, 2.5), (1, 4)])
    [(3, 1), (2, 2), (1, 3)]
    """
    found: list[tuple[float, float]] = []
    for step, held in sorted(set(points), key=lambda each: (each[1], each[0])):
        if not found or step < found[-1][0]:
            found.append((step, held))
    return found


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """Chart of a rank's memory over time, and its limit; ``areas`` are SVG paths by category."""

    areas: Mapping[str, str]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit_y: str
    limit_text: str
    peak_x: str
    peak_y: str
    peak_text: str
    data: Mapping[str, Any]


def memory_chart(
    held: Sequence[tuple[Action, Mapping[str, float]]],
    events: Sequence[Event],
    step_seconds: float,
    limit: int,
) -> MemoryChart:
    """Return a chart of a rank's memory over a step. ``held`` has the bytes by category after each
    action of the schedule, ``events`` the actions' times, ``limit`` the usable bytes."""
    starts = {event.action: event.start_seconds for event in events if event.stream == "compute"}
    moments = [(starts[action], named_memory(own)) for action, own in held if action in starts]
    times = [time for time, _ in moments]
    totals = [sum(own.values()) for _, own in moments]
    peak = max(range(len(totals)), key=totals.__getitem__)
    names = _categories([own for _, own in moments], totals[peak])
    rows = [[own.get(name, 0.0) for name in names[:-1]] for _, own in moments]
    rows = [[*row, max(0.0, total - sum(row))] for row, total in zip(rows, totals, strict=True)]
    x = Scale(0, step_seconds, LEFT, WIDTH - RIGHT)
    is_far = limit > FAR * totals[peak]
    high = 1.06 * (totals[peak] if is_far else max(limit, totals[peak]))
    y = Scale(0, high, HEIGHT - BOTTOM, TOP)
    areas, below = {}, [0.0] * len(moments)
    for at, name in enumerate(names):
        above = [low + row[at] for low, row in zip(below, rows, strict=True)]
        top, base = (_steps(times, values, step_seconds) for values in (above, below))
        path = [(x(time), y(value)) for time, value in (*top, *reversed(base))]
        areas[name] = f"{line(path)}z"
        below = above
    return MemoryChart(
        areas,
        x.ticks_of_seconds(6),
        y.ticks_of_bytes(5),
        "" if is_far else number(y(limit)),
        f"limit {bytes_text(limit)}" + (", far above" if is_far else ""),
        number(x(times[peak])),
        number(y(totals[peak])),
        bytes_text(totals[peak]),
        {
            "names": names,
            "times": [round(t / step_seconds, 5) for t in times],
            "actions": [str(action) for action, _ in held if action in starts],
            "mib": [[round(v / 2**20) for v in row] for row in rows],
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "width": WIDTH,
            "step": step_seconds,
        },
    )


def _categories(held: Iterable[Mapping[str, float]], peak: float) -> list[str]:
    """Return the memory categories to draw, from bottom to top: as in reports, then "other"."""
    most: dict[str, float] = {}
    for own in held:
        for name, size in own.items():
            most[name] = max(most.get(name, 0.0), size)
    shown = [name for name, size in most.items() if size >= LEAST_SHARE * peak]
    return [*in_order(shown, MEMORY_MEANINGS), "other"]


def _steps(
    times: Sequence[float], values: Sequence[float], end: float
) -> list[tuple[float, float]]:
    """Return the corners of a step function of time that keeps its last value until ``end``."""
    nexts = [*times[1:], end]
    return [
        corner
        for time, value, stop in zip(times, values, nexts, strict=True)
        for corner in ((time, value), (stop, value))
    ]
