"""Rungs as arrays are those that going through the ways one by one gives."""

from __future__ import annotations

import random
from itertools import product

import pytest

from autoparallel.planner.pricing.ladder import num_rungs, rungs, ways_of


def filled(before: int, count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """``count`` blocks, after ``before`` ones, taken one after the other from classes in order."""
    of_block = [number for number, size in enumerate(sizes) for _ in range(size)]
    taken = of_block[before : before + count]
    return tuple(taken.count(number) for number in range(len(sizes)))


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_taken_from_their_classes_in_order(seed: int) -> None:
    rng = random.Random(seed)
    kinds = tuple(rng.choice("ab") for _ in range(rng.randint(2, 4)))
    counts = tuple(rng.choice((1, 2, rng.randint(3, 250))) for _ in kinds)
    for place, ways in zip(*ways_of(counts, kinds), strict=True):
        sizes = tuple(counts[number] for number in place)
        for full, some in ways.swapaxes(0, 1).tolist():
            if len(place) > 1:
                assert tuple(full) == filled(0, sum(full), sizes)
                assert tuple(some) == filled(sum(full), sum(some), sizes)
            assert all(f + s <= size for f, s, size in zip(full, some, sizes, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_a_rung_is_a_way_of_every_group(seed: int) -> None:
    rng = random.Random(seed)
    counts = tuple(rng.randint(1, 3) for _ in range(3))
    kinds = ("a", "b", "a")
    places, ways = ways_of(counts, kinds)
    expected = []
    for chosen in product(*(own.swapaxes(0, 1).tolist() for own in ways)):
        full, some = {}, {}
        for place, (first, second) in zip(places, chosen, strict=True):
            full |= dict(zip(place, first, strict=True))
            some |= dict(zip(place, second, strict=True))
        expected.append((tuple(full[n] for n in range(3)), tuple(some[n] for n in range(3))))
    found = rungs(counts, kinds)
    assert [tuple(found[number]) for number in range(len(found.full))] == expected
    assert num_rungs(counts, kinds) == len(expected) == len(set(expected))
