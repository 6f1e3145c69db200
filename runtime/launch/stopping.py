"""Ending a run early and in order: all ranks agree after which step.

In: a SIGTERM, of a scheduler that wants its machines back, to any rank. Out: on every rank the same
answer, after each step, to whether this was the last. The answer is a sum over all ranks. Where
hosts run ahead of their devices it is begun after one step and read after the next, so that no
host waits for the others' devices.

A second SIGTERM ends the process at once, as does one after another rank has failed: torchrun then
sends it to all that are left.
"""

from __future__ import annotations

import time
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from ..messages.shared_objects import group_for
from ..messages.termination import on_termination
from ..messages.watchdog import Watchdog

SAME_SECONDS = 2.0
"""Signals that come together are one: a scheduler sends them to every process of a job, and
torchrun to its ranks."""


class Stop:
    """A context manager around the steps of a run: until it ends, SIGTERM asks for ``is_agreed``.

    Two words of this process' SIGTERM: ``ask`` is called by a thread, ``is_agreed`` by the main
    thread of every rank after each step.
    """

    def __init__(self, watchdog: Watchdog, *, is_behind: bool) -> None:
        """``is_behind``: hosts run ahead of their devices."""
        self._watchdog, self._is_behind = watchdog, is_behind
        self._asked_seconds: float | None = None
        self._vote: tuple[Tensor, dist.Work | None] | None = None
        self._termination = on_termination(watchdog.terminate)

    def __enter__(self) -> Stop:
        self._watchdog.before_ending = self.ask
        self._termination.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watchdog.before_ending = None
        self._termination.__exit__(kind, error, trace)

    def ask(self) -> bool:
        """At a SIGTERM: whether the run goes on to the end of its step."""
        now = time.monotonic()
        if self._asked_seconds is None:
            self._asked_seconds = now
        return now - self._asked_seconds < SAME_SECONDS

    def is_agreed(self) -> bool:
        """Whether the run ends here, after a step. Collective over all ranks."""
        mine = torch.tensor(int(self._asked_seconds is not None))
        if not dist.is_initialized():
            return bool(mine)
        work = dist.all_reduce(mine, group=group_for(mine), async_op=True)
        before, self._vote = self._vote, (mine, work)
        if not self._is_behind:
            before, self._vote = self._vote, None
        if before is None:
            return False
        if before[1] is not None:
            before[1].wait()
        return bool(before[0])
