"""The micro-batch sizes of a search in parts, and who searches each.

In: a job, functions of it and of some micro-batch sizes. Out: what they return, part by part. The
parts are the same whoever searches them, and no part knows what another one found, so plans do not
depend on the number of processes. The planner itself starts none: ``plan`` takes a function that
makes ``Workers``, and ``serial`` is the one that searches all parts here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from .job import Job

Result = TypeVar("Result")
Sizes = tuple[int, ...]

NUM_PARTS = 2
"""Into which the micro-batch sizes are divided."""


class Workers(Protocol):
    """Those who search the parts."""

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """``function(job, sizes, *args)`` of each part; of the first ``first(sizes)`` if given."""
        ...

    def end(self) -> None:
        """Ends them; what they have not answered is done here when it is asked for."""
        ...


StartWorkers = Callable[["Job", Sizes], Workers]
"""(job, micro-batch sizes) → the workers."""


def parts_of(job: Job, sizes: Sizes) -> tuple[Sizes, ...]:
    """The sizes in parts, dealt in turns. All are one part if asked prices are recorded."""
    number = min(NUM_PARTS, len(sizes)) if job.basis.asked is None else 1
    return tuple(sizes[at::number] for at in range(number))


@dataclass
class SerialWorkers:
    """Searches all parts in this process, one after the other."""

    job: Job
    parts: tuple[Sizes, ...]

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """See ``Workers``."""
        return [
            function(self.job, sizes, *args) if at or first is None else first(sizes)
            for at, sizes in enumerate(self.parts)
        ]

    def end(self) -> None:
        """There is nothing to end."""


def serial(job: Job, sizes: Sizes) -> Workers:
    """Workers that are this process."""
    return SerialWorkers(job, parts_of(job, sizes))
