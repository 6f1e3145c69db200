"""Terminal of commands: a console on stdout, written pages, next commands, settings of a target."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import typer
from rich.console import Console

from autoparallel.cost_model.cluster.detect import is_at_hand
from autoparallel.options.outputs import writing
from autoparallel.options.results import result_stream
from autoparallel.planner.plan import Plan
from autoparallel.report.printing import PlainConsole


def with_lora(settings: list[str] | None, lora: str | None) -> list[str]:
    """Return the ``name=value`` texts ``settings``, with ``lora=...`` added unless ``lora`` is
    None."""
    return [*(settings or ()), *([] if lora is None else [f"lora={lora}"])]


def stdout_console() -> Console:
    """Return a console on stdout: 80 columns without a terminal, 120 at most."""
    stream = result_stream()
    columns = shutil.get_terminal_size((80, 24)).columns if stream.isatty() else 80
    return PlainConsole(file=stream, width=max(60, min(columns, 120)), highlight=False)


def next_steps(plan: Plan, path: str) -> list[tuple[str, str]]:
    """Return commands that a user may run next on the plan in the file ``path``, each with its
    purpose; the last is most often the right command."""
    html, file = shlex.quote(Path(path).with_suffix(".html").name), shlex.quote(path)
    page = (f"autoparallel inspect {file} --html {html}", "the report as a page")
    if is_at_hand(plan.cluster):
        return [
            page,
            (f"autoparallel verify {file}", "compare with one device"),
            (f"autoparallel run {file}", "train and measure"),
        ]
    return [
        page,
        (f"autoparallel export {file} --to python -o script", "as a PyTorch script"),
        (f"autoparallel launch {file} --slurm", "start it there"),
    ]


def write_html(text: str, path: str) -> None:
    """Write a page, and report its path on stderr. Raises UsageError AP101 if that fails."""
    with writing(path, "--html"):
        Path(path).write_text(text, encoding="utf-8")
    typer.echo(f"written to {path}; open it in a browser", err=True)
