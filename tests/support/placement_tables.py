"""Random problems for placers, and all of their pipelines."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from autoparallel.placers.space import Problem
from autoparallel.planner.inter_op.inter_op import Floats, StageChoice, Table, pipeline_seconds


def sizes(first: int, host: int, num_devices: int) -> tuple[int, ...]:
    """Divisors of a host's devices, aligned to themselves, or whole hosts."""
    offset = first % host
    found = [n for n in range(1, host + 1) if host % n == offset % n == 0]
    return tuple(found) + tuple(
        range(2 * host, num_devices - first + 1, host) if not offset else ()
    )


def random_problem(
    seed: int,
    *,
    num_blocks: int | None = None,
    host: int | None = None,
    possible: float = 0.9,
    noise: float = 0.1,
    num_microbatches: int | None = None,
) -> Problem:
    """Blocks of unequal work on devices of unequal speed; some runs are impossible."""
    rng = random.Random(seed)
    host = host or rng.choice((1, 2, 3, 4))
    num_blocks = num_blocks or rng.randint(2, 6)
    num_devices = host * (rng.choice((1, 2)) if host <= 2 else 1)
    work = [rng.uniform(0.3, 2.0) for _ in range(num_blocks)]
    speed = [rng.choice((1.0, 1.0, 0.4)) for _ in range(num_devices)]
    made: dict[tuple[int, int, int], Floats] = {}

    def costs(left: int, first: int, size: int) -> Floats:
        if (left, first, size) not in made:
            matrix = np.full((num_blocks + 1, num_blocks + 1), np.inf)
            for start in range(num_blocks):
                for stop in range(start + 1, num_blocks + 1):
                    if rng.random() < possible:
                        slowest = min(speed[first : first + size])
                        seconds = sum(work[start:stop]) / (slowest * size**0.8)
                        matrix[start, stop] = (seconds + 0.1) * rng.uniform(1 - noise, 1 + noise)
            made[left, first, size] = matrix
        return made[left, first, size]

    table = Table(num_blocks, num_devices, lambda first: sizes(first, host, num_devices), costs)
    for left in range(1, num_devices + 1):  # in one order, whoever asks first
        for first in range(num_devices):
            for size in table.sizes(first):
                costs(left, first, size)
    numbers = tuple(range(1, min(num_blocks, num_devices) + 1))
    return Problem(table, num_microbatches or rng.choice((1, 4, 16)), numbers)


def every_pipeline(table: Table, left: int) -> Iterator[tuple[StageChoice, ...]]:
    def extend(start: int, first: int, left: int) -> Iterator[tuple[StageChoice, ...]]:
        if left == 0:
            if (start, first) == (table.num_blocks, table.num_devices):
                yield ()
            return
        if first < table.num_devices:
            for stop in range(start + 1, table.num_blocks + 1):
                for size in table.sizes(first):
                    for rest in extend(stop, first + size, left - 1):
                        yield (StageChoice(start, stop, first, size), *rest)

    yield from extend(0, 0, left)


def seconds_of(problem: Problem, stages: tuple[StageChoice, ...]) -> float:
    own = [
        float(problem.table.costs(len(stages) - i, s.first_device, s.num_devices)[s.start, s.stop])
        for i, s in enumerate(stages)
    ]
    return pipeline_seconds(own, problem.num_microbatches) if np.isfinite(own).all() else np.inf


def least(problem: Problem) -> float:
    """T of the best of all pipelines, by trying each."""
    return min(
        seconds_of(problem, stages)
        for number in problem.num_stages
        for stages in every_pipeline(problem.table, number)
    )
