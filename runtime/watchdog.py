"""The watchdog: ends a process that makes no progress, and says what it was doing.

In: what the process is about to do, told again and again. Out: nothing while it goes on;
after ``timeout_seconds`` without news a HangError with the last thing told and where the
main thread is, and the process ends with its exit code. A wait inside a collective cannot
be interrupted from Python, so ending the process is the only way out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from ..planner.errors import HangError


def show(error: HangError) -> None:
    """The default report: the error on stderr."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()


class Watchdog:
    """A thread that watches one process; a context manager, on while the block runs.

    ``name`` says who is watched (``"rank 1 of 4"``), ``report`` is given the error before the
    process ends.
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        name: str,
        report: Callable[[HangError], None] = show,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._name = name
        self._report = report
        self._end = end
        self._last = ("starting", time.monotonic())
        self._watched = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def progress(self, what: str) -> None:
        """What the process is about to do; it has then ``timeout_seconds`` to tell more."""
        self._last = (what, time.monotonic())

    def __enter__(self) -> Watchdog:
        self.progress("starting")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while True:
            what, since = self._last
            left = since + self.timeout_seconds - time.monotonic()
            if left <= 0:
                break
            if self._stopped.wait(min(left, 1.0)):
                return
        error = HangError(
            "AP802",
            f"{self._name} made no progress for {self.timeout_seconds:g} s",
            why=what,
            where=self._place(),
            fix="see which rank is late, and why; a longer --timeout if it was only slow",
        )
        self._report(error)
        self._end(HangError.exit_code)

    def _place(self) -> str:
        """Where the main thread is: ``file:line in function``."""
        frame = sys._current_frames().get(self._watched or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        if not stack:
            return ""
        return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
