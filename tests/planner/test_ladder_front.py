"""A ladder without its useless rungs has the best one for every limit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoparallel.planner.pricing.ladder import Rungs, num_rungs, rungs
from autoparallel.planner.pricing.ladder_front import MOST_RUNGS, Blocks, front

KINDS = ("stem", "layer", "layer", "wide", "narrow", "head")
COUNTS = (1, 6, 2, 3, 1, 1)


def blocks(seed: int) -> Blocks:
    rng = np.random.default_rng(seed)
    number = len(KINDS)
    seconds = rng.uniform(1, 3, number) * np.array([[1.0], [0.4]])
    kept = -rng.uniform(1, 3, number) * np.array([[1.0], [0.5]])
    return Blocks(seconds, kept, rng.integers(0, 4, (2, 3, number)).astype(float))


def figures(on: Rungs, given: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        on.sums(*given.seconds),
        on.sums(*given.kept_bytes),
        on.most(given.transient_bytes[0], given.transient_bytes[1]),
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("modes", [("full", "selective"), ("full",), ("selective",), ()])
def test_for_every_limit_the_best_rung_is_left(seed: int, modes: tuple[str, ...]) -> None:
    given = blocks(seed)
    every, some = rungs(COUNTS, KINDS), front(COUNTS, KINDS, given)
    assert len(some.full) < len(every.full)
    best = []
    rng = random.Random(seed)
    limits = [rng.uniform(-30, 4) for _ in range(40)]
    for on in (every, some):
        seconds, kept, transient = figures(on, given)
        allowed = on.within(modes)
        best.append([
            np.where((held + in_flight * kept <= limit) & allowed, seconds, np.inf).min()
            for held in transient for in_flight in (1, 3) for limit in limits
        ])  # fmt: skip
    assert best[1] == pytest.approx(best[0])
    assert np.isfinite(best[0]).any()


def test_the_first_rung_recomputes_nothing_and_all_blocks_alike_may_be_forced() -> None:
    found = front(COUNTS, KINDS, blocks(0))
    assert found[0] == ((0,) * 6, (0,) * 6)
    listed = [tuple(found[number]) for number in range(len(found.full))]
    assert (COUNTS, (0,) * 6) in listed
    assert ((0,) * 6, COUNTS) in listed


def test_of_many_kinds_few_rungs_are_left() -> None:
    rng = np.random.default_rng(1)
    kinds = tuple(f"layers.{n}" for n in range(10))
    seconds = rng.uniform(1, 3, 10) * np.array([[1.0], [0.5]])
    given = Blocks(seconds, -seconds, rng.integers(0, 9, (2, 4, 10)).astype(float))
    counts = (1, 2, 1, 3, 1, 22, 1, 2, 1, 1)
    assert num_rungs(counts, kinds) > 1_000_000
    assert len(front(counts, kinds, given).full) < 4 * MOST_RUNGS
