"""The results as tables in Markdown, and the predicted against the measured steps as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from benchmarks.steps.run import kendall_tau

CHOICE = "the plan"
SIZE, MARGIN = 480, 60
COLORS = {
    "flat fast": "#1f77b4",
    "flat slow": "#d62728",
    "two islands": "#2ca02c",
    "one slow host": "#9467bd",
    "flat of 8": "#8c564b",
    "two islands of 4": "#e377c2",
}


@dataclass
class Row:
    """A configuration: what its plan says, what its steps took, and the busiest rank's compute."""

    cluster: str
    model: str
    configuration: str
    summary: str
    predicted_seconds: float
    seconds: list[float]
    busy_seconds: float

    @property
    def measured(self) -> float:
        """The median of the steps."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured - 1


@dataclass(frozen=True)
class Score:
    """How good the choice and the predictions are for one model on one cluster."""

    regret: float
    mean_error: float
    tau: float


def score(rows: Sequence[Row]) -> Score:
    """The choice over the best of all measured, the mean size of the errors, and Kendall's τ."""
    choice = next(row for row in rows if row.configuration == CHOICE)
    return Score(
        choice.measured / min(row.measured for row in rows) - 1,
        statistics.mean(abs(row.error) for row in rows),
        kendall_tau([(row.predicted_seconds, row.measured) for row in rows]),
    )


def tables(found: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Lines of Markdown: what was chosen for each model on each cluster, then all of the grid."""
    scores = {name: score(rows) for name, rows in found.items()}
    yield "| cluster | model | the plan | step | best of the grid | regret | mean error | τ |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, rows in found.items():
        own, best = scores[name], min(rows, key=lambda row: row.measured)
        choice = next(row for row in rows if row.configuration == CHOICE)
        yield (
            f"| {choice.cluster} | {choice.model} | {choice.summary} | {choice.measured:.3f} s"
            f" | {best.summary}, {best.measured:.3f} s | {own.regret:.1%} | {own.mean_error:.1%}"
            f" | {own.tau:.2f} |"
        )
    regrets = [own.regret for own in scores.values()]
    errors = [abs(row.error) for rows in found.values() for row in rows]
    yield ""
    yield (
        f"Over all: {len(errors)} configurations, mean error {statistics.mean(errors):.1%}, bias "
        f"{statistics.mean(row.error for rows in found.values() for row in rows):+.1%}; regret "
        f"{statistics.mean(regrets):.1%} in the mean, {max(regrets):.1%} at worst; τ "
        f"{statistics.mean(own.tau for own in scores.values()):.2f} in the mean, "
        f"{min(own.tau for own in scores.values()):.2f} at worst."
    )
    yield from ("", "| configuration | " + " | ".join(found) + " |")
    yield "|---|" + "---|" * len(found)
    names = dict.fromkeys(row.configuration for rows in found.values() for row in rows)
    for configuration in names:
        cells = [
            next(
                (
                    f"{r.measured:.2f} ({r.error:+.0%})"
                    for r in rows
                    if r.configuration == configuration
                ),
                "",
            )
            for rows in found.values()
        ]
        yield f"| `{configuration}` | " + " | ".join(cells) + " |"


def plot(found: Mapping[str, Sequence[Row]]) -> str:
    """An SVG: each configuration's predicted over its measured step, both logarithmic."""
    rows = [row for each in found.values() for row in each]
    values = [row.measured for row in rows] + [row.predicted_seconds for row in rows]
    low, high = log10(min(values)) - 0.05, log10(max(values)) + 0.05

    def at(seconds: float) -> float:
        return (log10(seconds) - low) / (high - low) * (SIZE - 2 * MARGIN) + MARGIN

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{SIZE}" height="{SIZE}" fill="white"/>',
        f'<line x1="{MARGIN}" y1="{SIZE - MARGIN}" x2="{SIZE - MARGIN}" y2="{MARGIN}"'
        ' stroke="#999"/>',
        f'<text x="{SIZE / 2}" y="{SIZE - 12}" text-anchor="middle">measured step, s</text>',
        f'<text x="16" y="{SIZE / 2}" text-anchor="middle"'
        f' transform="rotate(-90 16 {SIZE / 2})">predicted step, s</text>',
    ]
    for tick in (0.5, 1, 2, 5, 10):
        if low <= log10(tick) <= high:
            x, y = at(tick), SIZE - at(tick)
            lines += [
                f'<text x="{x:.1f}" y="{SIZE - MARGIN + 16}" text-anchor="middle">{tick:g}</text>',
                f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>',
            ]
    for row in rows:
        x, y = at(row.measured), SIZE - at(row.predicted_seconds)
        title = escape(f"{row.cluster}, {row.model}: {row.summary}")
        fill = "black" if row.configuration == CHOICE else "none"
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.6"'
            f' stroke="{COLORS[row.cluster]}" stroke-width="1.5"><title>{title}</title></circle>'
        )
    for number, (name, color) in enumerate(COLORS.items()):
        y = MARGIN + 16 * number
        lines.append(f'<text x="{MARGIN + 8}" y="{y}" fill="{color}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])
