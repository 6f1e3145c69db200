"""Printing of reports: tables without lines, and text in a string."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

WIDTH = 80


def print_to_text(prints: Callable[[Console], None]) -> str:
    """Return printed text as plain text, 80 columns wide; the same in a notebook's kernel."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=WIDTH, color_system=None, legacy_windows=False, force_jupyter=False
    )
    prints(console)
    return stream.getvalue()


def plain_table(*columns: tuple[str, str]) -> Table:
    """Make a table without lines; a column is its title and ``left`` or ``right``."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title, side in columns:
        table.add_column(title, justify="right" if side == "right" else "left", overflow="fold")
    return table
