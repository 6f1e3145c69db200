"""Progress of measuring on stderr: a bar with the time left, or a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

LINE_SECONDS = 10.0


@dataclass
class Shown:
    """Progress display of measuring. ``expect`` announces a number of measurements; ``advance``
    counts a finished measurement."""

    budget_seconds: float
    bar: Progress | None = None
    task: TaskID | None = None
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.perf_counter)
    told: float = field(default_factory=time.perf_counter)
    quiet: bool = False

    def expect(self, count: int) -> None:
        self.total = self.done + count
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, total=self.total)

    def advance(self, what: str) -> None:
        self.done += 1
        if self.bar is not None and self.task is not None:
            left = f"{self.left_seconds:.0f} s left"
            self.bar.update(self.task, completed=self.done, description=what, left=left)
        elif not self.quiet and time.perf_counter() - self.told > LINE_SECONDS:
            self.told = time.perf_counter()
            print(
                f"autoparallel: measured {self.done} of {self.total},"
                f" {self.left_seconds:.0f} s left at most",
                file=sys.stderr,
                flush=True,
            )

    @property
    def left_seconds(self) -> float:
        """Expected seconds until all measurements are done, at the pace so far."""
        spent = time.perf_counter() - self.began
        pace = spent / max(self.done, 1) * (self.total - self.done)
        return max(0.0, min(self.budget_seconds - spent, pace))


@contextmanager
def shown_progress(budget_seconds: float, *, quiet: bool = False) -> Iterator[Shown]:
    """Show progress on stderr until the block ends; ``quiet`` if another process shows it."""
    if quiet or not sys.stderr.isatty():
        yield Shown(budget_seconds, quiet=quiet)
        return

    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("asking the search", total=None, left="")
        yield Shown(budget_seconds, bar, task)
