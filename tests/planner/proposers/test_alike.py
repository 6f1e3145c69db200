"""Pipelines whose ranks are alike: what candidates of several stages per rank are made of."""

from __future__ import annotations

from dataclasses import replace

from small_graphs import cluster, mlp

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.inter_op.inter_op import Pipeline, StageChoice
from autoparallel.planner.inter_op.submesh import mesh_of
from autoparallel.planner.proposers.interleaved import (
    MOST_BASES,
    alike_pipelines,
    at_other_sizes,
    groups_of_bases,
    is_alike,
    with_one_mesh,
)
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.branch_and_bound import PipelineProposal
from autoparallel.planner.search.candidates import Candidate, build_simulated
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool

SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
STAGES = (StageChoice(0, 4, 0, 2), StageChoice(4, 8, 2, 2))


def job_of(forced: Forced) -> SearchContext:
    return SearchContext.of(
        *mlp(6, rows=8), SLOW, Request(8, forced=forced), rules=rules, basis=DEFAULT
    )


def pipelines_of(job: SearchContext, rows: int) -> list[Candidate]:
    """Two stages on two devices each, under 1F1B and others."""
    pool = CandidatePool(job)
    return list(pool.simulate(PipelineProposal(rows, Pipeline(STAGES, 1.0))))


def mixed(job: SearchContext, rows: int) -> Candidate:
    """The first stage with its rows divided, the second with its weights."""
    count = job.num_microbatches(rows)
    answers = []
    for stage, mesh in zip(STAGES, (mesh_of(2, 1), mesh_of(1, 2)), strict=True):
        solver = job.solvers.on_mesh(rows, mesh, stage.first_device)
        answer = solver.best(job.tables.at(rows).run(stage.start, stage.stop), count, 2)
        assert answer is not None
        answers.append((solver.model, answer))
    return build_simulated(job, rows, "1f1b", STAGES, answers)


def test_a_pipeline_is_alike_if_its_stages_have_one_mesh() -> None:
    job = job_of(Forced(pp=2, dp=2, tp=1, schedule="interleaved"))
    assert all(is_alike(job, each) for each in pipelines_of(job, 2))
    free = job_of(Forced(pp=2, schedule="interleaved"))
    assert not is_alike(free, mixed(free, 2))


def test_pipelines_of_one_mesh_and_micro_batch_size_count_once_the_lightest_first() -> None:
    job = job_of(Forced(pp=2, dp=2, tp=1, schedule="interleaved"))
    pool = CandidatePool(job)
    for rows in (8, 4, 2):
        pool.add_all(pipelines_of(job, rows))
        pool.add_all(pipelines_of(job, rows))
    bases = alike_pipelines(job, pool)
    assert sorted(each.rows for each in bases) == [2, 4, 8]
    assert len(bases) <= MOST_BASES

    def work(base: Candidate) -> float:
        busiest = max(cost.forward_seconds + cost.backward_seconds for cost in base.costs)
        return base.num_microbatches * busiest

    assert [work(each) for each in bases] == sorted(work(each) for each in bases)


def test_candidates_of_other_kinds_are_no_bases() -> None:
    job = job_of(Forced(pp=2, dp=2, tp=1, schedule="interleaved"))
    pool = CandidatePool(job)
    (base, *_) = pipelines_of(job, 2)
    pool.add(replace(base, base=base))
    assert alike_pipelines(job, pool) == []


def test_where_ranks_have_different_meshes_each_of_these_is_tried_on_all() -> None:
    """The second group of bases of a schedule of several stages per rank that is forced."""
    job = job_of(Forced(pp=2, schedule="interleaved"))
    pool = CandidatePool(job)
    pool.add(mixed(job, 2))
    assert alike_pipelines(job, pool) == []
    of_one_mesh = list(with_one_mesh(job, pool))
    meshes = [each.answers[0][0].prices.mesh for each in of_one_mesh]
    assert meshes == [mesh_of(2, 1), mesh_of(1, 2)]
    assert all(is_alike(job, each) and each.stages == STAGES for each in of_one_mesh)
    first, second, third = groups_of_bases(job, pool)
    assert first == []
    assert [each.answers[0][0].prices.mesh for each in second] == meshes
    assert {each.rows for each in third} <= {1, 4, 8}


def test_where_one_stage_per_rank_is_allowed_only_what_was_found_is_used() -> None:
    job = job_of(Forced(pp=2))
    assert len(list(groups_of_bases(job, CandidatePool(job)))) == 1


def test_other_micro_batch_sizes_begin_with_the_next_smaller() -> None:
    job = job_of(Forced(pp=2, dp=2, tp=1, schedule="interleaved"))
    base = pipelines_of(job, 4)[0]
    assert [each.rows for each in at_other_sizes(job, [base])] == [2, 8]
