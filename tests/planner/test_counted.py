"""Bounds that count blocks: against every pipeline of random stages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoparallel.cost_model.shorthand import parse_cluster
from autoparallel.planner.inter_op.sweep import Move, Tiling
from autoparallel.planner.search.counted import LEVELS, counted_bounds
from autoparallel.planner.search.space import mixed_tiling, uniform_tiling

LENGTHS = np.arange(1, 8)
"""Blocks of each class: of seven blocks every run of one length is alike."""


def least_of_all(
    tiling: Tiling, seconds: dict[tuple[int, int, bool], np.ndarray]
) -> dict[int, float]:
    """By number of stages the least of the largest stage, over every tiling and cut."""
    found: dict[int, float] = {}

    def go(position: int, blocks: int, stages: tuple[tuple[Move, int], ...]) -> None:
        if position == tiling.end:
            if blocks == LENGTHS[-1] and not (tiling.fixed and len(stages) != tiling.most):
                most = max(
                    seconds[len(stages) - at, move.place, at == 0][length - 1]
                    for at, (move, length) in enumerate(stages)
                )
                found[len(stages)] = min(found.get(len(stages), np.inf), float(most))
            return
        for move in tiling.moves:
            if move.start == position and len(stages) < tiling.most:
                for length in range(1, LENGTHS[-1] - blocks + 1):
                    go(move.stop, blocks + length, (*stages, (move, length)))

    go(0, 0, ())
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_the_least_but_for_a_step_of_the_levels(seed: int) -> None:
    rng = random.Random(seed)
    cluster = parse_cluster(rng.choice(("4xH100", "2x2xH100", "1x3xH100", "2x3xH100")))
    places: dict[int, int] = {}

    def place(first: int, size: int) -> int:
        return places.setdefault(size, len(places))

    number = cluster.num_devices
    tiling = mixed_tiling(cluster, min(4, number), place)
    if rng.random() < 0.3:
        found = uniform_tiling(cluster, 2 if number % 2 == 0 else 3, place)
        assert found is not None
        tiling = found
    seconds = {
        (left, own, first): np.cumsum([rng.uniform(0.1, 2.0) for _ in LENGTHS])
        for left in range(1, tiling.most + 1)
        for own in places.values()
        for first in (True, False)
    }
    best = least_of_all(tiling, seconds)
    low, high = 0.01, 100.0
    bounds = counted_bounds(tiling, LENGTHS, lambda *where: seconds[where], low=low, high=high)
    step = (high / low) ** (1 / (LEVELS - 1))
    assert set(best) <= set(bounds)
    for stages, least in best.items():
        assert least / step * (1 - 1e-9) <= bounds[stages] <= least * (1 + 1e-9)
    for stages in set(bounds) - set(best):
        if not tiling.fixed:
            assert bounds[stages] == high


def test_places_without_a_mesh_are_left_out() -> None:
    tiling = mixed_tiling(parse_cluster("2xH100"), 2, lambda first, size: size - 1)

    def taken(left: int, place: int, first: bool) -> np.ndarray | None:
        return None if place == 1 else np.cumsum(np.ones(7))

    bounds = counted_bounds(tiling, LENGTHS, taken, low=0.1, high=10.0)
    assert bounds[1] == 10.0
    assert bounds[2] == pytest.approx(4.0, rel=0.03)
