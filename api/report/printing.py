"""Printing of reports: tables without grid lines, titled sections, bars, and output to a string."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autoparallel.cost_model.cluster.given_text import printable
from autoparallel.options.words import percent_text

WIDTH = 80
INDENT = 2
BAR_WIDTH = 28


class PlainConsole(Console):
    """A console that escapes control characters in what it prints, except its own."""

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        """Yield the segments of a renderable, with printable texts."""
        for own in super().render(*args, **options):
            yield own if own.control else Segment(printable(own.text), own.style)


def print_to_text(prints: Callable[[Console], None]) -> str:
    """Return the text that ``prints`` prints in 80 columns, in notebooks too."""
    stream = io.StringIO()
    console = PlainConsole(
        file=stream, width=WIDTH, color_system=None, legacy_windows=False, force_jupyter=False
    )
    prints(console)
    return stream.getvalue()


def plain_table(*columns: tuple[str, str], show_header: bool = True) -> Table:
    """Make a table without grid lines; a column is a title and "left" or "right"."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, show_header=show_header
    )
    for title, side in columns:
        table.add_column(title, justify="right" if side == "right" else "left", overflow="fold")
    return table


def list_table(*sides: str) -> Table:
    """Make a table without grid lines and titles; a column is "left" or "right"."""
    return plain_table(*(("", side) for side in sides), show_header=False)


def section(title: str, body: RenderableType) -> RenderableType:
    """Return a title with its indented body below, after an empty line."""
    return Group(
        Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, INDENT), expand=False)
    )


def lines_text(lines: list[str]) -> RenderableType:
    """Return lines for printing; each is wrapped by itself."""
    return Group(*map(Text, lines))


def bars(
    values: Mapping[str, float], text: Callable[[float], str], styles: Mapping[str, str]
) -> RenderableType:
    """Return a row per value: its name, its text, its share of the total, and a bar."""
    total = sum(values.values()) or 1.0
    table = list_table("left", "right", "right", "left")
    for name, value in values.items():
        share = value / total
        table.add_row(name, text(value), percent_text(share), bar(share, styles.get(name, "")))
    return table


def bar(fraction: float, style: str) -> Text:
    """Draw a bar in eighths of a character, at least one eighth for a positive value."""
    eighths = max(round(fraction * BAR_WIDTH * 8), 1 if fraction > 0 else 0)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style=style)
