"""The charts of a page: memory in time, candidates by time and memory, the roofline of the ops.

In: values. Out: coordinates in a drawing of fixed size, ticks, and labels, for a template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.baselines import Baseline
from autoparallel.cost_model.actions import Action
from autoparallel.cost_model.cluster import Device
from autoparallel.cost_model.compute import peak_flops
from autoparallel.cost_model.timeline import Event
from autoparallel.html.scales import Scale, number, powers, ticks
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.priced_again import OpWork
from autoparallel.report.facts import MEMORY_ORDER, merged_alternatives
from autoparallel.report.words import bytes_text, count_text, percent_text, rate_text, seconds_text

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 12, 34
MOST_OF_LIMIT = 1.3
"""Candidates that need more memory than this times the limit are drawn at the edge."""
LEAST_SHARE = 0.01
"""Categories of memory below this share of the peak are drawn as one, "other"."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis."""

    at: str
    text: str


@dataclass(frozen=True, slots=True)
class Area:
    """A category of memory in time."""

    name: str
    path: str
    peak_text: str


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """Memory in time, the categories one on top of the other, below the limit."""

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
    """What a rank holds from the start of each action on. ``events`` are the rank's."""
    starts = {event.action: event.start_seconds for event in events if event.stream == "compute"}
    moments = [(starts[action], own) for action, own in held if action in starts]
    totals = [sum(own.values()) for _, own in moments]
    peak = max(range(len(totals)), key=totals.__getitem__)
    names = _categories([own for _, own in moments], totals[peak])
    rows = [[own.get(name, 0.0) for name in names[:-1]] for _, own in moments]
    rows = [[*row, max(0.0, total - sum(row))] for row, total in zip(rows, totals, strict=True)]
    x = Scale(0, step_seconds, LEFT, WIDTH - RIGHT)
    y = Scale(0, 1.06 * max(limit, totals[peak]), HEIGHT - BOTTOM, TOP)
    times = [time for time, _ in moments]
    areas, below = [], [0.0] * len(moments)
    for at, name in enumerate(names):
        above = [low + row[at] for low, row in zip(below, rows, strict=True)]
        top = [(x(time), y(value)) for time, value in zip(times, above, strict=True)]
        base = [(x(time), y(value)) for time, value in zip(times, below, strict=True)]
        areas.append(Area(name, _band(top, base, x(step_seconds)), bytes_text(rows[peak][at])))
        below = above
    gib = 2**30
    unit, scale = ("GiB", gib) if limit >= gib else ("MiB", 2**20)
    return MemoryChart(
        tuple(areas),
        tuple(Tick(number(x(t)), seconds_text(t)) for t in ticks(0, step_seconds, 6)),
        tuple(Tick(number(y(v * scale)), f"{v:g} {unit}") for v in ticks(0, y.high / scale, 5)),
        number(y(limit)), f"limit {bytes_text(limit)}",
        number(x(times[peak])), number(y(totals[peak])), bytes_text(totals[peak]),
        {
            "names": names, "times": [round(t / step_seconds, 5) for t in times],
            "actions": [str(action) for action, _ in held if action in starts],
            "mib": [[round(v / 2**20) for v in row] for row in rows],
            "left": LEFT, "right": WIDTH - RIGHT, "width": WIDTH, "step": step_seconds,
        },
    )  # fmt: skip


def _categories(held: Iterable[Mapping[str, float]], peak: float) -> list[str]:
    most: dict[str, float] = {}
    for own in held:
        for name, size in own.items():
            most[name] = max(most.get(name, 0.0), size)
    shown = [name for name, size in most.items() if size >= LEAST_SHARE * peak]
    # what stays the same lies at the bottom
    order = [name for name in MEMORY_ORDER if name in shown]
    return [*order, *(name for name in shown if name not in order), "other"]


