"""Detection of a straggler, a rank that the others wait for, while training goes on.

In: the share of the time in which each rank works and does not wait for others, sampled, and the
share that the plan predicts. Out: the slow rank, if a rank works much longer than its peers.

A slow rank waits for nobody and everybody waits for it, under any plan: at each all-reduce under
data parallelism, at each gather under ZeRO 3, at each message of a pipeline. So the time not spent
waiting tells the rank apart, unlike the time of a forward or backward, which contains waits for
others. Samples are of the host, which on a GPU runs ahead of the device: there they say nothing,
and nothing is sampled.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from types import CodeType, FrameType

from torch import _ops
from torch.distributed import _functional_collectives, distributed_c10d

SAMPLE_SECONDS = 0.02
"""Time between two samples; a sample stops the main thread for about 10 µs."""
WINDOW_SECONDS, WINDOW_STEPS = 4.0, 10
"""Least time and least number of steps over which ranks are compared. On two busy cores the shares
of four equal ranks differ by up to 0.12 over 2 seconds, and in a single step by any amount."""
CHECK_STEPS, FIRST_STEP = 5, 3
"""Number of steps between two looks at the time, and number of first steps that are not compared:
they make buffers, connections and the optimizer's state."""
PEER_RATIO, PLANNED_RATIO = 1.4, 2.0
"""Least ratio of a slow rank's work to the median of the ranks of its stage, and of ranks of other
stages; the latter is relative to the plan's predictions, which err by tens of percent."""
LEAST_DIFFERENCE = 0.15
"""Least difference between the shares of time that a slow rank and the median rank work."""
WINDOWS = 2
"""Number of successive windows in which a rank must be slow before it is reported."""

_BLOCKING_FILES = (distributed_c10d.__file__, _functional_collectives.__file__)
_PASSED_THROUGH = (_ops.__file__, threading.__file__)
"""Source files whose stack frames are skipped: their callers tell whether a thread waits."""
_waiting_places: dict[tuple[CodeType, int], bool] = {}


def is_waiting(frame: FrameType) -> bool:
    """Tell whether a thread, whose innermost Python frame is ``frame``, is waiting for other ranks.
    It waits if it is inside of a collective of ``torch.distributed``, or on a line that calls
    ``wait`` on a collective's ``Work``."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename in _PASSED_THROUGH:
        inner = inner.f_back
    if inner is None:
        return False
    place = inner.f_code, inner.f_lasti
    if place not in _waiting_places:
        name, line = inner.f_code.co_filename, inner.f_lineno or 0
        text = linecache.getline(name, line) if line else ""
        _waiting_places[place] = name in _BLOCKING_FILES or ".wait()" in text
    return _waiting_places[place]


class WorkSampler:
    """Thread that samples whether the main thread works or waits for other ranks. It is a context
    manager: samples are taken inside the ``with`` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = self._seconds = 0.0
        self._watched = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="work sampler", daemon=True)

    def __enter__(self) -> WorkSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        """Take samples until stopped. Each sample counts for the time since the sample before it,
        which is long if the process was stopped meanwhile."""
        last = time.monotonic()
        while not self._stopped.wait(SAMPLE_SECONDS):
            frame = sys._current_frames().get(self._watched or 0)
            now = time.monotonic()
            is_working = frame is not None and not is_waiting(frame)
            del frame
            with self._lock:
                self._seconds += now - last
                self._working += (now - last) * is_working
            last = now

    def read(self) -> tuple[float, float]:
        """Return the seconds of work since ``reset``, and the seconds of work and waiting
        together."""
        with self._lock:
            return self._working, self._seconds

    def reset(self) -> None:
        with self._lock:
            self._working = self._seconds = 0.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the other ranks wait for, since it works longer.

    ``waits`` is the share of the time in which it waits for others, ``others_wait`` the median of
    that share over the ranks that it is compared with: the other ranks of its stage if
    ``is_of_stage``, else all other ranks. ``ratio`` is its work relative to the median work of
    these ranks, each divided by the work that the plan predicts.
    """

    rank: int
    waits: float
    others_wait: float
    ratio: float
    is_of_stage: bool

    def __str__(self) -> str:
        others = "the other ranks of its stage" if self.is_of_stage else "the other ranks"
        return (
            f"rank {self.rank} is slow: it waits for others {self.waits:.0%} of the time, "
            f"{others} wait {self.others_wait:.0%}"
        )


def find_straggler(
    works: Sequence[float], planned: Sequence[float], stages: Sequence[Hashable]
) -> Straggler | None:
    """Return the rank that the others wait for (the straggler), or None if there is none.

    ``works`` and ``planned`` are the shares of the time in which each rank does not wait for
    others, measured and predicted; ``stages`` are the ranks' stages. Ranks that the plan leaves
    idle are not compared.

    >>> find_straggler([0.5, 0.95, 0.45, 0.5], [0.9] * 4, [0] * 4).rank
    1
    >>> find_straggler([0.3, 0.9], [0.3, 0.9], [0, 1]) is None
    True
    """
    ranks = [rank for rank, share in enumerate(planned) if share > 0]
    found = [each for rank in ranks if (each := _compared(rank, ranks, works, planned, stages))]
    return max(found, key=lambda each: each.ratio, default=None)


def _compared(
    rank: int,
    ranks: Sequence[int],
    works: Sequence[float],
    planned: Sequence[float],
    stages: Sequence[Hashable],
) -> Straggler | None:
    """Compare the work of ``rank`` with the work of the other ranks of its stage or, if it is alone
    in its stage, of all other ``ranks``. Return None unless it is a straggler."""
    others = [other for other in ranks if other != rank]
    peers = [other for other in others if stages[other] == stages[rank]]
    usual = median([works[other] / planned[other] for other in peers or others] or [float("inf")])
    ratio = works[rank] / planned[rank] / max(usual, 1e-3)
    others_work = median([works[other] for other in peers or others] or [1.0])
    if ratio < (PEER_RATIO if peers else PLANNED_RATIO):
        return None
    if works[rank] - others_work < LEAST_DIFFERENCE:
        return None
    return Straggler(rank, 1 - works[rank], 1 - others_work, ratio, bool(peers))


class StragglerWatch:
    """Repeated search for a straggler in windows of time; the result is the same on every rank."""

    def __init__(self, planned: Sequence[float], stages: Sequence[Hashable]) -> None:
        """Make a watch; ``planned`` and ``stages`` are passed to ``find_straggler``."""
        self._planned, self._stages = planned, stages
        self._slow_rank: int | None = None
        self._num_windows = 0

    def compare(self, times: Sequence[tuple[float, float]]) -> Straggler | None:
        """Return the straggler in the present window of time if it is to be reported now: when the
        same rank is found in the second window in succession, then in the fourth, the eighth …
        ``times`` has for each rank its seconds of work and its seconds in all."""
        works = [working / seconds for working, seconds in times]
        found = find_straggler(works, self._planned, self._stages)
        if found is None or found.rank != self._slow_rank:
            self._slow_rank = None if found is None else found.rank
            self._num_windows = 0
        self._num_windows += 1
        is_power = self._num_windows & (self._num_windows - 1) == 0
        return found if self._num_windows >= WINDOWS and is_power else None
