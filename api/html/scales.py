"""Axes and coordinates of drawings: round ticks, and numbers as short text."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10


def number(value: float) -> str:
    """Write a coordinate with at most two digits after the point.

    >>> number(3.0), number(2.71828), number(-0.001)
    ('3', '2.72', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def round_step(span: float, most: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, at most ``most`` of which fit in ``span``.

    >>> round_step(3.2, 5), round_step(90, 5)
    (1.0, 20.0)
    """
    least = span / max(most, 1)
    power = 10.0 ** floor(log10(least))
    return next(power * each for each in (1.0, 2.0, 5.0, 10.0) if power * each >= least * 0.999999)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two ends.

    >>> ticks(0, 3.2), ticks(2.9, 3.5, 3)
    ([0.0, 1.0, 2.0, 3.0], [3.0, 3.2, 3.4])
    """
    if high <= low:
        return [low]
    step = round_step(high - low, most)
    first = ceil(low / step - 1e-9)
    return [round(each * step, 12) for each in range(first, floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return the powers of ten between two ends.

    >>> powers(0.5, 2000)
    [1.0, 10.0, 100.0, 1000.0]
    """
    return [10.0**each for each in range(ceil(log10(low)), floor(log10(high)) + 1)]


@dataclass(frozen=True, slots=True)
class Scale:
    """Map from values between ``low`` and ``high`` to coordinates between ``start`` and ``end``."""

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


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as part of an SVG path.

    >>> box(1, 2, 3, 4)
    'M1 2h3v4h-3z'
    """
    w = number(width)
    return f"M{number(x)} {number(y)}h{w}v{number(height)}h-{w}z"
