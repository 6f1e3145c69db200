"""Reports as text: what would be printed, in a string."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

WIDTH = 80


def printed(prints: Callable[[Console], None]) -> str:
    """What is printed, as plain text, 80 columns wide; the same in a notebook's kernel."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=WIDTH, color_system=None, legacy_windows=False, force_jupyter=False
    )
    prints(console)
    return stream.getvalue()
