"""A second process that searches a part of the micro-batch sizes.

In: a context, functions of it and of some sizes. Out: what they return. The process is forked from
this one and keeps its tables from one call to the next; what comes back is small (pipelines and
bounds). Where no process can be had, or it is lost, its part is done here.
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
"""How long after the time limit an answer is waited for."""


class LostError(Exception):
    """A process ended, failed, or did not answer in time; caught inside the search."""


@dataclass
class Beside:
    """A process with a copy of the context; one call at a time."""

    process: BaseProcess
    pipe: Connection

    @staticmethod
    def start(context: SearchContext) -> Beside | None:
        """Forks; None where that cannot be."""
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
        """Has ``function(context, *args)`` called. Raises ``LostError``."""
        try:
            self.pipe.send((function, args))
        except OSError as error:
            raise LostError from error

    def answer(self, context: SearchContext) -> Any:
        """Wait for the result until shortly after the time limit; ``context`` gets its seconds.

        Raises ``LostError``.
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
        """Ends the process, whatever it does."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(context: SearchContext, pipe: Connection, other: Connection) -> None:
    """Answers calls until the other end is closed; Ctrl-C is for the other end to act on."""
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
    """The parts of the micro-batch sizes, and the process that has the last of them, if any."""

    context: SearchContext
    parts: tuple[Sizes, ...]
    beside: Beside | None = None

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """``function(context, sizes, *args)`` of each part; of the first ``first(sizes)``."""
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
        """End the process; tasks that it has not answered are done here when they are asked for."""
        if self.beside is not None:
            self.beside.end()
        self.beside = None


def two_processes(context: SearchContext, sizes: Sizes) -> Workers:
    """This process and one that is forked from it; only this one where that cannot be, or where
    there is one part."""
    parts = parts_of(context, sizes)
    return SearchProcesses(context, parts, Beside.start(context) if len(parts) > 1 else None)
