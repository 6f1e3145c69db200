"""The consistency of parameter servers: what a worker may begin, over random schedules."""

from __future__ import annotations

import random

import pytest
from random_suites import seeds

from autoparallel.cost_model.simulator.consistency import Clocks, bound_of

EVENTS = 1000


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize(("workers", "bound"), [(2, 0), (3, 1), (5, 2), (4, 5)])
def test_no_worker_is_further_ahead_of_the_slowest_than_the_bound(
    workers: int, bound: int, seed: int
) -> None:
    """Counted beside the clocks: iterations that each worker has begun and finished."""
    draws = random.Random(seed)
    clocks = Clocks(range(workers), bound)
    begun, finished = [0] * workers, [0] * workers
    most = 0
    for _ in range(EVENTS):
        worker = draws.choices(range(workers), weights=range(1, workers + 1))[0]
        if begun[worker] > finished[worker]:
            finished[worker] += 1
            assert clocks.push(worker) == finished[worker]
        elif clocks.may_begin(worker):
            begun[worker] += 1
            ahead = begun[worker] - 1 - min(finished)
            most = max(most, ahead)
            assert ahead <= bound
        else:
            assert begun[worker] - min(finished) > bound
    assert most == bound
    assert min(finished) > 0


def test_without_a_bound_a_worker_never_waits() -> None:
    clocks = Clocks(range(2), bound_of("asp"))
    for count in range(1, 100):
        assert clocks.may_begin(0)
        assert clocks.push(0) == count
    assert clocks.slowest == 0


def test_nobody_waits_for_a_worker_that_has_left() -> None:
    clocks = Clocks(range(3), bound_of("bsp"))
    clocks.push(0)
    clocks.push(1)
    assert not clocks.may_begin(0)
    clocks.leave(2)
    assert clocks.may_begin(0)
    assert not clocks.may_begin(2)
    assert clocks.slowest == 1
