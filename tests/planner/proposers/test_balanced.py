"""Cuts into runs: the heaviest is as light as brute force finds, and light is found early."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest
from random_suites import seeds

from autoparallel.planner.proposers.balanced import balanced, rebalance
from autoparallel.planner.schedules.schedules import parts_of_ranks


def runs(weights: list[float], starts: tuple[int, ...]) -> list[float]:
    return [sum(weights[a:b]) for a, b in pairwise((*starts, len(weights)))]


def step_by_step(weights: list[float], number: int) -> tuple[int, ...]:
    """What is documented, over all starts: for each end the run that makes the heaviest least,
    then the squares, then the earliest cut."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(number):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(1, len(weights) + 1):
            found = []
            for start, (most, squares, cut) in best.items():
                if start < stop:
                    own = sum(weights[start:stop])
                    found.append((max(most, own), squares + own**2, (*cut, start)))
            if found:
                longer[stop] = min(found)
        best = longer
    return best[len(weights)][2]


@pytest.mark.parametrize("seed", seeds(12))
def test_the_heaviest_run_is_as_light_as_can_be(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(1, 9)
    number = rng.randint(1, count)
    largest = rng.choice((1, 3, 1000))
    weights = [float(rng.randint(largest == 1, largest)) for _ in range(count)]
    starts = balanced(weights, number)
    assert starts == step_by_step(weights, number)
    every = combinations(range(1, count), number - 1)
    assert max(runs(weights, starts)) == min(max(runs(weights, (0, *own))) for own in every)


def test_a_thousand_equal_blocks_are_shared_out_evenly() -> None:
    lengths = runs([1.0] * 1000, balanced([1.0] * 1000, 96))
    assert sorted(set(lengths)) == [10.0, 11.0]
    assert lengths.count(11.0) == 1000 - 960


@pytest.mark.parametrize("schedule", ["zbv", "interleaved"])
@pytest.mark.parametrize("seed", seeds(12))
def test_ranks_are_no_less_even_than_before(schedule: str, seed: int) -> None:
    rng = Random(seed)
    num_ranks, count = rng.randint(2, 3), rng.randint(6, 9)
    weights = [0.0, *(float(rng.randint(1, 9)) for _ in range(count)), float(rng.randint(0, 20))]
    parts = parts_of_ranks(schedule, num_ranks, 2)

    def squares(starts: tuple[int, ...]) -> float:
        own = runs(weights, starts)
        return sum(sum(own[run] for run in part) ** 2 for part in parts)

    before = balanced(weights, 2 * num_ranks)
    starts = rebalance(weights, before, parts)
    assert sorted(set(starts)) == list(starts), "no run is empty"
    assert len(starts) == len(before)
    assert starts[0] == 0
    assert squares(starts) <= squares(before)
    every = combinations(range(1, len(weights)), 2 * num_ranks - 1)
    least = min(squares((0, *own)) for own in every)
    assert squares(starts) <= 1.25 * least, "one block at a time: near the best, not always it"


def test_equal_blocks_are_shared_out_evenly_to_the_ranks_of_a_v() -> None:
    """Six layers between two light ends on two ranks: three each, where runs alike have 2 and 4."""
    weights = [0.1, *[1.0] * 6, 0.1]
    starts = rebalance(weights, balanced(weights, 4), ((0, 3), (1, 2)))
    own = runs(weights, starts)
    assert own[0] + own[3] == pytest.approx(3.2)
