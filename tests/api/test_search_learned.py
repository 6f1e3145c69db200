"""The search by placers that learn (``--search rl``), and that it is no better than the DP's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from one_stage import plan
from random_cases import random_case
from small_graphs import cluster, mlp

from autoparallel.options.plan_options import PlanOptions
from autoparallel.placers.placement import learned_pipelines
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.requests.request import Request

SEEDS = (
    *range(5, 8),
    *(pytest.param(n, marks=pytest.mark.slow) for n in (*range(5), *range(8, 60))),
)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dynamic_program_never_loses_to_learning(seed: int) -> None:
    case = random_case(seed)
    if case.memory_share is not None:
        free = plan(case.graph, case.blocks, case.cluster, case.request)
        case = case.limited(int(case.memory_share * free.prediction.peak_memory_bytes))
    seconds = []
    for placer in (None, learned_pipelines):
        request = replace(case.request, placer=placer)
        try:
            found = plan(case.graph, case.blocks, case.cluster, request)
            seconds.append(found.prediction.step_seconds)
        except InfeasibleError:
            seconds.append(math.inf)
    assert seconds[0] <= seconds[1] * (1 + 1e-9)
    assert math.isfinite(seconds[0]) == math.isfinite(seconds[1])


def test_a_learned_plan_costs_what_it_says_and_tells_how_it_was_found() -> None:
    graph, blocks = mlp(2, rows=8, inner=128)
    found = plan(graph, blocks, cluster(4), Request(8, placer=learned_pipelines))
    again = evaluate(graph, blocks, found, cluster(4))
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)
    assert "learning" in found.solver.seconds


def test_an_unknown_search_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        PlanOptions(search="astrology")
    assert caught.value.code == "AP330"
