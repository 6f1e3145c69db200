"""Policies as arrays are those that enumeration gives; dominated ones are no loss."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from random_suites import seeds

from autoparallel.planner.stage.recompute_policy import (
    MOST_POLICIES,
    Policies,
    RecomputeCosts,
    efficient_policies,
    group_policies,
    num_policies,
    policies,
)

KINDS = ("stem", "layer", "layer", "wide", "narrow", "head")
COUNTS = (1, 6, 2, 3, 1, 1)


def filled(before: int, count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """``count`` blocks, after ``before`` ones, taken one after the other from classes in order."""
    of_block = [number for number, size in enumerate(sizes) for _ in range(size)]
    taken = of_block[before : before + count]
    return tuple(taken.count(number) for number in range(len(sizes)))


@pytest.mark.parametrize("seed", seeds(12))
def test_blocks_are_taken_from_their_classes_in_order(seed: int) -> None:
    rng = random.Random(seed)
    kinds = tuple(rng.choice("ab") for _ in range(rng.randint(2, 4)))
    counts = tuple(rng.choice((1, 2, rng.randint(3, 250))) for _ in kinds)
    for place, ways in zip(*group_policies(counts, kinds), strict=True):
        sizes = tuple(counts[number] for number in place)
        for full, some in ways.swapaxes(0, 1).tolist():
            if len(place) > 1:
                assert tuple(full) == filled(0, sum(full), sizes)
                assert tuple(some) == filled(sum(full), sum(some), sizes)
            assert all(f + s <= size for f, s, size in zip(full, some, sizes, strict=True))


@pytest.mark.parametrize("seed", seeds(8))
def test_a_policy_is_one_of_every_group(seed: int) -> None:
    rng = random.Random(seed)
    counts = tuple(rng.randint(1, 3) for _ in range(3))
    kinds = ("a", "b", "a")
    places, ways = group_policies(counts, kinds)
    expected = []
    for chosen in product(*(own.swapaxes(0, 1).tolist() for own in ways)):
        full, some = {}, {}
        for place, (first, second) in zip(places, chosen, strict=True):
            full |= dict(zip(place, first, strict=True))
            some |= dict(zip(place, second, strict=True))
        expected.append((tuple(full[n] for n in range(3)), tuple(some[n] for n in range(3))))
    found = policies(counts, kinds)
    assert [tuple(found[number]) for number in range(len(found))] == expected
    assert num_policies(counts, kinds) == len(expected) == len(set(expected))


def blocks(seed: int) -> RecomputeCosts:
    rng = np.random.default_rng(seed)
    number = len(KINDS)
    seconds = rng.uniform(1, 3, number) * np.array([[1.0], [0.4]])
    kept = -rng.uniform(1, 3, number) * np.array([[1.0], [0.5]])
    return RecomputeCosts(seconds, kept, rng.integers(0, 4, (2, 3, number)).astype(float))


def figures(on: Policies, given: RecomputeCosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        on.sums(given.seconds),
        on.sums(given.kept_bytes),
        on.largest(given.transient_bytes),
    )


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("modes", [("full", "selective"), ("full",), ("selective",), ()])
def test_for_every_limit_the_best_policy_is_left(seed: int, modes: tuple[str, ...]) -> None:
    given = blocks(seed)
    every, some = policies(COUNTS, KINDS), efficient_policies(COUNTS, KINDS, given)
    assert len(some) < len(every)
    best = []
    rng = random.Random(seed)
    limits = [rng.uniform(-30, 4) for _ in range(40)]
    for on in (every, some):
        seconds, kept, transient = figures(on, given)
        allowed = on.within(modes)
        best.append(
            [
                np.where((held + in_flight * kept <= limit) & allowed, seconds, np.inf).min()
                for held in transient
                for in_flight in (1, 3)
                for limit in limits
            ]
        )
    assert best[1] == pytest.approx(best[0])
    assert np.isfinite(best[0]).any()


def test_the_first_policy_recomputes_nothing_and_all_blocks_alike_may_be_forced() -> None:
    found = efficient_policies(COUNTS, KINDS, blocks(0))
    assert found[0] == ((0,) * 6, (0,) * 6)
    listed = [tuple(found[number]) for number in range(len(found))]
    assert (COUNTS, (0,) * 6) in listed
    assert ((0,) * 6, COUNTS) in listed


def test_of_many_kinds_few_policies_are_left() -> None:
    rng = np.random.default_rng(1)
    kinds = tuple(f"layers.{n}" for n in range(10))
    seconds = rng.uniform(1, 3, 10) * np.array([[1.0], [0.5]])
    given = RecomputeCosts(seconds, -seconds, rng.integers(0, 9, (2, 4, 10)).astype(float))
    counts = (1, 2, 1, 3, 1, 22, 1, 2, 1, 1)
    assert num_policies(counts, kinds) > 1_000_000
    assert len(efficient_policies(counts, kinds, given)) < 4 * MOST_POLICIES
