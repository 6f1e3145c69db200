"""The watchdog: ends a process that makes no progress, and reports its last action.

In: each next action of the process, and the ranks it waits for. Out: nothing while there is
progress; after ``timeout_seconds`` without progress, or when another rank has failed, a HangError
with the current action, the line of the main thread and the rank that failed to come, and the
process ends with its exit code. A wait inside a collective cannot be interrupted from Python, so
ending the process is the only way out. A GPU runs behind its host: there the current action is the
GPU's, not the host's latest.

A SIGTERM is handled even while a message is waited for (``on_termination``). torchrun sends it to
all ranks when one of them has failed, a scheduler when the time is up. Python runs handlers in the
main thread alone, which may be in a collective that never returns; so another thread acts on it.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from ...planner.errors import HangError
from .failure_store import ANSWER_SECONDS, FailureReport, Ranks

if TYPE_CHECKING:
    from .device_queue import DeviceQueue, Event


POLL_SECONDS = 0.5
"""Time between two checks of the other ranks' failure reports."""
LAST_WORDS_SECONDS = 0.3
"""Time that the main thread gets to fail by itself after another rank has failed: its own error may
say more."""
MOST_AHEAD = 64
"""Largest number of actions that a host may queue ahead of its device: some ten micro-batches.

A host that fills a GPU's queue of launches is blocked inside of the driver, and may then hold the
interpreter's lock, without which no watchdog runs. ``Position.tell`` waits earlier, without the
lock.
"""
STARTING, BETWEEN_STEPS = "starting", "between steps"
"""Names of the actions of a process before its first step, and between two steps."""


@dataclass(frozen=True, slots=True)
class Doing:
    """An action that a process is about to start: its description, the ranks whose messages it
    waits for, and its time of start (of ``time.monotonic``)."""

    what: str
    waits_for: tuple[int, ...]
    since_seconds: float


class Position:
    """The action that a process is in: of the actions reported, the last that its device has
    reached. Each report records an event in the device's queue, reached when all earlier work is
    done. Events are reused."""

    def __init__(self) -> None:
        self._queue: DeviceQueue | None = None
        self._at = Doing(STARTING, (), time.monotonic())
        self._ahead: deque[tuple[Doing, Event]] = deque()
        self._spare: list[Event] = []
        self._lock = threading.Lock()

    def follow(self, queue: DeviceQueue) -> None:
        """Take the progress of the device of ``queue`` as the process's: an action begins when the
        device reaches it, not when the host queues it."""
        self._queue = queue if queue.runs_behind else None

    @property
    def is_behind(self) -> bool:
        """Tell whether the current action is determined by a device, which runs behind the host."""
        return self._queue is not None

    def tell(self, doing: Doing) -> None:
        """Record the action that the host starts next, or queues next on the device."""
        if self._queue is None:
            self._at = doing
            return
        self._advance()
        if len(self._ahead) >= MOST_AHEAD:
            self._ahead[0][1].synchronize()
            self._advance()
        event = self._queue.mark(self._spare.pop() if self._spare else None)
        self._ahead.append((doing, event))

    def now(self) -> Doing:
        """Return the current action of the process, with the time at which it was first seen."""
        self._advance()
        return self._at

    def _advance(self) -> None:
        with self._lock:  # of the host's thread and the watchdog's; nobody waits under it
            while self._ahead and self._ahead[0][1].query():
                doing, event = self._ahead.popleft()
                self._spare.append(event)
                self._at = replace(doing, since_seconds=time.monotonic())


def print_error(error: HangError) -> None:
    """Print an error on stderr."""
    print(error, file=sys.stderr, flush=True)