def _band(
    top: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]], end: float
) -> str:
    """The area between two step functions, which hold their last value until ``end``."""

    def steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        nexts = [*(at for at, _ in points[1:]), end]
        return [place for (at, value), stop in zip(points, nexts, strict=True)
                for place in ((at, value), (stop, value))]  # fmt: skip

    path = [*steps(top), *reversed(steps(base))]
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in path) + "z"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row of the table and a point of the picture."""

    name: str
    kind: str
    step_seconds: float | None
    memory_bytes: float | None
    difference: float | None
    reason: str
    is_on_front: bool = False
    x: str = ""
    y: str = ""
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class CandidateChart:
    """Candidates by memory and time, those on the Pareto front joined."""

    candidates: tuple[Candidate, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit_x: str
    limit_text: str


def candidate_chart(plan: Plan, found: Sequence[Baseline], limit: int) -> CandidateChart:
    """The plan, its alternatives and the baselines."""
    best = plan.prediction.step_seconds
    rows: list[tuple[str, str, float, float, str]] = [
        (plan_summary(plan), "plan", best, plan.prediction.peak_memory_bytes, "the plan")
    ]
    rows += [
        (each.summary, "alternative", each.step_seconds, each.peak_memory_bytes, each.reason)
        for each in merged_alternatives(plan.alternatives)
    ]
    rows += [
        (f"{each.name}: {each.configuration}", "baseline", each.step_seconds, each.memory_bytes,
         each.reason or f"best of {each.num_priced} priced")
        for each in found if each.configuration
    ]  # fmt: skip
    placed = [(step, held) for _, _, step, held, _ in rows if step and held]
    front = pareto_front([each for each in placed if each[1] <= limit] or placed)
    x_high = min(max(limit, *(held for _, held in placed)) * 1.05, MOST_OF_LIMIT * limit)
    low, high = min(step for step, _ in placed), max(step for step, _ in placed)
    x_low = min(held for _, held in placed) * 0.95
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    pad = max(high - low, 0.02 * high) * 0.12
    y = Scale(low - pad, high + pad, HEIGHT - BOTTOM, TOP)
    candidates = tuple(
        Candidate(
            name, kind, step or None, held or None, step / best - 1 if step else None, reason,
            (step, held) in front, number(x(min(held, x_high))) if step and held else "",
            number(y(step)) if step and held else "", held > x_high,
        )
        for name, kind, step, held, reason in rows
    )  # fmt: skip
    gib = 2**30 if x_high >= 2**31 else 2**20
    unit = "GiB" if gib == 2**30 else "MiB"
    corners = []
    for at, (step, held) in enumerate(front):
        corners += [(x(held), y(front[at - 1][0]))] if at else []
        corners.append((x(held), y(step)))
    return CandidateChart(
        candidates,
        "M" + "L".join(f"{number(a)} {number(b)}" for a, b in corners),
        tuple(
            Tick(number(x(v * gib)), f"{v:g} {unit}") for v in ticks(x_low / gib, x_high / gib, 7)
        ),
        tuple(Tick(number(y(v)), seconds_text(v)) for v in ticks(y.low, y.high, 5)),
        number(x(limit)), f"limit {bytes_text(limit)}",
    )  # fmt: skip


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs that no other is better than in one figure and not worse in the other, by memory.

    >>> pareto_front([(3, 1), (1, 3), (2, 2), (2.5, 2.5), (1, 4)])
    [(3, 1), (2, 2), (1, 3)]
    """
    found: list[tuple[float, float]] = []
    for step, held in sorted(set(points), key=lambda each: (each[1], each[0])):
        if not found or step < found[-1][0]:
            found.append((step, held))
    return found


@dataclass(frozen=True, slots=True)
class OpPoint:
    """Ops in the roofline; ``radius`` grows with their share of the compute."""

    x: str
    y: str
    radius: str
    family: str
    direction: str
    text: str


