"""What is asked of the planner: the batch, the number format, limits, and forced choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import UsageError
from .plan import Precision, Recompute

SCHEDULES = ("1f1b", "gpipe", "eager-1f1b")


@dataclass(frozen=True, slots=True)
class Forced:
    """Choices that the caller made; the search decides those that are None.

    ``dp=k``: a mesh axis "dp" of size k that splits the batch and replicates parameters.
    ``tp=k``: a mesh axis "tp" of size k that does not split the batch of the inputs and
    splits, and computes split with, every parameter of two or more dimensions that it
    divides. ``pp=k``: k stages. ``cp=k``: a mesh axis "cp" of size k that splits positions.
    ``sequence_parallel``: whether values between the split parameters of "tp" are split along
    positions (True), whole (False), or as the solver finds (None).
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    cp: int | None = None
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "num_microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError("AP120", f"{name}={value} is less than 1")
        if self.zero is not None and self.zero not in (0, 1, 2, 3):
            raise UsageError("AP121", f"zero={self.zero} is not one of 0, 1, 2 and 3")
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise UsageError(
                "AP122", f"schedule={self.schedule} is not one of {', '.join(SCHEDULES)}"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One planning job.

    ``global_batch`` rows make a step. ``microbatch_size`` is the rows of one micro-batch over
    all data-parallel ranks; None lets the search choose. ``memory_limit_bytes`` per device
    overrides what the device says. ``top`` is how many candidates the simulator ranks.
    The search ends within ``gap`` of the best step there is, where it can show that.
    ``target`` and ``settings`` only pass through to the plan.
    """

    global_batch: int
    seq: int | None = None
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    memory_limit_bytes: int | None = None
    microbatch_size: int | None = None
    forced: Forced = field(default_factory=Forced)
    time_limit_seconds: float = 60.0
    top: int = 5
    target: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    gap: float = 0.01

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UsageError("AP123", f"a global batch of {self.global_batch} has no rows")
        rows = self.microbatch_size
        if rows is not None and (rows < 1 or self.global_batch % rows):
            raise UsageError(
                "AP124",
                f"a global batch of {self.global_batch} rows cannot be cut into micro-batches "
                f"of {rows}",
                fix=f"a divisor of {self.global_batch}: "
                + ", ".join(str(size) for size in divisors(self.global_batch)),
            )


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(size for size in range(1, number + 1) if number % size == 0)
