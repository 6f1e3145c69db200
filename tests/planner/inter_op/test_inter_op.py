"""The dynamic program against every cut and every submesh."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from random_suites import seeds
from small_graphs import cluster

from autoparallel.planner.inter_op.cuts import Cuts
from autoparallel.planner.inter_op.inter_op import (
    Floats,
    StageChoice,
    Table,
    least_sum,
    pipeline_seconds,
    pipelines,
)
from autoparallel.planner.inter_op.submesh import submesh_sizes


def random_table(rng: random.Random) -> Table:
    on = cluster(rng.choice((2, 3, 4)), num_hosts=rng.choice((1, 2)))
    num_blocks = rng.randint(2, 5)
    made: dict[tuple[int, int, int], Floats] = {}

    def costs(left: int, first: int, size: int) -> Floats:
        if (left, first, size) not in made:
            matrix = np.full((num_blocks + 1, num_blocks + 1), np.inf)
            for start in range(num_blocks):
                for stop in range(start + 1, num_blocks + 1):
                    if rng.random() < 0.85:
                        length = stop - start
                        matrix[start, stop] = length * rng.uniform(0.5, 2.0) / size
            made[left, first, size] = matrix
        return made[left, first, size]

    return Table(num_blocks, on.num_devices, lambda first: submesh_sizes(on, first), costs)


def every_pipeline(table: Table, num_stages: int) -> Iterator[tuple[StageChoice, ...]]:
    def extend(start: int, first: int, left: int) -> Iterator[tuple[StageChoice, ...]]:
        if left == 0:
            if start == table.num_blocks and first == table.num_devices:
                yield ()
            return
        if first >= table.num_devices:
            return
        for stop in range(start + 1, table.num_blocks + 1):
            for size in table.sizes(first):
                for rest in extend(stop, first + size, left - 1):
                    yield (StageChoice(start, stop, first, size), *rest)

    yield from extend(0, 0, num_stages)


def seconds_of(table: Table, stages: tuple[StageChoice, ...], num_microbatches: int) -> float:
    own = [
        float(table.costs(len(stages) - i, s.first_device, s.num_devices)[s.start, s.stop])
        for i, s in enumerate(stages)
    ]
    return pipeline_seconds(own, num_microbatches) if np.isfinite(own).all() else np.inf


@pytest.mark.parametrize("seed", seeds(12))
def test_it_equals_every_cut_and_submesh(seed: int) -> None:
    rng = random.Random(seed)
    table, num_microbatches = random_table(rng), rng.choice((1, 3, 16))
    numbers = range(1, min(table.num_blocks, table.num_devices) + 1)
    found = {len(p.stages): p for p in pipelines(table, num_microbatches, numbers)}
    for num_stages in numbers:
        every = [seconds_of(table, s, num_microbatches) for s in every_pipeline(table, num_stages)]
        best = min(every, default=np.inf)
        if not np.isfinite(best):
            assert num_stages not in found
            continue
        pipeline = found[num_stages]
        assert pipeline.seconds == pytest.approx(best, rel=1e-12)
        assert seconds_of(table, pipeline.stages, num_microbatches) == pipeline.seconds


def test_balanced_stages_win_with_many_microbatches() -> None:
    """Four equal blocks on two devices: cut in the middle, T = 2·2 + (B − 1)·2."""

    def costs(left: int, first: int, size: int) -> Floats:
        index = np.arange(5.0)
        length = index[None, :] - index[:, None]
        return np.where(length > 0, length / size, np.inf)

    table = Table(4, 2, lambda first: (1, 2) if first == 0 else (1,), costs)
    (best,) = pipelines(table, 10, (2,))
    assert best.stages == (StageChoice(0, 2, 0, 1), StageChoice(2, 4, 1, 1))
    assert best.seconds == 4 + 9 * 2


def test_a_tolerance_costs_at_most_its_share() -> None:
    for seed in range(20):
        table = random_table(random.Random(seed))
        exact = pipelines(table, 8, (2,))
        coarse = pipelines(table, 8, (2,), tolerance=0.05)
        assert bool(exact) == bool(coarse)
        if exact:
            assert coarse[0].seconds <= exact[0].seconds * 1.05


@pytest.mark.parametrize("seed", seeds(12))
def test_no_way_to_cut_the_blocks_has_less_than_the_least_sum(seed: int) -> None:
    rng = random.Random(seed)
    size, number = rng.randint(3, 7), rng.randint(1, 3)
    at = np.arange(size + 1)
    numbers = np.maximum(at[None, :] - at[:, None], 0)
    cuts = Cuts(at, numbers, np.arange(1, size + 2))  # a class for each length, from 1 on
    stages = [
        np.array([rng.uniform(0, 1) + length * rng.uniform(0.9, 1.1) for length in cuts.lengths])
        for _ in range(number)
    ]
    least = min(
        sum(stage[b - a - 1] for stage, a, b in zip(stages, ends, ends[1:], strict=False))
        for inner in combinations(range(1, size), number - 1)
        for ends in ((0, *inner, size),)
    )
    found = least_sum(stages, cuts)
    assert least * 0.5 < found <= least + 1e-9
