"""The placers that learn, against every pipeline, the dynamic program and chance."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from placement_tables import every_pipeline, least, random_problem, seconds_of
from random_suites import seeds

from autoparallel.placers import placeto
from autoparallel.placers.placement import (
    EVALUATIONS,
    Method,
    Placement,
    Problem,
    learned_pipelines,
    place,
)
from autoparallel.placers.record import FEWEST
from autoparallel.planner.inter_op.inter_op import Floats, StageChoice, Table, pipelines

LEARNED: tuple[Method, ...] = ("colocrl", "placeto")
METHODS: tuple[Method, ...] = get_args(Method)


def best_seconds(placement: Placement) -> float:
    return math.inf if placement.best is None else placement.best.seconds


@pytest.mark.parametrize("method", LEARNED)
def test_it_finds_the_best_of_all_pipelines_of_small_cases_in_most_seeds(method: Method) -> None:
    """At most 6 blocks and 4 devices; at least 22 of 24 cases, with fewer than 300 priced."""
    found = 0
    for seed in range(24):
        problem = random_problem(seed)
        got = best_seconds(place(problem, method=method, evaluations=300, seed=seed))
        found += got == pytest.approx(least(problem), rel=1e-12)
    assert found >= 22


def test_no_placer_beats_the_dynamic_program() -> None:
    for seed in seeds(40, 110):
        problem = random_problem(seed, num_blocks=2 + seed % 7)
        found = pipelines(problem.table, problem.num_microbatches, problem.num_stages)
        exact = {len(each.stages): each.seconds for each in found}
        for method in METHODS:
            placement = place(problem, method=method, evaluations=40, seed=seed)
            assert bool(found) == bool(placement.pipelines)
            for each in placement.pipelines:
                assert each.seconds >= exact[len(each.stages)] * (1 - 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_what_it_returns_is_a_pipeline_and_costs_what_it_says(method: Method) -> None:
    for seed in range(25):
        problem = random_problem(seed, possible=0.6)
        placement = place(problem, method=method, evaluations=60, seed=seed)
        for each in placement.pipelines:
            assert each.stages in set(every_pipeline(problem.table, len(each.stages)))
            assert each.seconds == pytest.approx(seconds_of(problem, each.stages), rel=1e-12)
            assert math.isfinite(each.seconds)


@pytest.mark.parametrize("method", METHODS)
def test_no_pipeline_that_cannot_be_run_is_priced(method: Method) -> None:
    problem = random_problem(3, num_blocks=6, host=4, possible=0.6)
    priced: list[tuple[StageChoice, ...]] = []

    def price(stages: tuple[StageChoice, ...]) -> float:
        priced.append(stages)
        return seconds_of(problem, stages)

    asked = Problem(problem.table, problem.num_microbatches, problem.num_stages, price)
    placement = place(asked, method=method, evaluations=200)
    assert len(priced) == len(set(priced)) == placement.num_distinct > 1
    assert all(math.isfinite(seconds_of(problem, stages)) for stages in priced)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_answer(method: Method) -> None:
    problem = random_problem(5, num_blocks=8, host=4, possible=1.0)
    one, same, other = (
        place(problem, method=method, evaluations=120, seed=seed) for seed in (7, 7, 8)
    )
    assert one == same
    assert one.curve != other.curve


def log_seconds(method: Method, num_cases: int, evaluations: int = 1000) -> Floats:
    """log T of what a method found, by case: 30 blocks on 8 devices, millions of pipelines."""
    found = []
    for seed in range(num_cases):
        problem = random_problem(
            seed, num_blocks=30, host=8, possible=1.0, noise=0.0, num_microbatches=16
        )
        placement = place(problem, method=method, evaluations=evaluations, seed=seed)
        found.append(math.log(best_seconds(placement)))
    return np.array(found)


@pytest.mark.slow
def test_colocrl_beats_chance_by_more_than_three_standard_errors() -> None:
    """Paired by case, 500 pipelines priced by each."""
    gain = log_seconds("random", 8, 500) - log_seconds("colocrl", 8, 500)
    assert gain.mean() > 0.05
    assert gain.mean() > 3 * gain.std(ddof=1) / math.sqrt(len(gain))


@pytest.mark.slow
def test_placeto_trained_beats_itself_untrained_by_more_than_two_standard_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = log_seconds("placeto", 8, 1500)
    monkeypatch.setattr(placeto, "LEARNING_RATE", 0.0)
    gain = log_seconds("placeto", 8, 1500) - trained
    assert gain.mean() > 2 * gain.std(ddof=1) / math.sqrt(len(gain))


def test_what_colocrl_draws_improves_and_not_only_the_best_of_it() -> None:
    ratios = []
    for seed in range(6):
        problem = random_problem(seed, num_blocks=12, host=4, possible=1.0)
        curve = place(problem, method="colocrl", evaluations=800, seed=seed).curve
        fifth = len(curve) // 5
        first = np.mean([point.mean_seconds for point in curve[:fifth]])
        last = np.mean([point.mean_seconds for point in curve[-fifth:]])
        ratios.append(math.log(last / first))
    assert np.mean(ratios) + 2 * np.std(ratios, ddof=1) / math.sqrt(len(ratios)) < 0


def test_it_learns_from_the_price_that_it_is_given() -> None:
    """Priced by the number of stages, four stages of four are the best; by T they are not."""
    problem = random_problem(5, num_blocks=6, host=4, possible=1.0)
    priced = Problem(problem.table, 1, problem.num_stages, lambda stages: 5.0 - len(stages))
    for method in LEARNED:
        best = place(priced, method=method, evaluations=100).best
        assert best is not None
        assert (len(best.stages), best.seconds) == (4, 1.0)


def test_a_step_that_the_simulator_refuses_is_never_the_best() -> None:
    problem = random_problem(5, num_blocks=6, host=4, possible=1.0)

    def price(stages: tuple[StageChoice, ...]) -> float:
        return math.inf if len(stages) != 2 else seconds_of(problem, stages)

    asked = Problem(problem.table, problem.num_microbatches, problem.num_stages, price)
    for method in METHODS:
        placement = place(asked, method=method, evaluations=200)
        assert [len(each.stages) for each in placement.pipelines] == [2]


def test_a_table_without_a_pipeline_gives_none() -> None:
    table = Table(2, 2, lambda first: (1, 2 - first), lambda *_: np.full((3, 3), np.inf))
    placement = place(Problem(table, 4, (1, 2)))
    assert (placement.best, placement.num_evaluations) == (None, 0)
    assert learned_pipelines(table, 4, (1, 2)) == ()


def test_evaluations_and_time_are_limits() -> None:
    problem = random_problem(5, num_blocks=8, host=4, possible=1.0)
    for method in METHODS:
        assert place(problem, method=method, evaluations=33).num_evaluations <= 33
        hurried = place(problem, method=method, time_limit_seconds=0.0)
        assert hurried.pipelines
        assert FEWEST <= hurried.num_evaluations < 100


def test_it_ends_when_every_pipeline_was_priced() -> None:
    problem = random_problem(5, num_blocks=3, host=2, possible=1.0)
    number = sum(len(list(every_pipeline(problem.table, n))) for n in problem.num_stages)
    for method in METHODS:
        placement = place(problem, method=method)
        assert placement.num_distinct == number
        assert placement.num_evaluations < EVALUATIONS
        assert best_seconds(placement) == pytest.approx(least(problem), rel=1e-12)


def test_the_curve_never_rises_and_is_observed() -> None:
    problem = random_problem(5, num_blocks=8, host=4, possible=1.0)
    for method in METHODS:
        seen: list[tuple[str, float, float]] = []
        placement = place(
            problem, method=method, evaluations=100, observe=lambda *told, to=seen: to.append(told)
        )
        best = [point.best_seconds for point in placement.curve]
        assert best == sorted(best, reverse=True)
        assert [done for _, done, _ in seen] == [point.num_evaluations for point in placement.curve]
        assert best[-1] == best_seconds(placement)


def test_as_a_drop_in_for_the_dynamic_program_it_is_never_better() -> None:
    problem = random_problem(9, num_blocks=6, host=4)
    table, count, numbers = problem.table, problem.num_microbatches, problem.num_stages
    exact = {len(each.stages): each.seconds for each in pipelines(table, count, numbers)}
    found = learned_pipelines(table, count, numbers)
    assert {len(each.stages) for each in found} == set(exact)
    assert all(each.seconds >= exact[len(each.stages)] * (1 - 1e-12) for each in found)
    assert list(found) == sorted(found, key=lambda each: each.seconds)
