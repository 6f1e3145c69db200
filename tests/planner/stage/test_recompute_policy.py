"""Policies as arrays are those that enumeration gives; dominated ones are no loss."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from random_suites import seeds

from autoparallel.planner.plan import Recompute
from autoparallel.planner.stage.recompute_policy import (
    MOST_POLICIES,
    POLICY_MODES,
    USUAL_MODES,
    Policies,
    RecomputeCosts,
    efficient_policies,
    group_policies,
    num_policies,
    policies,
    recomputing,
    uniform_policy,
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
    modes = rng.choice((USUAL_MODES, POLICY_MODES))
    for place, ways in zip(*group_policies(counts, kinds, modes), strict=True):
        sizes = tuple(counts[number] for number in place)
        for by_mode in ways.swapaxes(0, 1).tolist():
            before = 0
            for own in by_mode if len(place) > 1 else ():
                assert tuple(own) == filled(before, sum(own), sizes)
                before += sum(own)
            every = zip(*by_mode, strict=True)
            assert all(sum(own) <= size for own, size in zip(every, sizes, strict=True))


@pytest.mark.parametrize("seed", seeds(8))
def test_a_policy_is_one_of_every_group(seed: int) -> None:
    rng = random.Random(seed)
    counts = tuple(rng.randint(1, 3) for _ in range(3))
    kinds = ("a", "b", "a")
    places, ways = group_policies(counts, kinds)
    expected = []
    for chosen in product(*(own.swapaxes(0, 1).tolist() for own in ways)):
        by_mode: list[dict[int, int]] = [{} for _ in POLICY_MODES]
        for place, own in zip(places, chosen, strict=True):
            for found_of, numbers in zip(by_mode, own, strict=True):
                found_of |= dict(zip(place, numbers, strict=True))
        expected.append(tuple(tuple(own[n] for n in range(3)) for own in by_mode))
    found = policies(counts, kinds)
    assert [tuple(found[number]) for number in range(len(found))] == expected
    assert num_policies(counts, kinds) == len(expected) == len(set(expected))


def blocks(seed: int) -> RecomputeCosts:
    rng = np.random.default_rng(seed)
    number = len(KINDS)
    seconds = rng.uniform(1, 3, number) * np.array([[1.0], [0.4], [0.7], [0.8], [0.5]])
    kept = -rng.uniform(1, 3, number) * np.array([[1.0], [0.5], [0.8], [1.0], [1.0]])
    return costs_of(seconds, kept, rng.integers(0, 4, (5, 3, number)).astype(float))


def costs_of(seconds: np.ndarray, kept: np.ndarray, transient: np.ndarray) -> RecomputeCosts:
    return RecomputeCosts(
        seconds, kept, transient, np.zeros(kept.shape), np.zeros((2, *kept.shape))
    )


def figures(on: Policies, given: RecomputeCosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        on.sums(given.seconds),
        on.sums(given.kept_bytes),
        on.largest(given.transient_bytes),
    )


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize(
    "modes", [("full", "selective"), ("full",), ("selective",), (), ("full", "attention-offloaded")]
)
def test_for_every_limit_the_best_policy_is_left(seed: int, modes: tuple[Recompute, ...]) -> None:
    given = blocks(seed)
    used = recomputing(None, modes)
    every, some = (
        policies(COUNTS, KINDS, used),
        efficient_policies(COUNTS, KINDS, used, costs=given),
    )
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
    found = efficient_policies(COUNTS, KINDS, costs=blocks(0))
    assert not found[0].num_blocks
    listed = [found[number] for number in range(len(found))]
    assert uniform_policy("full", COUNTS) in listed
    assert uniform_policy("selective", COUNTS) in listed


def test_of_many_kinds_few_policies_are_left() -> None:
    rng = np.random.default_rng(1)
    kinds = tuple(f"layers.{n}" for n in range(10))
    seconds = rng.uniform(1, 3, 10) * np.array([[1.0], [0.5], [1.0], [1.0], [1.0]])
    given = costs_of(seconds, -seconds, rng.integers(0, 9, (5, 4, 10)).astype(float))
    counts = (1, 2, 1, 3, 1, 22, 1, 2, 1, 1)
    assert num_policies(counts, kinds) > 1_000_000
    assert len(efficient_policies(counts, kinds, costs=given)) < 4 * MOST_POLICIES
