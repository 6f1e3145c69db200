"""Objective of a plan, and the device prices that it needs.

``time``: the shortest step. ``cost``: the most tokens per dollar. ``memory``: the least memory on
the fullest device. ``devices``: the fewest devices that meet a deadline.

Prices come from the user or the cluster file; the package has none.
"""

from __future__ import annotations

from collections.abc import Mapping
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
