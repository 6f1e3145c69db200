"""Which rank the others wait for, while training goes on.

In: what share of the time each rank's main thread waits for collectives and messages, sampled,
and the share that the plan predicts. Out: the slow rank, if one waits much less than planned
while the others wait much more.

A rank that is slow waits for nobody and everybody waits for it, whatever the plan: at each
all-reduce under data parallelism, at each gather under ZeRO 3, at each message of a pipeline. So
the waiting, unlike the time of a forward or backward, which contains waits for others, tells the
rank apart. Samples are of the host, which on a GPU runs ahead of the device: there they say
nothing, and nothing is sampled.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType

import torch
import torch.distributed as dist

SAMPLE_SECONDS = 0.02
"""The time between two samples. One takes 10 to 20 µs, during which the main thread stands."""
LEAST_SHARE = 0.15
"""By so much of the time must the others wait longer than planned, and the slow rank less long
than they, before it is named."""
LEAST_SAMPLES = 25
"""Fewer samples say nothing: their share is off by 0.1 and more."""
EARLY_STEPS, EVERY_STEPS = (5, 10, 20), 50
"""The steps after which ranks are compared: these, and each multiple of the latter."""

_DISTRIBUTED = str(Path(dist.__file__).parent)
_PASSED_THROUGH = (str(Path(torch.__file__).parent / "_ops.py"), threading.__file__)
"""Files whose frames say nothing: who called them does."""


def is_due(step: int) -> bool:
    """Whether ranks are compared after ``step``, the same on every rank.

    >>> [step for step in range(1, 120) if is_due(step)]
    [5, 10, 20, 50, 100]
    """
    return step in EARLY_STEPS or step % EVERY_STEPS == 0


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread whose innermost Python frame is ``frame`` waits for other ranks.

    It does inside of ``torch.distributed``, whose calls are collectives, and on a line that calls
    ``wait`` of a collective's work.
    """
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename in _PASSED_THROUGH:
        inner = inner.f_back
    if inner is None:
        return False
    name = inner.f_code.co_filename
    # Between two lines a frame of a running thread has no number.
    line = linecache.getline(name, inner.f_lineno or 0)
    return name.startswith(_DISTRIBUTED) or ".wait()" in line


class WaitSampler:
    """Samples whether the main thread waits for other ranks; a context manager, on while inside."""

    def __init__(self) -> None:
        self._waiting = self._samples = 0
        self._watched = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="wait sampler", daemon=True)

    def __enter__(self) -> WaitSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            frame = sys._current_frames().get(self._watched or 0)
            if frame is not None:
                self._samples += 1
                self._waiting += is_waiting(frame)

    def take_share(self) -> float:
        """The share of the samples since the last call that waited; NaN where they are few."""
        waiting, samples = self._waiting, self._samples
        self._waiting = self._samples = 0
        return waiting / samples if samples >= LEAST_SAMPLES else float("nan")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for. Shares are of the time: its own waiting and computing make
    1, ``others_wait`` is the median of the other ranks' and ``unplanned`` what of that is more
    than planned."""

    rank: int
    waits: float
    others_wait: float
    unplanned: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it waits for others {self.waits:.0%} of the time, the "
            f"others {self.others_wait:.0%}, of which {self.unplanned:.0%} is more than planned"
        )


def find_straggler(waits: Sequence[float], planned: Sequence[float]) -> Straggler | None:
    """The rank that the others wait for, if there is one.

    ``waits`` and ``planned`` are the share of the time that each rank waits for others, measured
    and predicted. A rank is slow if the median of the others' unplanned waiting is at least
    ``LEAST_SHARE`` and no rank but this one waits that much less than the median.

    >>> find_straggler([0.45, 0.05, 0.5, 0.4], [0.1, 0.1, 0.1, 0.1]).rank
    1
    >>> find_straggler([0.3, 0.1], [0.3, 0.1]) is None
    True
    """
    unplanned = [share - expected for share, expected in zip(waits, planned, strict=True)]
    if len(waits) < 2 or any(share != share for share in unplanned):
        return None
    slow = min(range(len(waits)), key=lambda rank: unplanned[rank])
    others = [rank for rank in range(len(waits)) if rank != slow]
    late = median(unplanned[rank] for rank in others)
    near = [rank for rank in others if unplanned[rank] < late - LEAST_SHARE]
    if near or late < LEAST_SHARE or late - unplanned[slow] < LEAST_SHARE:
        return None
    return Straggler(slow, waits[slow], median(waits[rank] for rank in others), late)


def gather_shares(share: float) -> list[float]:
    """Every rank's ``share``, in the order of the ranks. Collective over all ranks."""
    shares = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(shares, torch.tensor([share], dtype=torch.float64))
    found: list[float] = shares.tolist()
    return found
