"""Second process that searches a part of the micro-batch sizes.

In: a search context, and functions of the context and of some sizes. Out: their results. The
process is forked from this one and keeps its tables between calls; results are small (pipelines and
bounds). If it cannot be started, or is lost, this process does its part.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.workers import Result, Sizes, Workers, parts_of

LATE_SECONDS = 5.0
"""Seconds after the time limit for which an answer is still awaited."""


class LostError(Exception):
    """Error of a search process that ended, failed, or was late; caught inside the search."""


@dataclass
class Beside:
    """Second process of a search, forked with a copy of its context; it runs a call at a time."""

    process: BaseProcess
    pipe: Connection

    @staticmethod
    def start(context: SearchContext) -> Beside | None:
        """Fork this process; return None if it cannot be forked."""
        if sys.platform != "linux":
            return None
        forks = multiprocessing.get_context("fork")
        own, theirs = forks.Pipe()
        process = forks.Process(target=_serve, args=(context, theirs, own), daemon=True)
        try:
            process.start()
        except (OSError, AssertionError):  # no more processes; daemons may have none
            return None
        finally:
            theirs.close()
        return Beside(process, own)

    def ask(self, function: Callable[..., Any], *args: object) -> None:
        """Send a call of ``function(context, *args)``. Raises ``LostError`` if the process
        ended."""
        try:
            self.pipe.send((function, args))
        except OSError as error:
            raise LostError from error

    def answer(self, context: SearchContext) -> Any:
        """Return the process's result; wait until ``LATE_SECONDS`` after the search's time limit.

        Raises ``LostError`` if no result comes.
        """
        with context.budget.timed("waiting"):
            try:
                if not self.pipe.poll(max(0.0, context.budget.left_seconds) + LATE_SECONDS):
                    raise LostError
                answer = self.pipe.recv()
            except (OSError, EOFError) as error:
                raise LostError from error
        if answer is None:
            raise LostError
        found, num_problems, num_steps = answer
        context.budget.num_problems += num_problems
        context.budget.num_steps += num_steps
        return found

    def end(self) -> None:
        """Kill the forked process."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(context: SearchContext, pipe: Connection, other: Connection) -> None:
    """Execute calls that arrive on ``pipe`` until it is closed. Ctrl-C is left to the parent
    process, and ``other`` is the parent's end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    other.close()
    with suppress(EOFError, OSError):  # the other end is closed, or its process gone
        while True:
            function, args = pipe.recv()
            num_problems, num_steps = context.budget.num_problems, context.budget.num_steps
            answer = None
            with suppress(AutoparallelError):
                found = function(context, *args)
                answer = (
                    found,
                    context.budget.num_problems - num_problems,
                    context.budget.num_steps - num_steps,
                )
            pipe.send(answer)


@dataclass
class SearchProcesses:
    """Workers of a search that divides the micro-batch sizes into ``parts``; the forked process
    ``beside``, if any, searches the last part, this process all others."""

    context: SearchContext
    parts: tuple[Sizes, ...]
    beside: Beside | None = None

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """Call ``function(context, sizes, *args)`` for each part of the micro-batch sizes and
        return the results; for the first part ``first(sizes)`` is called instead, if given."""
        *own, last = self.parts
        try:
            if self.beside is not None:
                self.beside.ask(function, last, *args)
        except LostError:
            self.end()
        found = [
            function(self.context, sizes, *args) if at or first is None else first(sizes)
            for at, sizes in enumerate(own if self.beside is not None else self.parts)
        ]
        try:
            if self.beside is not None:
                found.append(self.beside.answer(self.context))
        except LostError:
            self.end()
            found.append(function(self.context, last, *args))
        return found

    def end(self) -> None:
        """End the forked process; from now on this process searches the last part too."""
        if self.beside is not None:
            self.beside.end()
        self.beside = None


def two_processes(context: SearchContext, sizes: Sizes) -> Workers:
    """Return the workers for a search of ``sizes`` (micro-batch sizes): this and a forked process,
    or this one alone if forking fails or the sizes make only one part."""
    parts = parts_of(context, sizes)
    return SearchProcesses(context, parts, Beside.start(context) if len(parts) > 1 else None)
