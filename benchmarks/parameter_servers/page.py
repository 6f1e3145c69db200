"""The results as tables in Markdown, and losses against time as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log10

TARGET_LOSS = 1.2
CHOOSING_SEED = 9
"""On which rates are tried; the tables leave it out."""
COLORS = {"bsp": "#1f77b4", "ssp(2)": "#2ca02c", "ssp(5)": "#ff7f0e", "asp": "#d62728"}
WIDTH, HEIGHT, MARGIN = 480, 360, 50


@dataclass
class Throughput:
    """Iterations per second of all workers together, and when each worker ended each one."""

    mbit: int
    roles: str
    consistency: str
    predicted: float
    measured: float
    times: list[list[float]]

    @property
    def error(self) -> float:
        """By how much the measured rate differs from the predicted one."""
        return self.measured / self.predicted - 1

    def line(self) -> str:
        counts = [len(each) for each in self.times]
        return (
            f"{self.mbit} {self.roles} {self.consistency}: predicted {self.predicted:.3f}"
            f" measured {self.measured:.3f} ({self.error:+.1%}) {counts}"
        )


@dataclass
class Run:
    """One training: iterations of each worker, and the held-out loss at times in seconds."""

    kind: str
    consistency: str
    rate: float
    seed: int
    iterations: list[int]
    curve: list[Sequence[float]]

    def seconds_to(self, loss: float) -> float:
        """When the loss was first no more than ``loss``; infinite where it never was."""
        return next((time for time, value in self.curve if value <= loss), float("inf"))

    @property
    def final(self) -> float:
        """The median loss of the last tenth of the run."""
        return statistics.median(loss for _, loss in self.curve[-max(1, len(self.curve) // 10) :])

    def line(self) -> str:
        return (
            f"{self.kind} {self.consistency} rate {self.rate} seed {self.seed}: {self.iterations}"
            f" {self.seconds_to(TARGET_LOSS):.2f} s to {TARGET_LOSS}, then {self.final:.3f}"
        )


def best_rates(runs: Sequence[Run]) -> dict[str, float]:
    """For each consistency the rate that got to the target loss first, or else lowest."""
    best: dict[str, Run] = {}
    for run in runs:
        held = best.get(run.consistency)
        if held is None or _order(run) < _order(held):
            best[run.consistency] = run
    return {name: run.rate for name, run in best.items()}


def _order(run: Run) -> tuple[float, float]:
    return (run.seconds_to(TARGET_LOSS), run.final)


def tables(throughput: Sequence[Throughput], runs: Sequence[Run]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| link | ranks | consistency | simulated | emulated | error |"
    yield "|---|---|---|---|---|---|"
    for row in throughput:
        yield (
            f"| {row.mbit} Mbit/s | {row.roles} | {row.consistency} | {row.predicted:.3f} |"
            f" {row.measured:.3f} | {row.error:+.1%} |"
        )
    errors = [abs(row.error) for row in throughput]
    if errors:
        within = sum(error <= 0.05 for error in errors)
        yield ""
        yield (
            f"Iterations per second of all workers together. Mean error "
            f"{statistics.mean(errors):.1%}, {max(errors):.1%} at most; {within} of "
            f"{len(errors)} are within 5 %."
        )
    yield ""
    yield (
        "| workers | consistency | learning rate | iterations of each worker |"
        f" loss {TARGET_LOSS} after | range | loss at the end |"
    )
    yield "|---|---|---|---|---|---|---|"
    for kind, name, same in _groups(runs):
        reached = sorted(run.seconds_to(TARGET_LOSS) for run in same)
        of_workers = zip(*(run.iterations for run in same), strict=True)
        counts = [round(statistics.median(each)) for each in of_workers]
        yield (
            f"| {kind} | {name} | {same[0].rate:g} | {', '.join(map(str, counts))} |"
            f" {_seconds(statistics.median(reached))} | {_seconds(reached[0])} to"
            f" {_seconds(reached[-1])} | {statistics.median(run.final for run in same):.3f} |"
        )


def _seconds(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.1f} s"


def _groups(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Run]]]:
    """The runs of the seeds that are reported, by kind and consistency."""
    kept = [run for run in runs if run.seed != CHOOSING_SEED]
    for kind, name in dict.fromkeys((run.kind, run.consistency) for run in kept):
        yield kind, name, [r for r in kept if (r.kind, r.consistency) == (kind, name)]


def plot(runs: Sequence[Run]) -> str:
    """An SVG: a panel for each kind of slowness, the loss (logarithmic) against time."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    kept = [run for run in runs if run.seed != CHOOSING_SEED]
    losses = [loss for run in kept for _, loss in run.curve] or [1.0]
    low, high = log10(min(losses)) - 0.02, log10(min(max(losses), 3.0)) + 0.02
    last = max((run.curve[-1][0] for run in kept), default=1.0)
    whole = WIDTH * max(1, len(kinds))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{whole}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, kind in enumerate(kinds):
        left = number * WIDTH + MARGIN

        def place(time: float, loss: float, left: int = left) -> tuple[float, float]:
            share = (log10(max(loss, 1e-9)) - low) / (high - low)
            return (
                left + time / last * (WIDTH - 2 * MARGIN),
                HEIGHT - MARGIN - min(1.0, share) * (HEIGHT - 2 * MARGIN),
            )

        lines += _axes(kind, left, last, place, (low, high))
        for run in kept:
            if run.kind == kind:
                path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in run.curve)
                lines.append(
                    f'<polyline points="{path}" fill="none" stroke="{COLORS[run.consistency]}"'
                    f' stroke-width="1.2"><title>{run.consistency}, seed {run.seed}</title>'
                    "</polyline>"
                )
    return "\n".join([*lines, "</svg>", ""])


def _axes(
    kind: str,
    left: int,
    last: float,
    place: Callable[[float, float], tuple[float, float]],
    span: tuple[float, float],
) -> list[str]:
    """A panel's frame, ticks, names and the target."""
    right, bottom = left + WIDTH - 2 * MARGIN, HEIGHT - MARGIN
    lines = [
        f'<path d="M{left} {MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>',
        f'<text x="{left}" y="{MARGIN - 16}">held-out loss, workers: {kind}</text>',
        f'<text x="{(left + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">seconds</text>',
    ]
    for second in range(0, int(last) + 1, 2):
        lines.append(
            f'<text x="{place(second, 1)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{second}</text>"
        )
    for loss in (0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0):
        if span[0] <= log10(loss) <= span[1]:
            y = place(0, loss)[1]
            lines.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>')
    y = place(0, TARGET_LOSS)[1]
    lines.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#999" stroke-dasharray="4 4"/>')
    for row, (name, color) in enumerate(COLORS.items()):
        lines.append(f'<text x="{right - 40}" y="{MARGIN + 16 * row}" fill="{color}">{name}</text>')
    return lines
