"""Workers that search the micro-batch sizes in parts.

In: a context, functions of it and of some micro-batch sizes. Out: their results, part by part. The
parts do not depend on the number of workers, and no part sees another's results, so plans do not
depend on it. The planner itself starts no process: ``plan`` takes a function that makes
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
    """Interface of worker processes, each of which searches a part of the micro-batch sizes."""

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """Return ``function(context, sizes, *args)`` for each part ``sizes`` of the micro-batch
        sizes; for the first part ``first(sizes)``, if given."""
        ...

    def end(self) -> None:
        """End the workers; later calls search the parts in this process."""
        ...


StartWorkers = Callable[["SearchContext", Sizes], Workers]
"""Function of (context, micro-batch sizes) that starts workers."""


def parts_of(context: SearchContext, sizes: Sizes) -> tuple[Sizes, ...]:
    """Divide the micro-batch sizes into parts, in turn; a single part if queries are recorded."""
    number = min(NUM_PARTS, len(sizes)) if context.basis.asked is None else 1
    return tuple(sizes[at::number] for at in range(number))


@dataclass
class SerialWorkers:
    """Workers that search all parts of the sizes in this process, one after another."""

    context: SearchContext
    parts: tuple[Sizes, ...]

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """Call a function on each part, as ``Workers.map`` specifies."""
        return [
            function(self.context, sizes, *args) if at or first is None else first(sizes)
            for at, sizes in enumerate(self.parts)
        ]

    def end(self) -> None:
        """Do nothing: there is no process to end."""


def serial_workers(context: SearchContext, sizes: Sizes) -> Workers:
    """Return workers that search all parts in this process."""
    return SerialWorkers(context, parts_of(context, sizes))


def one_worker(context: SearchContext, sizes: Sizes) -> Workers:
    """Return a worker in this process that searches all sizes as one part, so that a good result
    for one size ends the search of others sooner."""
    return SerialWorkers(context, (sizes,))
