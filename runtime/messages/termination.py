"""A SIGTERM from whoever started this process, heard even while a message is waited for.

In: what to do when it comes. Out: nothing while it does not. torchrun ends all ranks so when one
of them has failed, a scheduler when the time is up. Python runs handlers in the main thread
alone, which may sit in a collective and never return; so a thread of its own hears of it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LAST_WORDS_SECONDS = 10.0
"""How long a process that has failed may take to say so, from when it is told to end."""


@contextmanager
def on_termination(act: Callable[[], None]) -> Iterator[None]:
    """Calls ``act`` in another thread when SIGTERM comes while the block runs.

    Leaves a program alone that handles SIGTERM itself, also from later on, and the processes
    that it forks; does nothing outside the main thread. After an error in the block the process
    is about to say so and to end: from then on the signal ends it only ``LAST_WORDS_SECONDS``
    later.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    listening, told = os.pipe()
    os.set_blocking(told, False)

    def ours(number: int, frame: FrameType | None) -> None:
        """Nothing: the thread that listens has heard of it."""

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
    """In a forked process, which shares the pipe but has no thread that listens."""
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_later(number: int, frame: FrameType | None) -> None:
    end = threading.Timer(LAST_WORDS_SECONDS, os._exit, (128 + number,))
    end.daemon = True
    end.start()
