"""Progress: bars on a terminal's stderr or in a notebook cell, elsewhere a line per phase.

Planning reports through one callback, ``observe(phase, done, total)``. The first call of a phase
starts it, ``done == total`` ends it, and ``total == 0`` means that the total is not known.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

CELL_SECONDS = 0.5
"""Minimum seconds between updates of the bars in a notebook cell, except at the end of a phase."""

TICK_SECONDS = 0.25

SILENT_SECONDS = 3.0
"""Seconds after which the name of a running phase is printed in logs."""

Observe = Callable[[str, float, float], None]


def ignore(phase: str, done: float, total: float) -> None:
    """Show nothing: the observer (callback for progress) for quiet use."""


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Observe]:
    """Yield an observer, a callback that shows the progress of phases until the block ends."""
    if quiet:
        yield ignore
    elif in_notebook():
        yield from _cell()
    elif sys.stderr.isatty():
        yield from _bars()
    else:
        yield from _lines()


@contextmanager
def shown_to_callers(wanted: bool = True) -> Iterator[Observe]:
    """Yield an observer for functions of the Python API: bars on a terminal, nothing in logs."""
    from autoparallel.options.environment import under_torchrun

    is_watched = in_notebook() or sys.stderr.isatty()
    with progress(quiet=not (wanted and is_watched) or under_torchrun()) as observe:
        yield observe


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook (Jupyter, VS Code, Colab)."""
    if "ipykernel" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


@contextmanager
def ticking(observe: Observe, phase: str, seconds: float) -> Iterator[None]:
    """Report the elapsed seconds of ``phase`` out of ``seconds`` while the block runs."""
    is_over = threading.Event()

    def tick() -> None:
        passed = 0.0
        while not is_over.wait(TICK_SECONDS):
            passed = min(passed + TICK_SECONDS, seconds - TICK_SECONDS)
            observe(phase, round(passed, 1), seconds)

    observe(phase, 0, seconds)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        observe(phase, seconds, seconds)


def _bars() -> Iterator[Observe]:
    from rich.console import Console

    with _progress(Console(stderr=True)) as shown:
        yield _observer(shown)


def _progress(console: Console | None = None) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _observer(shown: Progress) -> Observe:
    tasks: dict[str, TaskID] = {}

    def observe(phase: str, done: float, total: float) -> None:
        if phase not in tasks:
            tasks[phase] = shown.add_task(phase, total=total or None)
        shown.update(tasks[phase], completed=done, total=total or None)

    return observe


def _cell() -> Iterator[Observe]:
    """Yield an observer with bars in a notebook cell, replaced by one line at the end.

    The output is replaced through its display id, which needs no widgets: a saved notebook has only
    the last state, and no front end needs an extension.
    """
    from IPython.display import display

    shown, process = _progress(), os.getpid()
    update, told = _observer(shown), 0.0
    handle = display(shown, display_id=True)

    def observe(phase: str, done: float, total: float) -> None:
        nonlocal told
        if os.getpid() != process:
            return  # a forked search has no way to the front end
        update(phase, done, total)
        if time.perf_counter() - told > CELL_SECONDS or (total and done >= total):
            told = time.perf_counter()
            handle.update(shown)

    try:
        yield observe
    finally:
        handle.update(_Ended(shown))


class _Ended:
    """Line that replaces a progress bar in a notebook at its end: the seconds of each phase."""

    def __init__(self, shown: Progress) -> None:
        times = [(task.description, task.finished_time or task.elapsed) for task in shown.tasks]
        parts = [f"{phase} {seconds or 0:.1f} s" for phase, seconds in times]
        self._text = f"autoparallel: {', '.join(parts)}"

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f'<span style="opacity:.7">{self._text}</span>'


def _lines() -> Iterator[Observe]:
    started: dict[str, float] = {}
    ended: set[str] = set()
    told: dict[str, float] = {}
    is_over, process = threading.Event(), os.getpid()

    def end(phase: str) -> None:
        if phase not in ended:
            ended.add(phase)
            seconds = time.perf_counter() - started[phase]
            print(f"autoparallel: {phase} {seconds:.1f} s", file=sys.stderr, flush=True)

    def tell() -> None:
        """Print the running phase's name after ``SILENT_SECONDS``, then when its time doubles."""
        while not is_over.wait(TICK_SECONDS) and os.getpid() == process:
            for phase in list(started.keys() - ended):
                seconds = time.perf_counter() - started[phase]
                if seconds >= told.get(phase, SILENT_SECONDS):
                    told[phase] = 2 * seconds
                    text = f"autoparallel: {phase}: {seconds:.0f} s so far"
                    print(text, file=sys.stderr, flush=True)

    def observe(phase: str, done: float, total: float) -> None:
        for other in started:
            if other != phase:
                end(other)
        is_end = bool(total and done >= total)
        if phase not in started or (phase in ended and not is_end):
            started[phase] = time.perf_counter()
            told.pop(phase, None)
            ended.discard(phase)
        if is_end:
            end(phase)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield observe
    finally:
        is_over.set()
    for phase in started:
        end(phase)
