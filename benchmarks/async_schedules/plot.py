"""Curves as an SVG, without any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 56, 150, 24, 44
SMOOTH = 5
COLORS = ("#d62728", "#ff7f0e", "#8c564b", "#1f77b4", "#17becf", "#2ca02c")


class Curve(NamedTuple):
    """``runs`` are of different seeds: their mean is a line, what lies between them is shaded."""

    name: str
    runs: list[list[float]]
    is_dashed: bool


def smoothed(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """Means of the last ``width`` values, of fewer at the beginning.

    >>> smoothed([2.0, 4.0, 6.0], 2)
    [2.0, 3.0, 5.0]
    """
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))
    ]


def _band(runs: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """The least, the mean and the greatest of the smoothed runs."""
    columns = list(zip(*map(smoothed, runs), strict=True))
    means = [sum(column) / len(column) for column in columns]
    return [min(c) for c in columns], means, [max(c) for c in columns]


def draw(curves: Sequence[Curve], *, rows: int) -> str:
    """Loss in nats by rows seen, ``rows`` between points; dashed where a curve says so."""
    bands = [_band(curve.runs) for curve in curves]
    low = min(min(lowest) for lowest, _, _ in bands)
    high, most = max(max(top) for *_, top in bands), max(len(line) for line, *_ in bands)

    def x(index: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * index / max(1, most - 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / ((high - low) or 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(5):
        value, index = low + (high - low) * tick / 4, (most - 1) * tick / 4
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
        parts.append(
            f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{round((index + 1) * rows)}</text>"
        )

    def points(line: Sequence[float]) -> list[str]:
        return [f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(line)]

    for number, (lowest, _, top) in enumerate(bands):
        area = " ".join([*points(lowest), *reversed(points(top))])
        color = COLORS[number % len(COLORS)]
        parts.append(f'<polygon points="{area}" fill="{color}" fill-opacity="0.18"/>')
    for number, (curve, (_, line, _)) in enumerate(zip(curves, bands, strict=True)):
        dash = ' stroke-dasharray="5 3"' if curve.is_dashed else ""
        style = f'stroke="{COLORS[number % len(COLORS)]}" stroke-width="1.5"{dash}'
        parts.append(f'<polyline points="{" ".join(points(line))}" fill="none" {style}/>')
        at = TOP + 10 + 20 * number
        parts.append(f'<path d="M{WIDTH - RIGHT + 10} {at}h24" {style}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{at + 4}">{curve.name}</text>')
    middle = (LEFT + WIDTH - RIGHT) // 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">rows seen</text>')
    words = f"mean of {SMOOTH * rows} rows and of all seeds; shaded: from the least to the greatest"
    parts.append(
        f'<text x="{LEFT}" y="{TOP - 10}">training loss in nats per byte, {words}</text></svg>\n'
    )
    return "\n".join(parts)
