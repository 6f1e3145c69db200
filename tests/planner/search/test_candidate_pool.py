"""The pool: which candidates may win, the step to beat, and the whole step of the winner."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from small_graphs import cluster, mlp

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.find_plan import ONE_STAGE_PER_RANK, run_proposers
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.candidates import Candidate, complete_simulation, is_whole
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool

GRAPH, BLOCKS = mlp(4, rows=4096)
ON = cluster(2, bytes_per_second=1e6, flops=1e6)


def job_of(forced: Forced) -> SearchContext:
    return SearchContext.of(
        GRAPH, BLOCKS, ON, Request(4096, forced=forced), rules=rules, basis=DEFAULT
    )


@cache
def pipelines() -> tuple[Candidate, ...]:
    """Pipelines of 4096 micro-batches, of which fewer are simulated."""
    pool = run_proposers(job_of(Forced(pp=2, num_microbatches=4096)), ONE_STAGE_PER_RANK[:1])
    made = tuple(each for each in pool.known if not each.is_complete and not is_whole(each))
    assert made
    return made


def pool_of(*steps: float, forced: Forced) -> CandidatePool:
    pool = CandidatePool(job_of(forced))
    pool.add_all(replace(pipelines()[0], step_seconds=seconds) for seconds in steps)
    return pool


def test_an_empty_pool_has_no_step_to_beat() -> None:
    pool = CandidatePool(job_of(Forced()))
    assert (pool.best, pool.allowed, pool.known) == (None, [], [])
    assert pool.step_seconds == pool.bar == pool.cutoff == float("inf")


def test_the_bar_is_the_step_of_the_fastest() -> None:
    pool = pool_of(3.0, 1.0, 2.0, forced=Forced())
    assert pool.bar == pool.step_seconds == 1.0
    assert [each.step_seconds for each in pool.ranked()] == [1.0, 2.0, 3.0]


def test_where_several_stages_per_rank_are_forced_pipelines_of_one_never_win() -> None:
    """They are kept, as others are made of them, and their step is no bar to these."""
    pool = pool_of(1.0, 2.0, forced=Forced(pp=2, schedule="interleaved"))
    assert len(pool.known) == 2
    assert pool.allowed == []
    assert (pool.step_seconds, pool.bar) == (1.0, float("inf"))
    made = replace(pool.known[0], base=pool.known[0], num_chunks=2, step_seconds=3.0)
    pool.add(made)
    assert pool.allowed == [made]
    assert (pool.step_seconds, pool.bar) == (1.0, 3.0)


def test_what_does_not_fit_is_kept_apart() -> None:
    pool = pool_of(2.0, forced=Forced())
    pool.add(replace(pool.known[0], step_seconds=1.0, fits=False))
    assert (len(pool.known), len(pool.rejected)) == (1, 1)
    assert pool.bar == 2.0


def test_of_equally_fast_candidates_the_one_that_holds_less_is_first() -> None:
    pool = pool_of(1.0, forced=Forced())
    small = replace(pool.known[0], peak_bytes=pool.known[0].peak_bytes / 2)
    pool.add(small)
    assert pool.best is small
    assert pool.ranked()[0] is small


def test_the_fastest_is_settled_when_all_its_micro_batches_are_simulated() -> None:
    """One that is faster than it is as a whole loses to the next, whose step is then simulated."""
    first = pipelines()[0]
    whole = complete_simulation(job_of(Forced()), first).step_seconds
    pool = pool_of(0.5 * whole, 0.9 * whole, forced=Forced())
    pool.settle()
    assert pool.best is not None
    assert pool.best.is_complete
    assert [each.is_complete for each in pool.known] == [True, True]
    assert pool.bar == pytest.approx(whole)
    single = pool_of(0.5 * whole, 2.0 * whole, forced=Forced())
    single.settle()
    assert sorted(each.is_complete for each in single.known) == [False, True]
    assert single.bar == pytest.approx(whole)


def test_an_interrupted_pool_keeps_what_was_added() -> None:
    pool = pool_of(2.0, forced=Forced())

    def made() -> object:
        yield replace(pool.known[0], step_seconds=1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.add_all(made())  # type: ignore[arg-type]
    assert pool.bar == 1.0
