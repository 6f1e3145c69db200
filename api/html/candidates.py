"""Candidates by time and memory: rows of a table, and a picture with the Pareto front.

In: a plan and baselines. Out: every candidate with its place in the picture, and labels that
overlap no point and no other label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoparallel.baselines import Baseline
from autoparallel.html.charts import BOTTOM, FAR, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Tick
from autoparallel.html.scales import Scale, number, ticks
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.report.facts import merged_alternatives
from autoparallel.report.words import bytes_text, seconds_text

LETTER = 6.6
"""The width of a letter of a label."""

MOST_OF_LIMIT = 1.3
"""Candidates that need more memory than this times the limit are drawn at the edge."""


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
class Label:
    """A text and where it begins."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class CandidateChart:
    """Candidates by memory and time, those on the Pareto front joined."""

    candidates: tuple[Candidate, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit_x: str
    limit_text: str
    labels: tuple[Label, ...]


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
    most = max(held for _, held in placed)
    is_far = limit > FAR * most
    x_high = most * 1.1 if is_far else min(max(limit, most) * 1.05, MOST_OF_LIMIT * limit)
    x_low = min(held for _, held in placed) * 0.95
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    low, high = min(step for step, _ in placed), max(step for step, _ in placed)
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
        "" if is_far else number(x(limit)),
        f"limit {bytes_text(limit)}" + (" →" if is_far else ""), tuple(_labels(candidates)),
    )  # fmt: skip


def _labels(candidates: Sequence[Candidate]) -> list[Label]:
    """The names of the plan and of the baselines, each beside its point where nothing else is."""
    points = [(float(each.x), float(each.y)) for each in candidates if each.x]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    found = []
    for each in candidates:
        if not each.x or each.kind == "alternative":
            continue
        text = "plan" if each.kind == "plan" else each.name.partition(":")[0]
        if each.is_beyond and each.memory_bytes:
            text += f", {bytes_text(each.memory_bytes)} →"
        x, y, wide = float(each.x), float(each.y), LETTER * len(text)
        places = [
            (left, y + down - 12, left + wide, y + down)
            for down in (4, 18, -10, 32, -24, 46, -38)
            for left in (x + 10, x - 10 - wide)
            if left >= LEFT and left + wide <= WIDTH and TOP < y + down < HEIGHT - BOTTOM
        ]
        place = next((own for own in places if not any(_meet(own, it) for it in taken)), None)
        if place is not None:
            taken.append(place)
            found.append(Label(number(place[0]), number(place[3] - 2), text))
    return found


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


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
