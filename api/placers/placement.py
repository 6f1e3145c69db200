"""Learned placers: policy gradients over the pipelines that the dynamic program searches.

In: the dynamic program's table and prices, a number of pipelines to price, a seed. Out: the best
pipelines seen, the number of priced pipelines, and the learning curve. Equal arguments give equal
results, unless the time limit ends the search. Methods:

- ``colocrl`` (Mirhoseini et al. 2017): a policy constructs pipelines block after block;
- ``placeto`` (Addanki et al. 2019): a policy improves a pipeline, one block at a time;
- ``random``: random pipelines, as a baseline for learning.

They are baselines. The dynamic program is exact for T = Σ t + (B − 1)·max t, so no placer finds a
faster pipeline; with another price (a simulator's) a placer may.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoparallel.placers import colocrl, placeto
from autoparallel.placers.record import Observe, Progress, Record
from autoparallel.placers.space import Price, Problem, space_of
from autoparallel.planner.inter_op.inter_op import Pipeline, Table

Method = Literal["colocrl", "placeto", "random"]

EVALUATIONS = 2000
"""Default number of pipelines that learning prices."""

RANDOM_BATCH = 10


@dataclass(frozen=True, slots=True)
class Placement:
    """Result of learning to place blocks.

    ``pipelines`` has the best known pipeline for each number of stages, the best first, () if none
    can run. ``num_distinct`` of the ``num_evaluations`` priced pipelines were distinct.
    """

    method: Method
    pipelines: tuple[Pipeline, ...]
    num_evaluations: int
    num_distinct: int
    curve: tuple[Progress, ...]

    @property
    def best(self) -> Pipeline | None:
        return self.pipelines[0] if self.pipelines else None


def place(
    problem: Problem,
    *,
    method: Method = "colocrl",
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    time_limit_seconds: float = math.inf,
    observe: Observe | None = None,
) -> Placement:
    """Learn to divide blocks and devices into stages: ``method`` prices ``evaluations`` pipelines.

    >>> costs = np.array([[np.inf, 1.0, 2.0], [np.inf, np.inf, 1.0], [np.inf] * 3])
    >>> table = Table(2, 2, lambda first: (1, 2 - first), lambda left, first, size: costs / size)
    >>> place(Problem(table, 8, (1, 2)), evaluations=20).best.seconds
    8.0
    """
    deadline = time.perf_counter() + time_limit_seconds
    record = Record(space_of(problem), evaluations, deadline, observe)
    if record.space.numbers:
        rng = np.random.default_rng(seed)
        _learn(method, record, rng)
    found = sorted(record.best.values(), key=lambda each: (each.seconds, len(each.stages)))
    return Placement(
        method, tuple(found), record.num_evaluations, len(record.known), tuple(record.curve)
    )


def _learn(method: Method, record: Record, rng: np.random.Generator) -> None:
    if method == "colocrl":
        colocrl.learn(record, rng)
    elif method == "placeto":
        placeto.learn(record, rng)
    else:
        _random(record, rng)


def _random(record: Record, rng: np.random.Generator) -> None:
    while (left := record.left) > 0:
        for _ in range(min(RANDOM_BATCH, left)):
            record.price(record.space.draw(rng))
        record.mark()


def learned_pipelines(
    table: Table,
    num_microbatches: int,
    stage_numbers: Iterable[int],
    *,
    price: Price | None = None,
    seed: int = 0,
    time_limit_seconds: float = math.inf,
) -> tuple[Pipeline, ...]:
    """Find pipelines by reinforcement learning, for the tables of ``inter_op.pipelines``.

    Returns the best known pipeline for every number of stages, the fastest first. ColocRL and
    Placeto each price ``EVALUATIONS`` pipelines in half of the time; the better result counts.
    """
    problem = Problem(table, num_microbatches, tuple(stage_numbers), price)
    best: dict[int, Pipeline] = {}
    for method in ("colocrl", "placeto"):
        placed = place(problem, method=method, seed=seed, time_limit_seconds=time_limit_seconds / 2)
        for each in placed.pipelines:
            known = best.get(len(each.stages))
            if known is None or each.seconds < known.seconds:
                best[len(each.stages)] = each
    return tuple(sorted(best.values(), key=lambda each: (each.seconds, len(each.stages))))
