"""Frame of a page's charts: their size, and ticks on their axes."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 12, 34
FAR = 2.5
"""Limits above this multiple of the needed memory are not drawn."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Place on an axis."""

    at: str
    text: str
