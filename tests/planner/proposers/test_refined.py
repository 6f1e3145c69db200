"""Plans whose axis "dp" is for more than the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from one_stage import plan
from random_cases import random_case

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.find_plan import ONE_STAGE_PER_RANK
from autoparallel.planner.proposers.refined import free_axes
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool

FASTER = (100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (50, 114)))
"""Seeds of hosts that are alike whose plans are faster so."""


def seconds(seed: int, request: Request) -> float:
    case = random_case(seed)
    return plan(case.graph, case.blocks, case.cluster, request).prediction.step_seconds


@pytest.mark.parametrize("seed", FASTER)
def test_a_plan_with_free_axes_costs_what_it_says_and_is_faster(seed: int) -> None:
    case = random_case(seed)
    found = plan(case.graph, case.blocks, case.cluster, case.request)
    priced = evaluate(case.graph, case.blocks, found, case.cluster)
    assert priced.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)
    assert priced.peak_memory_bytes == pytest.approx(found.prediction.peak_memory_bytes, abs=1)
    kept = seconds(seed, replace(case.request, max_tp=case.cluster.num_devices))
    assert found.prediction.step_seconds < kept


@pytest.mark.slow
@pytest.mark.parametrize("seed", FASTER)
def test_the_search_finds_it_whatever_else_it_has_found(seed: int) -> None:
    """Of one candidate or of many: they are tried as they are found."""
    request = random_case(seed).request
    found = {seconds(seed, replace(request, top=top)) for top in (1, 5, 20)}
    assert len(found) == 1


@pytest.mark.parametrize("seed", FASTER)
def test_candidates_with_free_axes_fit_and_are_faster_than_those_without(seed: int) -> None:
    case = random_case(seed)
    free = plan(case.graph, case.blocks, case.cluster, case.request).prediction
    limit = int(0.8 * free.peak_memory_bytes)
    without = tuple(each for each in ONE_STAGE_PER_RANK if each is not free_axes)
    for own in (case, case.limited(limit)):
        job = SearchContext.of(
            own.graph, own.blocks, own.cluster, own.request, rules=rules, basis=DEFAULT
        )
        pool = CandidatePool(job)
        for propose in without:
            pool.add_all(propose(job, pool))
        found = list(free_axes(job, pool))
        assert found or own is not case
        for candidate in found:
            assert candidate.step_seconds < pool.step_seconds
            assert own is case or candidate.peak_bytes <= limit
