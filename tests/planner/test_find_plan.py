"""The proposers one by one, and the check of a plan before it is returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.errors import InternalError
from autoparallel.planner.find_plan import (
    COARSE,
    PROPOSERS,
    Proposer,
    SearchMethod,
    check_prediction,
    plan,
    search,
)
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.inter_op.inter_op import Pipeline, StageChoice
from autoparallel.planner.plan import Plan
from autoparallel.planner.proposers import pipelines
from autoparallel.planner.proposers.interleaved import interleaved
from autoparallel.planner.proposers.local_search import local_search
from autoparallel.planner.proposers.pipelines import dynamic_program, parallel_branches
from autoparallel.planner.proposers.replicated import replicated
from autoparallel.planner.proposers.sliced import sliced
from autoparallel.planner.proposers.uneven_shares import uneven_shares
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import (
    CHUNKED_SCHEDULES,
    DERIVED_SCHEDULES,
    SCHEDULES,
    Forced,
    Request,
)
from autoparallel.planner.search.branch_and_bound import PipelineProposal
from autoparallel.planner.search.candidates import Candidate
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool

ALL = (*SCHEDULES, *CHUNKED_SCHEDULES, *DERIVED_SCHEDULES)
FREE = cluster(4, bytes_per_second=1e15, flops=1e6)
"""Compute so slow that messages take no time."""

FEW = cluster(2, bytes_per_second=1e6, flops=1e6)
"""Compute and wires so slow that weights are better not copied: pipelines win."""


def layers(number: int, rows: int) -> tuple[Graph, Blocks]:
    """Equal layers: the input and the loss, which take little, go with the first and the last."""
    graph, blocks = mlp(number, rows=rows, inner=256)
    first, *own, last = blocks.blocks
    return graph, Blocks(
        (
            replace(
                own[0],
                kind="first",
                nodes=(*first.nodes, *own[0].nodes),
                parameters=(*first.parameters, *own[0].parameters),
            ),
            *own[1:-1],
            replace(own[-1], kind="last", nodes=(*own[-1].nodes, *last.nodes)),
        )
    )


def job_of(model: tuple[Graph, Blocks], on: Cluster, request: Request) -> SearchContext:
    return SearchContext.of(*model, on, request, rules=rules, basis=DEFAULT)


def pool_after(job: SearchContext, *proposers: Proposer) -> CandidatePool:
    pool = CandidatePool(job)
    for propose in proposers:
        pool.add_all(propose(job, pool))
    return pool


def proposed(job: SearchContext, pool: CandidatePool, propose: Proposer) -> list[Candidate]:
    """What a proposer adds to a pool."""
    before = len(pool.known)
    pool.add_all(propose(job, pool))
    return pool.known[before:]


def cuts(candidate: Candidate) -> list[int]:
    return [stage.stop - stage.start for stage in candidate.stages]


ROWS = 64
"""Of a micro-batch: the update of the weights takes little beside them."""


def forced(*allow: str, **degrees: int) -> Request:
    """So many micro-batches on so many ranks."""
    count = ROWS * degrees["num_microbatches"]
    return Request(count, forced=Forced(**degrees), features=features_of(allow, (), ALL))


@pytest.mark.parametrize("count", [4, 8])
def test_the_dynamic_program_cuts_equal_layers_evenly(count: int) -> None:
    """Eight layers of t seconds each on R = 4 ranks take (N + R - 1) 2t."""
    job = job_of(layers(8, ROWS * count), FREE, forced("1f1b", pp=4, num_microbatches=count))
    best = pool_after(job, dynamic_program).best
    assert best is not None
    assert cuts(best) == [2, 2, 2, 2]
    busiest = max(cost.forward_seconds + cost.backward_seconds for cost in best.costs)
    assert best.step_seconds == pytest.approx((count + 3) * busiest, rel=0.03)


def test_local_search_finds_the_even_cut_from_an_uneven_one() -> None:
    job = job_of(layers(8, ROWS * 8), FREE, forced("1f1b", pp=4, num_microbatches=8))
    pool = CandidatePool(job)
    starts = (0, 1, 2, 3, 8)
    uneven = tuple(
        StageChoice(start, stop, rank, 1) for rank, (start, stop) in enumerate(pairwise(starts))
    )
    pool.add_all(pool.simulate(PipelineProposal(ROWS, Pipeline(uneven, 1.0))))
    (start,) = pool.known
    made = proposed(job, pool, local_search)
    assert pool.best in made
    assert pool.best is not None
    assert cuts(pool.best) == [2, 2, 2, 2]
    assert pool.best.step_seconds < start.step_seconds * 0.6


def test_a_device_four_times_as_fast_takes_thirteen_of_sixteen_rows() -> None:
    """Of r and 16 - r rows the slower takes max(r / 4, 16 - r): 3.25 for 13, else 3.5 or 4."""
    fast, slow = (cluster(1, flops=rate, bytes_per_second=1e15) for rate in (4e6, 1e6))
    unlike = replace(fast, hosts=(*fast.hosts, *slow.hosts))
    request = Request(16, forced=Forced(pp=1, num_microbatches=1), max_tp=1)
    job = job_of(mlp(3, rows=16), unlike, request)
    pool = pool_after(job, dynamic_program)
    assert pool.best is not None
    even = pool.best.step_seconds
    (made,) = proposed(job, pool, uneven_shares)
    assert made.answers[0][1].shares == (13, 3)
    assert made.step_seconds / even == pytest.approx(3.25 / 8, rel=0.02)
    assert job.known.shared_bound is not None
    assert job.known.shared_bound == pytest.approx(made.step_seconds, rel=1e-9)


def test_interleaved_stages_idle_less() -> None:
    """R = 4 ranks of C = 2 stages, N = 4: N + (R - 1) / C where 1F1B has N + R - 1."""
    request = forced("1f1b", "interleaved", pp=4, num_microbatches=4)
    job = job_of(layers(8, ROWS * 4), FREE, request)
    pool = pool_after(job, dynamic_program)
    base = pool.step_seconds
    fastest = min(proposed(job, pool, interleaved), key=lambda each: each.step_seconds)
    assert fastest.num_chunks == 2
    assert fastest.step_seconds / base == pytest.approx(5.5 / 7, rel=0.02)


def test_replicas_idle_less() -> None:
    """Chimera on four ranks, four micro-batches, backwards twice as long: 16 where 1F1B has 21."""
    job = job_of(layers(8, ROWS * 4), FREE, forced("1f1b", "chimera", pp=4, num_microbatches=4))
    pool = pool_after(job, dynamic_program)
    base = pool.step_seconds
    (made,) = proposed(job, pool, replicated)
    assert made.schedule == "chimera"
    assert made.step_seconds / base == pytest.approx(16 / 21, rel=0.03)


@pytest.mark.parametrize("propose", [parallel_branches, uneven_shares, sliced])
def test_a_proposer_adds_nothing_where_its_subject_is_not_there(propose: Proposer) -> None:
    """Layers in a chain have no branches, equal devices no unequal shares, an MLP no positions."""
    job = job_of(layers(4, 8), FREE, Request(8, features=features_of((), (), ALL)))
    assert proposed(job, pool_after(job, dynamic_program), propose) == []


def test_each_micro_batch_size_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are dealt into two groups; the coarse search has a single one."""
    run, searched = pipelines._Exploration.run, list[tuple[int, ...]]()

    def recorded(self: pipelines._Exploration) -> bool:
        searched.append(self.sizes)
        return run(self)

    monkeypatch.setattr(pipelines._Exploration, "run", recorded)
    for propose in (dynamic_program, *COARSE.proposers):
        pool_after(job_of(mlp(4, rows=8), cluster(4), Request(8)), propose)
    assert searched == [(8, 2), (4, 1), (8, 4, 2, 1)]


