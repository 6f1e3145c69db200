"""Results of commands go to stdout; all other output of a process goes to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

import typer

from autoparallel.cost_model.cluster.given_text import printable

_results: list[TextIO] = []
"""Stack of the real stdout while ``others_on_stderr`` redirects stdout; the last is used."""


@contextmanager
def others_on_stderr() -> Iterator[None]:
    """Send output of libraries and model files to stderr inside the context; results that ``say``
    prints still go to stdout."""
    stdout = sys.stdout
    if not _is_descriptor_1(stdout):  # replaced, as in notebooks and tests
        _results.append(stdout)
        with redirect_stdout(sys.stderr):
            try:
                yield
            finally:
                _results.pop()
        return
    stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors) as results:
        _results.append(results)
        os.dup2(2, 1)
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            _results.pop()
            results.flush()
            os.dup2(results.fileno(), 1)


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):  # it has no descriptor
        return False


def result_stream() -> TextIO:
    """Return the stream that results are written to: stdout, also while it is redirected."""
    return _results[-1] if _results else sys.stdout


def say(text: str, *, nl: bool = True) -> None:
    """Print a result on stdout, with a line break unless ``nl`` is False."""
    typer.echo(printable(text), file=result_stream(), nl=nl)


def schema_name(command: str) -> str:
    """Return the name of the schema of a command's JSON document (``agents.documents``). The
    version in it rises if a field is removed or changes its meaning."""
    return f"autoparallel.{command}/1"


def say_json(command: str, result: object) -> None:
    """Print a command's result on stdout, as a JSON document that names its schema."""
    say(json.dumps({"schema": schema_name(command), "result": result}, indent=2))
