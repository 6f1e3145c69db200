"""Candidates by time and memory: rows of a table, and a picture with the Pareto front.

In: a plan and baselines, or other entries. Out: every candidate with its place in the picture, and
labels that overlap neither points nor each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoparallel.analysis.baselines import Baseline
from autoparallel.analysis.facts import merged_alternatives
from autoparallel.html.charts import BOTTOM, FAR, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Tick
from autoparallel.html.scales import Scale, number, ticks
from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary

LETTER = 6.6
"""Width of a letter of a label."""

MOST_OF_LIMIT = 1.3
"""Candidates that need more memory than this multiple of the limit are drawn at the edge."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Candidate to draw; an unknown figure is 0, a missing ``label`` ""."""

    name: str
    kind: str
    step_seconds: float
    memory_bytes: float
    reason: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Row of the table and point of the picture."""

    name: str
    kind: str
    step_seconds: float | None
    memory_bytes: float | None
    difference: float | None
    reason: str
    label: str = ""
    is_on_front: bool = False
    x: str = ""
    y: str = ""
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """Text and its start."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class CandidateChart:
    """Candidates by memory and time, with a line through the Pareto front."""

    candidates: tuple[Candidate, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit_x: str
    limit_text: str
    labels: tuple[Label, ...]


def candidate_chart(plan: Plan, found: Sequence[Baseline], limit: int) -> CandidateChart:
    """Return the chart of the plan, its alternatives and the baselines."""
    own = plan.prediction
    entries = [
        Entry(
            plan_summary(plan), "plan", own.step_seconds, own.peak_memory_bytes, "the plan", "plan"
        )
    ]
    entries += [
        Entry(each.summary, "alternative", each.step_seconds, each.peak_memory_bytes, each.reason)
        for each in merged_alternatives(plan.alternatives)
    ]
    entries += [
        Entry(
            f"{each.name}: {each.configuration}",
            "baseline",
            each.step_seconds,
            each.memory_bytes,
            each.reason or f"best of {each.num_priced} priced",
            each.name,
        )
        for each in found
        if each.configuration
    ]
    return time_memory_chart(entries, limit)


def time_memory_chart(entries: Sequence[Entry], limit: int) -> CandidateChart:
    """Chart entries by time and memory, of which at least one has both, beside the first."""
    best = entries[0].step_seconds
    placed = [
        (e.step_seconds, e.memory_bytes) for e in entries if e.step_seconds and e.memory_bytes
    ]
    front = pareto_front([each for each in placed if each[1] <= limit] or placed)
    x, y, is_far = _scales(placed, limit)
    candidates = tuple(
        Candidate(
            each.name,
            each.kind,
            step or None,
            held or None,
            step / best - 1 if step and best else None,
            each.reason,
            each.label,
            (step, held) in front,
            number(x(min(held, x.high))) if step and held else "",
            number(y(step)) if step and held else "",
            held > x.high,
        )
        for each in entries
        for step, held in [(each.step_seconds, each.memory_bytes)]
    )
    gib = 2**30 if x.high >= 2**31 else 2**20
    unit = "GiB" if gib == 2**30 else "MiB"
    corners = []
    for at, (step, held) in enumerate(front):
        corners += [(x(held), y(front[at - 1][0]))] if at else []
        corners.append((x(held), y(step)))
    return CandidateChart(
        candidates,
        "M" + "L".join(f"{number(a)} {number(b)}" for a, b in corners),
        tuple(
            Tick(number(x(v * gib)), f"{v:g} {unit}") for v in ticks(x.low / gib, x.high / gib, 7)
        ),
        tuple(Tick(number(y(v)), seconds_text(v)) for v in ticks(y.low, y.high, 5)),
        "" if is_far else number(x(limit)),
        f"limit {bytes_text(limit)}" + (" →" if is_far else ""),
        tuple(_labels(candidates)),
    )


def _scales(placed: Sequence[tuple[float, float]], limit: int) -> tuple[Scale, Scale, bool]:
    """Return the axes of memory and of time, and whether the limit lies beyond the first."""
    most, least = max(held for _, held in placed), min(held for _, held in placed)
    is_far = limit > FAR * most
    high = most * 1.1 if is_far else min(max(limit, most) * 1.05, MOST_OF_LIMIT * limit)
    x = Scale(min(least, high) * 0.95, high, LEFT, WIDTH - RIGHT)
    quick, slow = min(step for step, _ in placed), max(step for step, _ in placed)
    pad = max(slow - quick, 0.02 * slow) * 0.12
    return x, Scale(quick - pad, slow + pad, HEIGHT - BOTTOM, TOP), is_far


def _labels(candidates: Sequence[Candidate]) -> list[Label]:
    """Return the labels, each beside its point if there is room."""
    points = [(float(each.x), float(each.y)) for each in candidates if each.x]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    found = []
    for each in candidates:
        if not each.x or not each.label:
            continue
        text = each.label
        if each.is_beyond and each.memory_bytes:
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
    """Return the Pareto front by memory: no pair is worse in a figure and no better in the other.

    >>> pareto_front([(3, 1), (1, 3), (2, 2), (2.5, 2.5), (1, 4)])
    [(3, 1), (2, 2), (1, 3)]
    """
    found: list[tuple[float, float]] = []
    for step, held in sorted(set(points), key=lambda each: (each[1], each[0])):
        if not found or step < found[-1][0]:
            found.append((step, held))
    return found
