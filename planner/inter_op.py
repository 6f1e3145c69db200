"""The pipeline: which blocks make a stage, on how many devices each.

In: the cost of every run of blocks on every submesh at every position. Out: the stages
that minimize

    T = Σ_i t_i + (B − 1)·max_i t_i

over runs of blocks and submeshes that tile all devices in order (Zheng et al. 2022, Alpa,
equations 2 to 4). For each bound t_max on a stage's cost, from the smallest,

    F(s, k, d) = min over i, n of  t(k..i, n at d, s) + F(s − 1, i, d + n),  t ≤ t_max

is the least sum for the blocks from k on, on the devices from d on, in s stages. T is taken
with the stages' own maximum. No bound above the best T divided by B can win. The number s of
stages still to come gives the micro-batches in flight, hence the memory, of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The blocks ``start`` to ``stop`` (exclusive) on ``num_devices`` from ``first_device``."""

    start: int
    stop: int
    first_device: int
    num_devices: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and T."""

    stages: tuple[StageChoice, ...]
    seconds: float


@dataclass(frozen=True)
class Table:
    """What the DP asks: sizes of submeshes at a device, and stage costs.

    ``costs(stages_left, first_device, num_devices)`` is the matrix t[k, i] of runs of blocks
    k to i − 1, infinite where impossible.
    """

    num_blocks: int
    num_devices: int
    sizes: Callable[[int], Sequence[int]]
    costs: Callable[[int, int, int], Floats]


def pipelines(
    table: Table, num_microbatches: int, num_stages: Iterable[int], *, tolerance: float = 0.0
) -> tuple[Pipeline, ...]:
    """For each number of stages the best pipeline, if there is one; the best first.

    ``tolerance`` takes bounds within that factor of each other as the largest of them: T is
    then within it of the best.
    """
    found = []
    for stages in num_stages:
        best = _best(table, num_microbatches, stages, tolerance)
        if best is not None:
            found.append(best)
    return tuple(sorted(found, key=lambda pipeline: (pipeline.seconds, len(pipeline.stages))))


def _best(
    table: Table, num_microbatches: int, num_stages: int, tolerance: float
) -> Pipeline | None:
    entries = _entries(table, num_stages)
    bounds = np.unique(
        np.concatenate([cost[np.isfinite(cost)] for _, _, _, cost in entries] or [np.empty(0)])
    )
    best: Pipeline | None = None
    index = 0
    while index < len(bounds):
        if best is not None and num_microbatches * bounds[index] >= best.seconds:
            break
        end = int(np.searchsorted(bounds, bounds[index] * (1 + tolerance), side="right"))
        index = max(end, index + 1)
        stages = _within(table, entries, num_stages, float(bounds[index - 1]))
        if stages is None:
            continue
        seconds = _seconds(entries, stages, num_microbatches)
        if best is None or seconds < best.seconds:
            best = Pipeline(stages, seconds)
    return best


def _entries(table: Table, num_stages: int) -> list[tuple[int, int, int, Floats]]:
    """(stages left, first device, devices, costs), only where the ends can be reached."""
    found = []
    for left in range(1, num_stages + 1):
        for first in range(table.num_devices):
            if (left == num_stages) != (first == 0):
                continue
            for size in table.sizes(first):
                ends = first + size == table.num_devices
                if first + size > table.num_devices or ends != (left == 1):
                    continue
                cost = table.costs(left, first, size)
                if np.isfinite(cost).any():
                    found.append((left, first, size, cost))
    return found


def _within(
    table: Table,
    entries: Sequence[tuple[int, int, int, Floats]],
    num_stages: int,
    bound: float,
) -> tuple[StageChoice, ...] | None:
    """The stages of least sum whose costs keep to the bound."""
    blocks = table.num_blocks
    done = np.full(blocks + 1, np.inf)
    done[blocks] = 0.0
    value: dict[tuple[int, int], Floats] = {(0, table.num_devices): done}
    choice: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for left, first, size, cost in entries:
        after = value.get((left - 1, first + size))
        if after is None:
            continue
        total = np.where(cost <= bound, cost, np.inf) + after[None, :]
        stop = np.argmin(total, axis=1)
        least = total[np.arange(blocks + 1), stop]
        key = (left, first)
        if key not in value:
            value[key] = np.full(blocks + 1, np.inf)
            nothing = np.zeros(blocks + 1, dtype=np.int64)
            choice[key] = nothing, nothing.copy()
        better = least < value[key]
        value[key][better] = least[better]
        choice[key][0][better] = stop[better]
        choice[key][1][better] = size
    if not np.isfinite(value.get((num_stages, 0), np.full(1, np.inf))[0]):
        return None
    stages, start, first = [], 0, 0
    for left in range(num_stages, 0, -1):
        stops, sizes = choice[left, first]
        stop_at, taken = int(stops[start]), int(sizes[start])
        stages.append(StageChoice(start, stop_at, first, taken))
        start, first = stop_at, first + taken
    return tuple(stages)


def _seconds(
    entries: Sequence[tuple[int, int, int, Floats]],
    stages: Sequence[StageChoice],
    num_microbatches: int,
) -> float:
    cost = {(left, first, size): matrix for left, first, size, matrix in entries}
    own = [
        float(cost[len(stages) - s, stage.first_device, stage.num_devices][stage.start, stage.stop])
        for s, stage in enumerate(stages)
    ]
    return pipeline_seconds(own, num_microbatches)


def pipeline_seconds(stage_seconds: Sequence[float], num_microbatches: int) -> float:
    """T = Σ t + (B − 1)·max t.

    >>> pipeline_seconds((1.0, 2.0), 3)
    7.0
    """
    return sum(stage_seconds) + (num_microbatches - 1) * max(stage_seconds)
