"""The watchdog of a user's own script under torchrun: what ``launch`` gives to our entries.

In: the environment and a timeout. Out: a worker, whose ``watchdog.progress`` the trainer tells
what it is about to do. While a step is under way a rank has the timeout to go on; between
steps the script may take any time. When a rank hangs, dies or fails, every other one ends: it
says which action, stage and micro-batch it was at and which rank failed to come.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from types import TracebackType

from ..messages.termination import LAST_WORDS_SECONDS, on_termination
from ..messages.watchdog import BETWEEN_STEPS, STARTING
from .process import Worker, current_worker, describe, lost_rank
from .script_advice import advice_for

TIMEOUT_SECONDS = 600.0
"""How long a rank may make no progress in a step, unless the script says so."""
_OF_JOB = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


def watch_script(environment: Mapping[str, str], timeout_seconds: float | None = None) -> Worker:
    """This process as a worker, watched from the first call to its end.

    ``timeout_seconds`` replaces the one of an earlier call; None leaves it.
    """
    worker = _watched(tuple((n, environment[n]) for n in _OF_JOB if n in environment))
    if timeout_seconds is not None:
        worker.watchdog.timeout_seconds = timeout_seconds
    return worker


@cache
def _watched(job: tuple[tuple[str, str], ...]) -> Worker:
    resting = frozenset((STARTING, BETWEEN_STEPS))
    stderr = sys.stderr

    def say(error: Exception) -> None:
        """Where stderr is now: while torch's own hook runs, ``sys.stderr`` is a buffer of it,
        which is lost when another thread ends the process."""
        stderr.write(f"{error}\n")
        stderr.flush()

    worker = current_worker(dict(job), TIMEOUT_SECONDS, resting=resting, report=say)
    _KEPT.enter_context(worker.watchdog)
    _KEPT.enter_context(on_termination(worker.watchdog.terminate))
    _say_at_errors(worker, say)
    return worker


_KEPT = ExitStack()
"""Entered until the process ends."""


def _say_at_errors(worker: Worker, say: Callable[[Exception], None]) -> None:
    """An error that ends the script is told to the other ranks.

    Where it only says that another rank is gone, what this one waited for is shown after it.
    Then nothing may wait for that rank at exit, so the process ends soon.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not isinstance(error, Exception):
            return
        advice = advice_for(error)
        if advice is not None:
            say(advice)
        ours = lost_rank(describe(error, worker.rank, worker.world_size), worker)
        if ours.code == "AP820":
            # first the words: the launcher's SIGTERM may come at any moment
            say(ours)
            worker.watchdog.__exit__(kind, error, trace)
            end = threading.Timer(LAST_WORDS_SECONDS, os._exit, (ours.exit_code,))
            end.daemon = True
            end.start()

    sys.excepthook = hook
