"""Pipelines that are looked at besides those of the dynamic program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from brute_force import BruteForce
from one_stage import ranked
from random_cases import Case, random_case
from random_suites import seeds

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.inter_op.inter_op import StageChoice
from autoparallel.planner.proposers.local_search import (
    MOST_FEW,
    bounded_below,
    few_pipelines,
    shift_cuts,
)
from autoparallel.planner.search.candidates import candidates
from autoparallel.planner.search.context import SearchContext


def job_of(case: Case, issue_seconds: float = 0.0) -> SearchContext:
    hosts = [
        replace(host, device=replace(host.device, issue_seconds=issue_seconds))
        for host in case.cluster.hosts
    ]
    on = replace(case.cluster, hosts=tuple(hosts))
    return SearchContext.of(case.graph, case.blocks, on, case.request, rules=rules, basis=DEFAULT)


@pytest.mark.parametrize("seed", seeds(12))
def test_of_few_pipelines_every_one_is_looked_at(seed: int) -> None:
    case = random_case(seed, mixed=False)
    force, job = BruteForce(case.graph, case.blocks, case.cluster, case.request), job_of(case)
    pipelines = list(force.pipelines())
    numbers = tuple(sorted({len(each) for each in pipelines}))
    found = few_pipelines(job, force.rows(), numbers)
    assert found is not None
    cut = {
        (rows, tuple((s.start, s.stop, s.first_device, s.num_devices) for s in stages))
        for rows, stages in found
    }
    assert len(cut) == len(found)
    assert cut == {(rows, each) for rows in force.rows() for each in pipelines}


def test_of_many_pipelines_not_every_one_is_looked_at() -> None:
    case = next(c for c in map(random_case, range(100)) if c.cluster.num_devices == 4)
    rows = [1] * MOST_FEW
    assert few_pipelines(job_of(case), rows, (1, 2)) is None


def test_a_cut_moves_by_one_block_and_no_stage_is_left_without() -> None:
    stages = (StageChoice(0, 1, 0, 2), StageChoice(1, 3, 2, 1), StageChoice(3, 5, 3, 1))
    cuts = [tuple(stage.stop for stage in each) for each in shift_cuts(stages)]
    assert cuts == [(2, 3, 5), (1, 2, 5), (1, 4, 5)]
    for each in shift_cuts(stages):
        assert [s.first_device for s in each] == [0, 2, 3]
        assert [s.num_devices for s in each] == [2, 1, 1]
        assert [s.start for s in each] == [0, *(s.stop for s in each[:-1])]
    assert list(shift_cuts((StageChoice(0, 4, 0, 2),))) == []


@pytest.mark.parametrize("issue_seconds", [1e-5, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", seeds(1))
def test_no_schedule_takes_less_than_a_pipeline_may(seed: int, issue_seconds: float) -> None:
    """Without a limit of memory the stages are the same under every schedule."""
    job = job_of(random_case(seed), issue_seconds)
    batch = job.request.global_batch
    every = few_pipelines(job, [batch, batch // 2], job.stage_numbers)
    assert every is not None
    found = bounded_below(job, every, float("inf"))
    assert len(found) == len(every)
    assert [least for least, _ in found] == sorted(least for least, _ in found)
    for least, proposal in found:
        for each in candidates(job, proposal):
            assert least <= each.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", seeds(1))
def test_no_pipeline_of_few_beats_the_winner(seed: int) -> None:
    """Its stages as the solver gives them, under any schedule, where hosts bind."""
    case = random_case(seed)
    job = job_of(case, 1e-4)
    _, found = ranked(case.graph, case.blocks, job.cluster, case.request)
    every = few_pipelines(job, [case.request.global_batch], job.stage_numbers)
    assert every is not None
    for _, proposal in bounded_below(job, every, found[0].step_seconds):
        for each in candidates(job, proposal):
            assert each.step_seconds >= found[0].step_seconds * (1 - 1e-9)