@dataclass(frozen=True, slots=True)
class Roof:
    """A line of the roofline, and its label's place."""

    path: str
    x: str
    y: str
    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class OpRow:
    """A row of the table of ops."""

    op: OpWork
    share: float
    intensity: float
    of_roof: float
    bound: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """The ops by arithmetic intensity and rate, under what the device can do."""

    points: tuple[OpPoint, ...]
    roofs: tuple[Roof, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[OpRow, ...]
    num_rows: int


MOST_ROWS = 24


def roofline(ops: Sequence[OpWork], device: Device, dtype: str) -> Roofline:
    """The roofline of ops on a device, whose products compute in ``dtype``."""
    peak, rate = peak_flops(device, dtype), device.memory_bytes_per_second
    total = sum(op.total_seconds for op in ops) or 1.0
    counted = [op for op in ops if op.flops > 0 and op.num_bytes > 0]
    intensities = [op.flops / op.num_bytes for op in counted] or [1.0]
    rates = [op.flops / op.seconds for op in counted] or [peak]
    x = Scale(
        10 ** _floor(min(*intensities, peak / rate)), 10 ** _ceil(max(*intensities, peak / rate)),
        LEFT, WIDTH - RIGHT, is_log=True,
    )  # fmt: skip
    low = max(10 ** _floor(min(rates)), peak * 1e-6)
    y = Scale(low, 10 ** _ceil(peak * 1.01), HEIGHT + 40 - BOTTOM, TOP, is_log=True)
    points = [
        OpPoint(
            number(x(op.flops / op.num_bytes)), number(y(max(op.flops / op.seconds, low))),
            number(2 + 20 * (op.total_seconds / total) ** 0.5), op.family, _direction(op),
            f"{op.name}, {_direction(op)}, {op.module}: {percent_text(op.total_seconds / total)} "
            f"of compute, {seconds_text(op.seconds)} each, "
            f"{count_text(op.flops / op.num_bytes)} FLOP per byte, "
            f"{rate_text(op.flops / op.seconds, 'FLOP/s')}",
        )
        for op in counted
    ]  # fmt: skip
    ridge = peak / rate
    start = max(x.low, low / rate)
    memory = f"M{_at(x, y, start, start * rate)}L{_at(x, y, ridge, peak)}"
    compute = f"M{_at(x, y, ridge, peak)}L{_at(x, y, x.high, peak)}"
    middle = (start * ridge) ** 0.5
    roofs = (
        Roof(memory, number(x(middle) - 8), number(y(middle * rate) - 8),
             f"memory {rate_text(rate, 'B/s')}", "end"),
        Roof(compute, number(x(x.high)), number(y(peak) + 16),
             f"{dtype} {rate_text(peak, 'FLOP/s')}", "end"),
    )  # fmt: skip
    rows = tuple(_row(op, total, peak, rate) for op in ops[:MOST_ROWS])
    return Roofline(
        tuple(points), roofs,
        tuple(Tick(number(x(v)), count_text(v) if v >= 1 else f"{v:g}")
              for v in powers(x.low, x.high)),
        tuple(Tick(number(y(v)), rate_text(v, "FLOP/s")) for v in powers(y.low, y.high)),
        rows, len(ops),
    )  # fmt: skip


def _row(op: OpWork, total: float, peak: float, rate: float) -> OpRow:
    intensity = op.flops / op.num_bytes if op.num_bytes else 0.0
    least = max(op.flops / peak, op.num_bytes / rate)
    bound = "compute" if op.flops / peak >= op.num_bytes / rate else "memory"
    if op.seconds > 3 * least:
        bound = "launch" if op.seconds < 3e-5 else f"{bound}, far below"
    return OpRow(op, op.total_seconds / total, intensity, least / op.seconds, bound)


def _direction(op: OpWork) -> str:
    return "backward" if op.is_backward else "forward"


def _at(x: Scale, y: Scale, intensity: float, rate: float) -> str:
    return f"{number(x(intensity))} {number(y(rate))}"


def _floor(value: float) -> int:
    from math import floor, log10

    return floor(log10(value))


def _ceil(value: float) -> int:
    from math import ceil, log10

    return ceil(log10(value))
