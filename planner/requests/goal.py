"""Objective of a plan, with the device prices that it needs; time limit, time spent and progress.

``time``: the shortest step. ``cost``: the most tokens per dollar. ``memory``: the least memory on
the fullest device. ``devices``: the fewest devices that meet a deadline.

Prices come from the user or the cluster file; the package has none. ``Budget`` alone reads a
clock in the planner; it also counts work, so that shares of it are the same on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from ...cost_model.cluster.cluster import Cluster
from ..errors import UsageError

Objective = Literal["time", "cost", "memory", "devices"]
OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "memory", "devices")

ANY_DEVICE = ""
"""Key, among prices by device, of the price for all devices that are not named."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of a training run: ``count`` tokens or steps within ``seconds``."""

    seconds: float
    count: float
    unit: Literal["tokens", "steps"]

    def step_seconds(self, tokens_per_step: int) -> float:
        """Return the maximum seconds of a step that meets the deadline.

        >>> Deadline(3600.0, 1e6, "tokens").step_seconds(10_000)
        36.0
        """
        steps = self.count if self.unit == "steps" else ceil(self.count / tokens_per_step)
        return self.seconds / max(steps, 1)


@dataclass(frozen=True, slots=True)
class Goal:
    """Objective of a plan, with device prices and a deadline. ``prices``: dollars per hour of one
    device by its name; the key ``ANY_DEVICE`` is for all devices that are not named."""

    objective: Objective = "time"
    prices: Mapping[str, float] = field(default_factory=dict)
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(
                "AP188", f"objective {self.objective!r} is not one of {', '.join(OBJECTIVES)}"
            )
        if self.objective == "devices" and self.deadline is None:
            raise UsageError(
                "AP189",
                "--objective devices needs a deadline",
                fix="for example: --deadline 24h/1000steps or --deadline 30d/2e12tokens",
            )

    def dollars_per_hour(self, cluster: Cluster) -> float | None:
        """Return the dollars per hour of a whole cluster; None if a device has no price.

        The user's price takes precedence over the cluster file's.
        """
        total = 0.0
        for host in cluster.hosts:
            own, every = self.prices.get(host.device.name), self.prices.get(ANY_DEVICE)
            price = own if own is not None else every
            price = price if price is not None else host.device.dollars_per_hour
            if price is None:
                return None
            total += price * host.num_devices
        return total


STEPS_PER_PROBLEM = 20
"""Steps of the inter-op dynamic program that take about as long as solving one stage."""

SOLVING = ("costs", "ilp")
"""Phases of the stage solvers; their time is not counted again in the phases that call them."""

LONG = 5_000
"""Work (``Budget.work``) below which no part of a search is cut short."""

INTERRUPTED = "Ctrl-C"
"""Text for a search that Ctrl-C ended."""

GRACE_SECONDS = 2.0
"""Seconds after Ctrl-C to evaluate the best plan so far."""

Observe = Callable[[str, float, float], None]
"""Callback for progress: (activity, amount done, total amount)."""


def ignore(activity: str, done: float, total: float) -> None:
    """Ignore progress: the default ``Observe``."""


@dataclass
class Budget:
    """Budget of a plan search: its deadline, the seconds spent in each phase, and the work done.

    ``stopped``: the cause of an early end other than the time limit, "" if there is none;
    ``observe`` is told of progress.
    """

    deadline: float
    began: float
    limit_seconds: float
    num_problems: int = 0
    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    observe: Observe = ignore

    @staticmethod
    def of(limit_seconds: float) -> Budget:
        """Start a budget of ``limit_seconds`` now."""
        now = time.perf_counter()
        return Budget(now + limit_seconds, now, limit_seconds)

    def extend(self, other: Budget) -> None:
        """Set the time limit of ``other``, and keep the record of time and work."""
        self.deadline, self.limit_seconds = other.deadline, other.limit_seconds

    @property
    def work(self) -> float:
        """Work done so far, in problems of stage layouts solved (about 0.01 s each); steps of the
        dynamic program over stages are converted to such problems."""
        return self.num_problems + self.num_steps / STEPS_PER_PROBLEM

    @property
    def left_seconds(self) -> float:
        """Return the seconds until the deadline, negative after it."""
        return self.deadline - time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Return the seconds since the budget began."""
        return time.perf_counter() - self.began

    def is_late(self, share: float = 0.7) -> bool:
        """Return whether the fraction ``share`` of the time limit has passed."""
        return self.left_seconds < (1 - share) * self.limit_seconds

    def is_long(self, began: float) -> bool:
        """Return whether the work done since ``began`` is much, and over a third of all work before
        ``began``."""
        return self.work - began > max(0.5 * LONG, began / 3)

    def spent(self) -> tuple[int, dict[str, float]]:
        """Return the number of solved problems, and the seconds by phase."""
        return self.num_problems, {**self.seconds, "total": self.elapsed_seconds}

    @property
    def ended_by(self) -> str:
        """Return the cause of an early end of the search; "" if it was not ended early."""
        return self.stopped or ("its time limit" if self.left_seconds <= 0 else "")

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """End a ``with`` block upon Ctrl-C, record the interrupt, and continue after the block."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupt()

    def interrupt(self) -> None:
        """Record Ctrl-C, and leave little time for the remaining work."""
        self.stopped = INTERRUPTED
        self.end_in(GRACE_SECONDS)

    def end_in(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now."""
        self.deadline = time.perf_counter() + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a ``with`` block to ``phase``, except seconds that the block spends in
        the phases ``SOLVING``, which are recorded there."""
        began, solved = time.perf_counter(), self._solving_seconds
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            if phase not in SOLVING:
                spent -= self._solving_seconds - solved
            self.record_time(phase, spent)

    def record_time(self, phase: str, seconds: float) -> None:
        """Add ``seconds`` to the time of ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def _solving_seconds(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in SOLVING)
