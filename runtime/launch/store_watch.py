"""Ends a host's agent when the store of all hosts answers no more.

A connection whose other end is out of reach stays open, and torch's store then waits for an answer
for as long as the system sends again: a quarter of an hour. Nothing interrupts that wait, so a
thread counts the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.5


class StoreWatch:
    """Calls ``give_up`` in a thread of its own when a question stays open for ``lost_seconds``.

    A context manager, on while inside. Questions are asked inside of ``asking``.
    """

    def __init__(self, lost_seconds: float, give_up: Callable[[], None]) -> None:
        self._most_polls = lost_seconds / POLL_SECONDS
        self._give_up = give_up
        self._open: dict[object, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="store watch", daemon=True)

    def __enter__(self) -> StoreWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside, an answer of the store is waited for."""
        question = object()
        with self._lock:
            self._open[question] = 0
        try:
            yield
        finally:
            with self._lock:
                del self._open[question]

    def _watch(self) -> None:
        """Counts how often it finds a question open, not the time, in which this process may have
        been stopped."""
        while not self._stopped.wait(POLL_SECONDS):
            with self._lock:
                for question in self._open:
                    self._open[question] += 1
                is_lost = max(self._open.values(), default=0) > self._most_polls
            if is_lost:
                self._give_up()
                return
