"""The terminal of commands: a console on stdout, written pages, settings of a target."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer
from rich.console import Console

from autoparallel.options.outputs import writing
from autoparallel.options.results import result_stream


def with_lora(settings: list[str] | None, lora: str | None) -> list[str]:
    """The settings with ``--lora``, which is one: a plan carries it like the others."""
    return [*(settings or ()), *([] if lora is None else [f"lora={lora}"])]


def stdout_console() -> Console:
    """A console on stdout: 80 columns where there is no terminal, 120 at most."""
    stream = result_stream()
    columns = shutil.get_terminal_size((80, 24)).columns if stream.isatty() else 80
    return Console(file=stream, width=max(60, min(columns, 120)), highlight=False)


def write_html(text: str, path: str) -> None:
    """Write a page, and say so on stderr. Raises UsageError AP101."""
    with writing(path, "--html"):
        Path(path).write_text(text, encoding="utf-8")
    typer.echo(f"written to {path}; open it in a browser", err=True)
