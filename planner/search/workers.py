"""Search of the micro-batch sizes in parts, by one or several workers.

In: a context, functions of it and of some micro-batch sizes. Out: their results, part by part.
The parts do not depend on the workers, and no part sees another's results, so plans do not depend
on the number of processes. The planner itself starts none: ``plan`` takes a function that makes
``Workers``; ``serial_workers`` makes workers in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from .context import SearchContext

Result = TypeVar("Result")
Sizes = tuple[int, ...]

NUM_PARTS = 2
"""Number of parts that the micro-batch sizes are divided into."""


class Workers(Protocol):
    """Workers that search the parts."""

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """Run ``function(context, sizes, *args)`` on each part, ``first(sizes)`` on the first."""
        ...

    def end(self) -> None:
        """End the workers; unanswered parts are searched here on request."""
        ...


StartWorkers = Callable[["SearchContext", Sizes], Workers]
"""Function (context, micro-batch sizes) that starts workers."""


def parts_of(context: SearchContext, sizes: Sizes) -> tuple[Sizes, ...]:
    """Deal the sizes into parts. They form a single part if queries are recorded."""
    number = min(NUM_PARTS, len(sizes)) if context.basis.asked is None else 1
    return tuple(sizes[at::number] for at in range(number))


@dataclass
class SerialWorkers:
    """Workers that search all parts in this process, in sequence."""

    context: SearchContext
    parts: tuple[Sizes, ...]

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """Run a function on each part, as ``Workers`` does."""
        return [
            function(self.context, sizes, *args) if at or first is None else first(sizes)
            for at, sizes in enumerate(self.parts)
        ]

    def end(self) -> None:
        """Do nothing: there is no process to end."""


def serial_workers(context: SearchContext, sizes: Sizes) -> Workers:
    """Return workers in this process."""
    return SerialWorkers(context, parts_of(context, sizes))


def one_worker(context: SearchContext, sizes: Sizes) -> Workers:
    """Return a worker in this process for all sizes as one part, so that results for one size end
    the search of others sooner."""
    return SerialWorkers(context, (sizes,))
