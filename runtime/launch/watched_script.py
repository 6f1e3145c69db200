"""Watchdog of a user's own script under torchrun, like the watchdog of a launched worker.

In: the environment and a timeout. Out: a worker; the trainer reports each next action to
``watchdog.progress``. During a step a rank must make progress within the timeout; between steps the
script may take any time. When a rank hangs, dies or fails, every other rank ends and prints its
action, stage and micro-batch, and the rank that failed to come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from types import TracebackType

from ...planner.errors import UsageError
from ..messages.watchdog import BETWEEN_STEPS, STARTING, end_soon, on_termination
from .process import Worker, current_worker, describe, lost_rank

TIMEOUT_SECONDS = 600.0
"""Time without progress in a step after which a rank counts as hanging, by default."""
_OF_JOB = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def watch_script(environment: Mapping[str, str], timeout_seconds: float | None = None) -> Worker:
    """Return a ``Worker`` for this process, which torchrun has started. Its watchdog is active
    until the process ends. ``timeout_seconds`` is the longest time without progress in a step; None
    keeps the timeout of an earlier call."""
    worker = _watched(tuple((n, environment[n]) for n in _OF_JOB if n in environment))
    if timeout_seconds is not None:
        worker.watchdog.timeout_seconds = timeout_seconds
    return worker


@cache
def _watched(job: tuple[tuple[str, str], ...]) -> Worker:
    resting = frozenset((STARTING, BETWEEN_STEPS))
    stderr = sys.stderr

    def say(error: Exception) -> None:
        """Write ``error`` to the stderr saved earlier: while torch's own hook runs, ``sys.stderr``
        is a buffer, which is lost when another thread ends the process."""
        print(error, file=stderr, flush=True)

    worker = current_worker(dict(job), TIMEOUT_SECONDS, resting=resting, report=say)
    _KEPT.enter_context(worker.watchdog)
    _KEPT.enter_context(on_termination(worker.watchdog.terminate))
    _say_at_errors(worker, say)
    return worker


_KEPT = ExitStack()
"""Context managers that stay open until the process ends."""


def _say_at_errors(worker: Worker, say: Callable[[Exception], None]) -> None:
    """Install an exception hook that reports an uncaught error of the script to the other ranks. If
    the error is only a lost connection to another rank, the hook also prints by ``say`` in which
    action this rank waited, and soon ends the process, whose cleanup at exit could wait for the
    lost rank."""
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
            # print first: the launcher's SIGTERM may come at any moment
            say(ours)
            worker.watchdog.__exit__(kind, error, trace)
            end_soon(ours.exit_code)

    sys.excepthook = hook


_PAGE = "docs/scripts.md has these lines for averages, penalties, norms and other optimizers"
_WHOLE = (
    "autoparallel.whole(tensor) gives the whole of it, on every rank; methods beside forward are "
    f"named to parallelize: methods=[...]; {_PAGE}"
)
_ADVICE = (
    ("mixed torch.Tensor and DTensor", "a plain tensor meets a weight that is spread", _WHOLE),
    ("reshape sharded dimension", "a weight that is spread cannot be given this shape", _WHOLE),
    ("Sharding propagation failed", "this op has no form for weights that are spread", _WHOLE),
    ("sharding strategy registered", "this op has no form for weights that are spread", _WHOLE),
    ("in-place operations", "this op cannot write to a weight that is spread", _WHOLE),
)


def advice_for(error: BaseException) -> UsageError | None:
    """Return UsageError AP944, with advice, for an error that torch raises for an operation on
    sharded tensors; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError | NotImplementedError | TypeError):
        return None
    for sign, what, fix in _ADVICE:
        if sign in text:
            why = text.strip().splitlines()[0][:200]
            return UsageError("AP944", what, why=f"torch: {why}", fix=fix)
    return None
