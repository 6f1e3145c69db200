"""The terminal of commands: a console on stdout, JSON, and settings of a target."""

from __future__ import annotations

import json
import shutil
import sys

import typer
from rich.console import Console


def with_lora(settings: list[str] | None, lora: str | None) -> list[str]:
    """The settings with ``--lora``, which is one: a plan carries it like the others."""
    return [*(settings or ()), *([] if lora is None else [f"lora={lora}"])]


def stdout_console() -> Console:
    """A console on stdout: 80 columns where there is no terminal, 120 at most."""
    columns = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    return Console(width=max(60, min(columns, 120)), highlight=False)


def print_json(value: object) -> None:
    """``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))
