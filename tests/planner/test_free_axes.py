"""Plans whose axis "dp" is for more than the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from one_stage import plan
from random_cases import random_case

from autoparallel.planner import rules
from autoparallel.planner.evaluate import evaluate
from autoparallel.planner.inter_op.inter_op import StageChoice
from autoparallel.planner.pricing.basis import DEFAULT
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.free_axes import free_candidates
from autoparallel.planner.search.job import Job

FASTER = (6, 50, 100, 114)
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


@pytest.mark.parametrize("seed", FASTER)
def test_the_search_finds_it_whatever_else_it_has_found(seed: int) -> None:
    """Of one candidate or of many: they were tried in the order of what they take as they are."""
    request = random_case(seed).request
    found = {seconds(seed, replace(request, top=top)) for top in (1, 5, 20)}
    assert len(found) == 1


@pytest.mark.parametrize("seed", FASTER)
def test_candidates_fit_and_none_is_faster_than_the_plan(seed: int) -> None:
    case = random_case(seed)
    free = plan(case.graph, case.blocks, case.cluster, case.request).prediction
    limit = int(0.8 * free.peak_memory_bytes)
    for own in (case, case.limited(limit)):
        job = Job.of(own.graph, own.blocks, own.cluster, own.request, rules=rules, basis=DEFAULT)
        batch = own.request.global_batch
        whole = StageChoice(0, len(own.blocks.blocks), 0, own.cluster.num_devices)
        every = [(rows, (whole,)) for rows in (batch, batch // 2)]
        found = list(free_candidates(job, every, lambda: float("inf")))
        if own is case:
            assert found
            assert min(each.step_seconds for each in found) >= free.step_seconds * (1 - 1e-9)
        else:
            assert max((each.peak_bytes for each in found), default=0) <= limit
