"""Tiles of any size, as no small model has values that are worth cutting."""

from __future__ import annotations

from collections.abc import Callable

from autoparallel.planner.kernels import tiles

LIMITS = {"LEAST_TOKENS": 1, "LEAST_BYTES": 1, "LEAST_RATIO": 0}


def cut_all(change: Callable[[object, str, int], None] = setattr) -> None:
    """Have tiles of any size; ``change`` sets a module's attribute."""
    for name, limit in LIMITS.items():
        change(tiles, name, limit)
