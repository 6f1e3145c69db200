"""The planner's answer is the best there is: against every plan of random small cases."""

from __future__ import annotations

import math
from functools import cache

import pytest
from brute_force_shares import Shared
from random_cases import Case, random_case, where_compute_counts
from solved_cases import SAME, Solved, assert_is_the_best, best_of_all, found_plan, with_limit

from autoparallel.planner.evaluate import evaluate

NUM_CASES = 200
SAMPLE = 40
"""Cases that are no slow tests."""

SEEDS = [
    *range(SAMPLE),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SAMPLE, NUM_CASES)),
]


@cache
def solved(seed: int) -> Solved:
    case = with_limit(random_case(seed))
    found = found_plan(case)
    below = math.inf if found is None else found.prediction.step_seconds * (1 + 1e-6)
    return Solved(case, found, best_of_all(case, below=below))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_the_fastest_there_is(seed: int) -> None:
    assert_is_the_best(solved(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_costs_what_it_says_and_fits(seed: int) -> None:
    own = solved(seed)
    if own.found is not None:
        case, limit = own.case, own.case.request.memory_limit_bytes
        priced = evaluate(case.graph, case.blocks, own.found, case.cluster)
        assert priced.step_seconds == pytest.approx(own.seconds, rel=SAME)
        assert limit is None or priced.peak_memory_bytes <= limit


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gap_is_never_smaller_than_it_is(seed: int) -> None:
    """No plan is further below the planner's than its gap allows."""
    own = solved(seed)
    if own.found is not None and own.best is not None:
        assert own.best.step_seconds >= own.seconds * (1 - own.found.solver.gap) * (1 - SAME)


@pytest.mark.parametrize("seed", [57, 101])
def test_a_plan_outside_of_the_space_is_the_fastest_where_dp_may_do_anything(seed: int) -> None:
    """On few enough devices and layouts to try those of the free axes too."""
    own = solved(seed)
    assert own.found is not None
    assert own.best is None
    best = best_of_all(own.case, below=own.seconds * (1 + 1e-6), free=True)
    assert best is not None
    assert own.seconds == pytest.approx(best.step_seconds, rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_CASES, 5 * NUM_CASES))
def test_the_plan_is_the_fastest_of_many_more(seed: int) -> None:
    assert_is_the_best(solved(seed))


@pytest.mark.parametrize(
    ("seed", "shares"), [(15, (3, 1)), (20, (1, 3)), (24, (3, 5)), (38, (1, 3)), (12, (1, 1, 6))]
)
def test_a_plan_with_unequal_shares_is_the_fastest_there_is(
    seed: int, shares: tuple[int, ...]
) -> None:
    """Of random cases, some of whose memory binds, some with "tp" that splits no odd rows."""
    case = with_limit(where_compute_counts(random_case(seed, mixed=True)))
    found, best = found_plan(case), best_of_all(case)
    assert found is not None
    assert isinstance(best, Shared), best
    assert found.prediction.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    assert found.stages[0].shares == shares
    priced = evaluate(case.graph, case.blocks, found, case.cluster)
    assert priced.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)


def test_the_cases_are_of_every_sort() -> None:
    """Devices that differ, memory that binds, uneven hosts, shared weights, 2 to 5 blocks."""
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    assert sum(case.is_mixed for case in cases) >= 50
    assert sum(case.memory_share is not None for case in cases) >= 100
    assert {case.cluster.num_devices for case in cases} == {1, 2, 3, 4}
    assert {len(case.blocks.blocks) for case in cases} == {2, 3, 4, 5}
    assert sum(_shares_weights(case) for case in cases) >= 30


def _shares_weights(case: Case) -> bool:
    graph = case.graph
    return any(len(graph.users[node.name]) > 1 for node in graph.parameters)
