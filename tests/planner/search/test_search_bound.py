"""No plan is faster than the bound: of pipelines, of large spaces, of searches that end early."""

from __future__ import annotations

import random
from functools import cache

import pytest
from figures import simulate_figures
from one_stage import plan, ranked
from random_cases import random_case
from random_suites import seeds
from small_graphs import cluster, mlp

from autoparallel.planner.errors import InfeasibleError, TimeLimitError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.options import microbatch_rows
from autoparallel.planner.requests.request import SCHEDULES, Request
from autoparallel.planner.schedules.held import splits
from autoparallel.planner.search.bound import lower_bound, work_bound
from autoparallel.planner.search.candidates import least_seconds

SAME = 1 + 1e-9
WHOLE = Features(frozenset({"zb-h1", "zb-h2"}))
"""Backwards in one: the bound of a large space of split ones is loose."""

SHAPES = (None, ((0, 2, 1.0), (1, 2, 0.5), (2, 3, 1.0)), ((0, 1, 1.0), (0, 2, 2.0), (2, 3, 1.0)))


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("edges", SHAPES)
def test_no_schedule_is_faster_than_the_bound_of_a_pipeline(
    seed: int, edges: tuple[tuple[int, int, float], ...] | None
) -> None:
    rng = random.Random(seed)
    figures = [tuple(rng.random() * rng.choice((0.1, 1, 5)) for _ in range(5)) for _ in range(4)]
    count = rng.choice((1, 2, 3, 8))
    least = least_seconds(figures, count, edges)
    for schedule in SCHEDULES:
        if not splits(schedule):
            assert simulate_figures(schedule, count, figures, edges=edges) * SAME >= least


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_no_schedule_of_split_backwards_is_faster_than_their_bound(
    schedule: str, seed: int
) -> None:
    rng = random.Random(seed)
    number, count = rng.choice((2, 3, 4)), rng.choice((1, 2, 3, 8))
    figures = [
        tuple(rng.random() * rng.choice((0.1, 1, 5)) for _ in range(6)) for _ in range(number)
    ]
    found = simulate_figures(schedule, count, figures)
    assert found * SAME >= least_seconds(figures, count)


def test_split_backwards_that_nothing_waits_for_take_their_bound() -> None:
    """One micro-batch: both forwards, both first halves, and the first stage's weights."""
    figures = [(1.0, 1.0, 0.0, 0.0, 0.5, 2.0), (1.0, 1.0, 0.25, 0.25, 0.5, 1.0)]
    assert least_seconds(figures, 1) == pytest.approx(1 + 0.25 + 1 + 1 + 0.25 + 1 + 2 + 0.5)
    assert simulate_figures("zb-h1", 1, figures) == least_seconds(figures, 1)


def test_equal_stages_without_messages_take_just_the_bound() -> None:
    """1F1B of D equal stages and N micro-batches takes (N + D - 1)·(f + b) + e."""
    figures = [(1.0, 2.0, 0.0, 0.0, 0.5)] * 3
    assert least_seconds(figures, 4) == pytest.approx(6 * 3 + 0.5)
    assert simulate_figures("1f1b", 4, figures) == pytest.approx(6 * 3 + 0.5)


@pytest.mark.parametrize("seed", seeds(6))
def test_the_bound_is_between_that_of_the_work_and_the_best_step(seed: int) -> None:
    """With memory that binds or not."""
    case = random_case(seed, mixed=False)

    def check(request: Request) -> int:
        try:
            job, found = ranked(case.graph, case.blocks, case.cluster, request)
        except InfeasibleError:
            return 0
        rows = microbatch_rows(job.structure.graph, request, case.cluster)
        assert 0 < work_bound(job, rows) <= lower_bound(job) <= found[0].step_seconds * SAME
        return found[0].peak_bytes

    peak_bytes = check(case.request)
    if case.memory_share is not None and peak_bytes:
        check(case.limited(int(case.memory_share * peak_bytes)).request)


@pytest.mark.parametrize("rate", [1e8, 1e10, 1e12])
@pytest.mark.parametrize("samples", [1, 4])
def test_the_bound_holds_if_the_samples_of_a_rank_are_given(samples: int, rate: float) -> None:
    """Micro-batches of several sizes then have no mesh in common."""
    on, request = cluster(4, bytes_per_second=rate), Request(16, microbatch_size=samples)
    job, found = ranked(*mlp(3, rows=16, width=32, inner=64), on, request)
    assert 0 < lower_bound(job) <= found[0].step_seconds * SAME


def test_on_one_device_the_bound_is_the_step() -> None:
    """Nothing waits for anything, and nothing is sent."""
    graph, blocks = mlp(3, rows=8)
    found = plan(graph, blocks, cluster(1), Request(8), is_bounded=True)
    assert found.solver.bound_seconds == pytest.approx(found.prediction.step_seconds)


def test_memory_that_binds_raises_the_bound() -> None:
    graph, blocks = mlp(3, rows=8)
    free = plan(graph, blocks, cluster(1), Request(8), is_bounded=True)
    limit = int(0.9 * free.prediction.peak_memory_bytes)
    request = Request(8, memory_limit_bytes=limit)
    tight = plan(graph, blocks, cluster(1), request, is_bounded=True)
    assert tight.prediction.step_seconds > free.prediction.step_seconds
    assert free.solver.bound_seconds < tight.solver.bound_seconds <= tight.prediction.step_seconds


def test_with_no_time_left_the_bound_is_that_of_the_work() -> None:
    graph, blocks = mlp(3, rows=8)
    job, _found = ranked(graph, blocks, cluster(2), Request(8))
    job.budget.deadline = 0.0
    rows = microbatch_rows(graph, Request(8), cluster(2))
    assert 0 < lower_bound(job) == work_bound(job, rows)


def assert_is_honest(found: Plan, best: float) -> None:
    solver, step = found.solver, found.prediction.step_seconds
    assert solver.bound_seconds <= best * SAME
    assert step >= best / SAME
    assert solver.gap == pytest.approx(1 - solver.bound_seconds / step)


MODEL = mlp(2, rows=8)


def interrupted(after: int) -> Plan:
    """The plan of a search that hears Ctrl-C at that call of its observer."""
    calls = 0

    def observe(what: str, done: float, total: float) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt

    return plan(*MODEL, cluster(3), Request(8, features=WHOLE), is_bounded=True, observe=observe)


@cache
def whole() -> Plan:
    return interrupted(10**6)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_an_interrupted_search_gives_the_best_so_far_and_a_true_gap(after: int) -> None:
    assert whole().solver.stopped == ""
    found = interrupted(after)
    assert found.solver.stopped
    assert_is_honest(found, whole().prediction.step_seconds)


def test_a_search_interrupted_before_it_found_anything_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(0)


@pytest.mark.parametrize("limit", [0.01, 0.05, 0.15])
def test_a_search_out_of_time_gives_the_best_so_far_and_a_true_gap(limit: float) -> None:
    best = whole().prediction.step_seconds
    request = Request(8, time_limit_seconds=limit, features=WHOLE)
    try:
        found = plan(*MODEL, cluster(3), request, is_bounded=True)
    except TimeLimitError:
        return
    assert_is_honest(found, best)
