"""Times when a worker of parameter servers may read a weight: BSP, SSP and ASP as one machine.

In: how many updates each worker has pushed to one piece of the weights. Out: the workers that
may begin their next iteration with that piece. A worker's clock is the number of its pushes. It may
begin iteration ``c`` where the slowest of the remaining workers has pushed at least ``c - s``
times; ``s`` is the bound:

=====  ==============  ====================================================================
bsp    s = 0           every iteration sees all pushes of all iterations before it, only these
ssp    s = 1, 2, ...   it sees all pushes of iterations before ``c - s``, and some later ones
asp    no bound        it sees the pushes that have arrived
=====  ==============  ====================================================================

Under bsp pushes of an iteration are applied together; otherwise each is applied as it comes.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

Consistency = Literal["bsp", "ssp", "asp"]
CONSISTENCIES: tuple[Consistency, ...] = get_args(Consistency)


def bound_of(consistency: Consistency, staleness: int = 0) -> int | None:
    """Return how many iterations a worker of parameter servers may be ahead of the slowest worker:
    0 for "bsp", ``staleness`` for "ssp", None (unbounded) for "asp".

    >>> bound_of("bsp"), bound_of("ssp", 2), bound_of("asp")
    (0, 2, None)
    """
    return {"bsp": 0, "ssp": staleness, "asp": None}[consistency]


class Clocks:
    """Progress of the workers of a parameter server: each worker's clock is the number of its
    pushes (of gradients) to one part of the weights. A worker may begin its next iteration if its
    clock is at most ``bound`` ahead of the slowest worker's.

    >>> clocks = Clocks(range(2), bound=1)
    >>> clocks.may_begin(0), clocks.push(0), clocks.may_begin(0), clocks.push(0)
    (True, 1, True, 2)
    >>> clocks.may_begin(0), clocks.push(1), clocks.may_begin(0)
    (False, 1, True)
    """

    def __init__(self, workers: Iterable[int], bound: int | None) -> None:
        self.bound = bound
        self._clocks = dict.fromkeys(workers, 0)

    @property
    def workers(self) -> tuple[int, ...]:
        """Ids of the workers that have not left."""
        return tuple(self._clocks)

    def clock(self, worker: int) -> int:
        """Return the clock of a worker: its number of pushes so far."""
        return self._clocks[worker]

    @property
    def slowest(self) -> int:
        """Clock (number of pushes) of the slowest worker; 0 if there are no workers."""
        return min(self._clocks.values(), default=0)

    def may_begin(self, worker: int) -> bool:
        """Return true if a worker may begin its next iteration now, and has not left."""
        if worker not in self._clocks:
            return False
        return self.bound is None or self._clocks[worker] - self.slowest <= self.bound

    def push(self, worker: int) -> int:
        """Count one more push of a worker; return the new number of its pushes."""
        self._clocks[worker] += 1
        return self._clocks[worker]

    def leave(self, worker: int) -> None:
        """Remove a worker that is done or lost, so that no other worker waits for it."""
        self._clocks.pop(worker, None)
