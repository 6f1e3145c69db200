"""Progress on stderr: bars on a terminal, one line per finished phase elsewhere.

Planning reports through one callback, ``observe(phase, done, total)``: a phase's first call
starts it, ``done == total`` ends it, and ``total == 0`` means that the end is not known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observe = Callable[[str, float, float], None]


def ignore(phase: str, done: float, total: float) -> None:
    """The observer that shows nothing."""


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Observe]:
    """An observer that shows phases on stderr until the block ends."""
    if quiet:
        yield ignore
    elif sys.stderr.isatty():
        yield from _bars()
    else:
        yield from _lines()


def _bars() -> Iterator[Observe]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = {}

        def observe(phase: str, done: float, total: float) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=total or None)
            shown.update(tasks[phase], completed=done, total=total or None)

        yield observe


def _lines() -> Iterator[Observe]:
    started: dict[str, float] = {}
    ended: set[str] = set()

    def end(phase: str) -> None:
        if phase not in ended:
            ended.add(phase)
            seconds = time.perf_counter() - started[phase]
            print(f"autoparallel: {phase} {seconds:.1f} s", file=sys.stderr, flush=True)

    def observe(phase: str, done: float, total: float) -> None:
        for other in started:
            if other != phase:
                end(other)
        started.setdefault(phase, time.perf_counter())
        if total and done >= total:
            end(phase)

    yield observe
    for phase in started:
        end(phase)
