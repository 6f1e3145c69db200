"""The micro-batch sizes of a search in parts, and who searches each.

In: a context, functions of it and of some micro-batch sizes. Out: what they return, part by part.
The parts are the same whoever searches them, and no part knows what another one found, so plans do
not depend on the number of processes. The planner itself starts none: ``plan`` takes a function
that makes ``Workers``, and ``serial`` is the one that searches all parts here.
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
"""Into which the micro-batch sizes are divided."""


class Workers(Protocol):
    """Those who search the parts."""

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """``function(context, sizes, *args)`` of each part; of the first ``first(sizes)``."""
        ...

    def end(self) -> None:
        """End them; what they have not answered is done here when it is asked for."""
        ...


StartWorkers = Callable[["SearchContext", Sizes], Workers]
"""(context, micro-batch sizes) → the workers."""


def parts_of(context: SearchContext, sizes: Sizes) -> tuple[Sizes, ...]:
    """The sizes in parts, dealt in turns. All are one part if asked prices are recorded."""
    number = min(NUM_PARTS, len(sizes)) if context.basis.asked is None else 1
    return tuple(sizes[at::number] for at in range(number))


@dataclass
class SerialWorkers:
    """Searches all parts in this process, one after the other."""

    context: SearchContext
    parts: tuple[Sizes, ...]

    def map(
        self,
        function: Callable[..., Result],
        *args: object,
        first: Callable[[Sizes], Result] | None = None,
    ) -> list[Result]:
        """See ``Workers``."""
        return [
            function(self.context, sizes, *args) if at or first is None else first(sizes)
            for at, sizes in enumerate(self.parts)
        ]

    def end(self) -> None:
        """There is nothing to end."""


def serial(context: SearchContext, sizes: Sizes) -> Workers:
    """Workers that are this process."""
    return SerialWorkers(context, parts_of(context, sizes))


def undivided(context: SearchContext, sizes: Sizes) -> Workers:
    """This process, which searches all sizes as one part: what it finds with one of them ends
    the search of others sooner."""
    return SerialWorkers(context, (sizes,))
