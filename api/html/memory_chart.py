"""Memory in the course of a step: stacked categories, below the limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.analysis.facts import MEMORY_ORDER
from autoparallel.cost_model.simulator.actions import Action
from autoparallel.cost_model.simulator.timeline import Event
from autoparallel.html.charts import BOTTOM, FAR, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Tick
from autoparallel.html.scales import Scale, number, ticks
from autoparallel.options.words import bytes_text, seconds_text

LEAST_SHARE = 0.01
"""Categories of memory below this share of the peak are drawn together as "other"."""


@dataclass(frozen=True, slots=True)
class Area:
    """Category of memory in time."""

    name: str
    path: str
    peak_text: str


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """Memory in time, with stacked categories, below the limit."""

    areas: tuple[Area, ...]
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
    """Draw the memory of a rank from the start of each action on; ``events`` are the rank's."""
    starts = {event.action: event.start_seconds for event in events if event.stream == "compute"}
    moments = [(starts[action], own) for action, own in held if action in starts]
    totals = [sum(own.values()) for _, own in moments]
    peak = max(range(len(totals)), key=totals.__getitem__)
    names = _categories([own for _, own in moments], totals[peak])
    rows = [[own.get(name, 0.0) for name in names[:-1]] for _, own in moments]
    rows = [[*row, max(0.0, total - sum(row))] for row, total in zip(rows, totals, strict=True)]
    x = Scale(0, step_seconds, LEFT, WIDTH - RIGHT)
    is_far = limit > FAR * totals[peak]
    y = Scale(
        0, 1.06 * (totals[peak] if is_far else max(limit, totals[peak])), HEIGHT - BOTTOM, TOP
    )
    times = [time for time, _ in moments]
    areas, below = [], [0.0] * len(moments)
    for at, name in enumerate(names):
        above = [low + row[at] for low, row in zip(below, rows, strict=True)]
        top = [(x(time), y(value)) for time, value in zip(times, above, strict=True)]
        base = [(x(time), y(value)) for time, value in zip(times, below, strict=True)]
        areas.append(Area(name, _band(top, base, x(step_seconds)), bytes_text(rows[peak][at])))
        below = above
    gib = 2**30
    unit, scale = ("GiB", gib) if y.high >= 2 * gib else ("MiB", 2**20)
    return MemoryChart(
        tuple(areas),
        tuple(Tick(number(x(t)), seconds_text(t)) for t in ticks(0, step_seconds, 6)),
        tuple(Tick(number(y(v * scale)), f"{v:g} {unit}") for v in ticks(0, y.high / scale, 5)),
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
    most: dict[str, float] = {}
    for own in held:
        for name, size in own.items():
            most[name] = max(most.get(name, 0.0), size)
    shown = [name for name, size in most.items() if size >= LEAST_SHARE * peak]
    # constant categories lie at the bottom
    order = [name for name in MEMORY_ORDER if name in shown]
    return [*order, *(name for name in shown if name not in order), "other"]


def _band(
    top: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]], end: float
) -> str:
    """Return the area between two step functions, which hold their last value until ``end``."""

    def steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        nexts = [*(at for at, _ in points[1:]), end]
        return [
            place
            for (at, value), stop in zip(points, nexts, strict=True)
            for place in ((at, value), (stop, value))
        ]

    path = [*steps(top), *reversed(steps(base))]
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in path) + "z"
