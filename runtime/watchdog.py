"""The watchdog: ends a process that makes no progress, and says what it was doing.

In: what the process is about to do and whom it waits for, told again and again. Out:
nothing while it goes on; after ``timeout_seconds`` without news, or when another rank has
failed, a HangError with the last thing told, where the main thread is and which rank failed
to come, and the process ends with its exit code. A wait inside a collective cannot be
interrupted from Python, so ending the process is the only way out.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass
from types import TracebackType

from ..planner.errors import HangError
from .board import ANSWER_SECONDS, Note, Ranks

POLL_SECONDS = 0.5
"""How often the watchdog looks whether another rank has failed."""
LAST_WORDS_SECONDS = 0.3
"""How long the main thread then has to fail by itself: it may know more."""
STARTING, BETWEEN_STEPS = "starting", "between steps"
"""What is told before a first step, and after each."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a process is about to do, and the ranks whose message it waits for."""

    what: str
    waits_for: tuple[int, ...]
    since_seconds: float


def show(error: HangError) -> None:
    """The default report: the error on stderr."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()


class Watchdog:
    """A thread that watches one process; a context manager, on while the block runs.

    ``name`` says who is watched (``"rank 1 of 4"``), ``report`` is given the error before the
    process ends. ``ranks`` are the other processes that it works with.
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        name: str,
        ranks: Ranks | None = None,
        resting: Container[str] = (),
        report: Callable[[HangError], None] = show,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """``resting`` are things told that may take any time: what is not ours to judge."""
        self.timeout_seconds = timeout_seconds
        self.ranks = ranks
        self._name = name
        self._resting = resting
        self._report = report
        self._end = end
        self._last = Doing(STARTING, (), time.monotonic())
        self._watched = threading.main_thread().ident
        self._stopped = threading.Event()
        self._giving_up = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def progress(self, what: str, waits_for: tuple[int, ...] = ()) -> None:
        """What the process is about to do; it has then ``timeout_seconds`` to tell more.

        ``waits_for`` are the ranks whose message it waits for.
        """
        self._last = Doing(what, waits_for, time.monotonic())

    @property
    def last(self) -> Doing:
        """The last thing told."""
        return self._last

    def terminate(self) -> None:
        """Ends the process as its launcher wants it, and says what it was doing and why."""
        self._give_up("AP821", "is ended by its launcher (SIGTERM)")

    def __enter__(self) -> Watchdog:
        self.progress(STARTING)
        self._thread.start()
        atexit.register(self._finish)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        atexit.unregister(self._finish)
        self._finish()

    def _finish(self) -> None:
        """Ends the thread: one that asks the store when the interpreter ends aborts the process."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * ANSWER_SECONDS)
        if self.ranks is not None:
            self.ranks.board.finish()

    def _watch(self) -> None:
        while True:
            left = self._left_seconds()
            if left <= 0:
                return self._give_up("AP802", f"made no progress for {self.timeout_seconds:g} s")
            if self._stopped.wait(min(left, POLL_SECONDS)):
                return None
            if self.ranks is not None and self.ranks.has_failure():
                if self._stopped.wait(LAST_WORDS_SECONDS):
                    return None
                return self._give_up("AP821", "ends because another rank has failed")

    def _left_seconds(self) -> float:
        """Until it counts as hanging."""
        last = self._last
        if last.what in self._resting:
            return math.inf
        return last.since_seconds + self.timeout_seconds - time.monotonic()

    def _give_up(self, code: str, what: str) -> None:
        """Reports what the process was doing and who failed to come, and ends it; only once."""
        if not self._giving_up.acquire(blocking=False):
            return
        doing, place = self._last, self._place()
        why = doing.what
        if self.ranks is not None:
            why += f"; {self.ranks.blame(Note(self.ranks.rank, doing.what, doing.waits_for))}"
        error = HangError(
            code, f"{self._name} {what}", why=why, where=place,
            fix="see which rank is late, and why"
            + ("; a longer --timeout if it was only slow" if code == "AP802" else ""),
        )  # fmt: skip
        if self._stopped.is_set():
            return
        self._report(error)
        self._end(HangError.exit_code)

    def _place(self) -> str:
        """Where the main thread is: ``file:line in function``."""
        frame = sys._current_frames().get(self._watched or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        if not stack:
            return ""
        return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
