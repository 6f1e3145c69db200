"""The recurrence over stages against every pipeline, with and without a bound."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from random_suites import seeds

from autoparallel.planner.inter_op import sweep as sweep_module
from autoparallel.planner.inter_op.cuts import CostTiles, Cuts, Floats, StageBand
from autoparallel.planner.inter_op.sweep import (
    Combine,
    Move,
    Sweep,
    Tiling,
    last_cuts,
    max_cost,
    sum_cost,
    turnaround_cost,
)

Stages = list[tuple[int, int, Move]]
Values = Sequence[Mapping[int, Floats]]


@dataclass(frozen=True)
class Case:
    """A tiling, cuts at some blocks, random seconds of every class by stages left and place."""

    tiling: Tiling
    cuts: Cuts
    made: dict[tuple[int, int, bool], tuple[Floats, Floats]]

    def seconds(self, left: int, place: int, first: bool) -> tuple[Floats, Floats]:
        return self.made[left, place, first]


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    end = rng.randint(1, 4)
    fixed = rng.random() < 0.4
    if fixed:
        moves = [Move(at, at + 1, rng.randint(0, 1), at, 1) for at in range(end)]
    else:
        pairs = [(a, b) for a in range(end) for b in range(a + 1, end + 1)]
        moves = [Move(a, b, b - a - 1, a, b - a) for a, b in pairs if rng.random() < 0.8]
    tiling = Tiling(end, tuple(moves), end, fixed=fixed)
    at = np.cumsum([0] + [rng.randint(1, 3) for _ in range(rng.randint(1, 6))])
    size = len(at)
    lengths = at[None, :] - at[:, None]
    # runs of as many blocks are of one class, but for some
    numbers = np.where(lengths > 0, lengths - 1, 0)
    lengths_of = np.arange(int(at[-1])) + 1
    numbers = np.where(
        (lengths > 0)
        & (np.array([[rng.random() < 0.9 for _ in range(size)] for _ in range(size)])),
        numbers,
        len(lengths_of),
    )
    made = {}
    for left in range(1, end + 1):
        for place in range(max(end, 2)):
            for first in (True, False):
                once = lengths_of * np.array([rng.uniform(0.5, 2) for _ in lengths_of])
                once[[rng.random() < 0.1 for _ in lengths_of]] = np.inf
                made[left, place, first] = once, once * rng.uniform(1, 3)
    return Case(tiling, Cuts(at, numbers, lengths_of), made)


def pipelines(case: Case, num_stages: int) -> Iterator[Stages]:
    def extend(cut: int, position: int, left: int) -> Iterator[Stages]:
        if left == 0:
            if cut == len(case.cuts) - 1 and position == case.tiling.end:
                yield []
            return
        for move in case.tiling.moves:
            if move.start == position and (position == 0) == (cut == 0):
                for stop in range(cut + 1, len(case.cuts)):
                    for rest in extend(stop, move.stop, left - 1):
                        yield [(cut, stop, move), *rest]

    yield from extend(0, 0, num_stages)


def objective(case: Case, stages: Stages, combine: Combine, bound: float) -> float:
    total = 0.0
    for at, (cut, stop, move) in reversed(list(enumerate(stages))):
        once, slowest = case.seconds(len(stages) - at, move.place, at == 0)
        number = int(case.cuts.numbers[cut, stop])
        if number == len(case.cuts.lengths) or not slowest[number] <= bound:
            return np.inf
        own, more = float(once[number]), float(slowest[number])
        total = {
            sum_cost: own + total,
            max_cost: max(more, total),
            turnaround_cost: own + max(more, total),
        }[combine]
    return total


@pytest.mark.parametrize("seed", seeds(12))
def test_a_sweep_has_the_least_of_all_pipelines(seed: int) -> None:
    case = random_case(seed)
    rng = random.Random(seed)
    for combine in (sum_cost, max_cost, turnaround_cost):
        for bound in (np.inf, rng.uniform(3, 20), rng.uniform(1, 8)):
            sweep = Sweep.of(case.tiling, CostTiles(case.cuts, case.seconds, bound), combine)
            numbers = (case.tiling.most,) if case.tiling.fixed else range(1, case.tiling.most + 1)
            for number in numbers:
                every = [objective(case, s, combine, bound) for s in pipelines(case, number)]
                assert sweep.least(number) == pytest.approx(min(every, default=np.inf))
                if sweep.least(number) < np.inf:
                    found = list(sweep.stages(number))
                    own = objective(case, found, combine, bound)
                    assert own == pytest.approx(sweep.least(number))


@pytest.mark.parametrize("seed", seeds(12))
def test_no_pipeline_within_the_bound_has_a_cut_after_the_last(seed: int) -> None:
    case = random_case(seed)
    bound = random.Random(seed).uniform(2, 10)
    most = case.tiling.most
    last = last_cuts(case.tiling, CostTiles(case.cuts, case.seconds, bound), most)
    for number in (most,) if case.tiling.fixed else range(1, most + 1):
        for stages in pipelines(case, number):
            if objective(case, stages, sum_cost, bound) < np.inf:
                assert all(cut <= last[move.start] for cut, _, move in stages)


def test_equal_seconds_share_a_band() -> None:
    case = random_case(1)
    bands = CostTiles(case.cuts, lambda left, place, first: case.seconds(1, 0, True))
    assert bands.stage(1, 0, True) is bands.stage(2, 0, False)


def long_case(seed: int) -> Case:
    """Alike blocks between a first and a last one of their own, cut at all places or at some."""
    rng = random.Random(seed)
    blocks, end = rng.randint(20, 40), rng.randint(2, 5)
    fixed = rng.random() < 0.5
    pairs = [(a, a + 1) for a in range(end)]
    if not fixed:
        pairs = [(a, b) for a in range(end) for b in range(a + 1, end + 1)]
    moves = tuple(Move(a, b, b - a - 1, a, b - a) for a, b in pairs)
    some = sorted(rng.sample(range(1, blocks), 12)) if rng.random() < 0.4 else range(1, blocks)
    at = np.array([0, *some, blocks])
    lengths = at[None, :] - at[:, None]
    kinds = (at == 0)[:, None] + 2 * (at == blocks)[None, :]
    numbers = np.where(lengths > 0, lengths - 1 + blocks * kinds, 4 * blocks)
    lengths_of = np.tile(np.arange(1, blocks + 1), 4)
    made = {}
    for left in range(1, end + 1):
        for place in range(end):
            for first in (True, False):
                once = lengths_of / (place + 1) + np.array([rng.uniform(0, 1) for _ in lengths_of])
                is_other = np.repeat(np.arange(4), blocks) != first + 2 * (left == 1)
                once[is_other | (lengths_of > 16 * (place + 1))] = np.inf
                made[left, place, first] = once, once * rng.uniform(1, 3)
    return Case(Tiling(end, moves, end, fixed=fixed), Cuts(at, numbers, lengths_of), made)


@pytest.mark.parametrize("seed", seeds(12))
def test_strips_come_to_the_same_as_whole_arrays(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, rng = long_case(seed), random.Random(seed)
    in_strips = Sweep._in_strips
    for combine in (sum_cost, max_cost, turnaround_cost):
        for bound in (np.inf, rng.uniform(20, 80)):
            every = []
            for many, strip in ((10**9, 10**9), (0, 7), (0, 100)):
                monkeypatch.setattr(sweep_module, "MANY_CELLS", many)
                monkeypatch.setattr(sweep_module, "STRIP_CELLS", strip)
                monkeypatch.setattr(Sweep, "_in_strips", in_strips if strip < 10**9 else by_rows)
                bands = CostTiles(case.cuts, case.seconds, bound)
                every.append(Sweep.of(case.tiling, bands, combine).values)
            whole, *others = every
            for other in others:
                assert same_where_known(other, whole)
            numbers = [case.tiling.most] if case.tiling.fixed else range(1, case.tiling.most + 1)
            for number in numbers:
                assert len({float(each[number].get(0, [np.inf])[0]) for each in every}) == 1


def same_where_known(found: Values, whole: Values) -> bool:
    """Whether values are the same. Arrays of several moves go on after the last useful cut of
    some: there only they may have one."""
    for own, theirs in zip(found, whole, strict=True):
        for at, values in own.items():
            is_known = np.isfinite(values)
            if not np.array_equal(values[is_known], theirs[at][is_known]):
                return False
    return True


def by_rows(self: Sweep, band: StageBand, cuts: range, later: Any, stop: int) -> Floats:
    """A move's least by whole rows of its band."""
    rows, stops = np.arange(cuts.start, cuts.stop)[None], np.array([stop])
    found: Floats = self.combine(band.rows(rows), later.windows(stops, rows, band.width))
    return found.min(axis=2)[0]