@cache
def free_plan(method: SearchMethod) -> Plan:
    request = Request(4, features=features_of((), (), ALL), tolerance=0.0)
    return plan(*mlp(6, rows=4), FEW, request, method=method)


@pytest.mark.parametrize("left_out", PROPOSERS[1:], ids=lambda each: each.__name__)
def test_any_proposer_but_the_first_can_be_left_out(left_out: Proposer) -> None:
    """A plan is found all the same, no faster than with all of them."""
    method = SearchMethod(tuple(each for each in PROPOSERS if each is not left_out))
    own, whole = free_plan(method), free_plan(SearchMethod())
    assert own.prediction.step_seconds >= whole.prediction.step_seconds * (1 - 1e-9)
    assert own.solver.bound_seconds <= whole.prediction.step_seconds * (1 + 1e-9)


def test_the_pool_and_the_plan_agree_on_the_fastest() -> None:
    model, request = mlp(6, rows=4), Request(4, features=features_of((), (), ALL), tolerance=0.0)
    found = search(*model, FEW, request)
    assert found.best_plan().prediction.step_seconds == pytest.approx(found.pool.bar, rel=1e-9)


def tampered(own: Plan, **factors: float) -> Plan:
    values = {
        name: type(getattr(own.prediction, name))(getattr(own.prediction, name) * factor)
        for name, factor in factors.items()
    }
    return replace(own, prediction=replace(own.prediction, **values))


@pytest.mark.parametrize(
    ("field", "said"),
    [("step_seconds", "seconds of a step"), ("peak_memory_bytes", "bytes of memory")],
)
@pytest.mark.parametrize("factor", [1.001, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_plan_whose_prediction_evaluate_does_not_find_again_is_an_error(
    field: str, said: str, factor: float
) -> None:
    """The error names what the search found and what ``evaluate`` finds."""
    model = mlp(4, rows=8)
    own = plan(*model, cluster(2), Request(8))
    check_prediction(own, *model, rules=rules, basis=DEFAULT)
    wrong = tampered(own, **{field: factor})
    with pytest.raises(InternalError, match=said) as caught:
        check_prediction(wrong, *model, rules=rules, basis=DEFAULT)
    assert caught.value.code == "AP999"
    for figure in figures([wrong, own], field):
        assert figure in str(caught.value)


def figures(plans: Sequence[Plan], field: str) -> list[str]:
    return [f"{getattr(each.prediction, field):.6g}"[:6] for each in plans]