class Watchdog:
    """Thread that ends this process if it hangs; a context manager, active inside. ``name`` names
    the process (``"rank 1 of 4"``), ``report`` is called with the error before the process ends.
    ``ranks`` exchanges failure reports with the other ranks."""

    def __init__(
        self,
        timeout_seconds: float,
        *,
        name: str,
        ranks: Ranks | None = None,
        resting: Container[str] = (),
        report: Callable[[HangError], None] = print_error,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """Watch this process; ``resting`` actions, such as a script's own, may take any time."""
        self.timeout_seconds = timeout_seconds
        self.ranks = ranks
        self._name = name
        self._resting = resting
        self._report = report
        self._end = end
        self._position = Position()
        self._watched = threading.main_thread().ident
        self._stopped = threading.Event()
        self._giving_up = threading.Lock()
        self.before_ending: Callable[[], bool] | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def progress(self, what: str, waits_for: tuple[int, ...] = ()) -> None:
        """Record the next action; the process must report another within ``timeout_seconds``.
        ``waits_for`` are the ranks for whose messages the action waits."""
        self._position.tell(Doing(what, waits_for, time.monotonic()))

    def follow(self, queue: DeviceQueue) -> None:
        """Count an action as begun only when the device of ``queue`` has reached it."""
        self._position.follow(queue)

    @property
    def last(self) -> Doing:
        """The current action: the last reported or, if a device is followed, the last it has
        reached."""
        return self._position.now()

    def terminate(self) -> None:
        """End the process at a SIGTERM, after a report of its action and the reason. If
        ``before_ending()`` returns true, the process goes on, unless another rank has failed."""
        has_failure = self.ranks is not None and self.ranks.has_failure()
        if not has_failure and self.before_ending is not None and self.before_ending():
            return
        self._give_up("AP821", "is ended by its launcher (SIGTERM)")

    def __enter__(self) -> Watchdog:
        self.progress(STARTING)
        self._thread.start()
        atexit.register(self._finish)
        return self

    def __exit__(self, *_: object) -> None:
        atexit.unregister(self._finish)
        self._finish()

    def _finish(self) -> None:
        """Stop the watchdog's thread: a request to the store while the interpreter ends would abort
        the process."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * ANSWER_SECONDS)
        if self.ranks is not None:
            self.ranks.store.finish()

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
                return self._give_up("AP821", "stops because another rank has failed")

    def _left_seconds(self) -> float:
        """Return the seconds until the process counts as hanging if it makes no progress; infinity
        in an action that may take any time."""
        last = self.last
        if last.what in self._resting:
            return math.inf
        return last.since_seconds + self.timeout_seconds - time.monotonic()

    def _give_up(self, code: str, what: str) -> None:
        """Report the current action and missing ranks, and end the process; do so only once."""
        if not self._giving_up.acquire(blocking=False):
            return
        doing, place, where = self.last, *self._place()
        why = ", ".join(part for part in (doing.what, where) if part)
        if self.ranks is not None:
            report = FailureReport(self.ranks.rank, why, doing.waits_for)
            why += f"; {self.ranks.blame(report)}"
        error = HangError(
            code,
            f"{self._name} {what}",
            why=why,
            where=place,
            fix="check which rank is late, and why"
            + ("; raise --timeout if it was only slow" if code == "AP802" else ""),
        )
        if self._stopped.is_set():
            return
        self._report(error)
        self._end(HangError.exit_code)

    def _place(self) -> tuple[str, str]:
        """Return the main thread's position as two texts: ``file:line in function``, and its block
        and collective (empty if a device runs behind its host)."""
        frame = sys._current_frames().get(self._watched or 0)
        module = sys.modules.get(f"{__package__}.communicator")  # None without torch
        if module is None or self._position.is_behind:
            return place_of(frame), ""
        return place_of(frame), module.describe_stack(frame)


def place_of(frame: FrameType | None) -> str:
    """Return the place of a stack frame as ``file:line in function``; "" for None."""
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


END_SECONDS = 10.0
"""Time that a failed process has to print its error after it was told to end."""


@contextmanager
def on_termination(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` in another thread when SIGTERM comes while the ``with`` block runs.

    Does nothing in a program that handles SIGTERM itself (even later on), in the processes that it
    forks, and outside the main thread. After an error in the block, the process is about to print
    it and to end: from then on the signal ends it only ``END_SECONDS`` later.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    listening, told = os.pipe()
    os.set_blocking(told, False)

    def ours(number: int, frame: FrameType | None) -> None:
        """Do nothing: the listening thread has read the signal."""

    def listen() -> None:
        while number := os.read(listening, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is ours:
                act()
        os.close(listening)

    signal.signal(signal.SIGTERM, ours)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: _forget(ours))
    threading.Thread(target=listen, name="termination", daemon=True).start()
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        signal.set_wakeup_fd(before)
        if signal.getsignal(signal.SIGTERM) is ours:
            signal.signal(signal.SIGTERM, _end_later if has_failed else signal.SIG_DFL)
        os.close(told)


def _forget(handler: Callable[[int, FrameType | None], None]) -> None:
    """Restore the default handling of SIGTERM in a forked process, which has the ``handler`` but no
    thread that listens for the signal."""
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_later(number: int, frame: FrameType | None) -> None:
    end_soon(128 + number)


def end_soon(exit_code: int) -> None:
    """End this process in ``END_SECONDS``, if it has not ended by itself."""
    end = threading.Timer(END_SECONDS, os._exit, (exit_code,))
    end.daemon = True
    end.start()
