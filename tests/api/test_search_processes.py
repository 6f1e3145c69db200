"""Other processes that search: the same plan, whatever becomes of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from small_graphs import cluster, mlp

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.find_plan import ONE_STAGE_PER_RANK, SearchMethod, plan
from autoparallel.planner.plan import Plan, SolverInfo
from autoparallel.planner.proposers import pipelines
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool
from autoparallel.planner.search.workers import serial_workers
from autoparallel.planning import search_worker as search_processes
from autoparallel.planning.search_worker import Beside, two_processes

GRAPH, BLOCKS = mlp(4, rows=8, width=512, inner=2048)
CLUSTER = cluster(4, num_hosts=2)
FORCED = Forced(zero=0, recompute="none")
"""What is searched for besides, each process does as well."""


def planned(processes: int, **options: Any) -> Plan:
    method = SearchMethod(ONE_STAGE_PER_RANK, two_processes if processes == 2 else serial_workers)
    return plan(GRAPH, BLOCKS, CLUSTER, Request(8, forced=FORCED, **options), method=method)


@cache
def planned_alone() -> Plan:
    """The plan that one process finds."""
    return planned(1)


def unsolved(found: Plan) -> Plan:
    """Without how long it took."""
    return replace(found, solver=SolverInfo(found.solver.gap, 0, {}, found.solver.bound_seconds))


@pytest.mark.slow
def test_a_plan_is_the_same_however_many_processes_search() -> None:
    assert unsolved(planned(2)) == unsolved(planned_alone())
    assert not multiprocessing.active_children()


def test_each_micro_batch_size_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[tuple[int, ...]] = []
    asked: list[tuple[int, ...]] = []
    alone, explore, ask = planned_alone(), pipelines._explored, Beside.ask

    def explored(
        job: SearchContext, pool: CandidatePool, sizes: tuple[int, ...]
    ) -> pipelines.Explored:
        own.append(sizes)
        return explore(job, pool, sizes)

    def asking(self: Beside, function: Any, *args: Any) -> None:
        if function is pipelines.explore_sizes:
            asked.append(args[0])
        ask(self, function, *args)

    monkeypatch.setattr(pipelines, "_explored", explored)
    monkeypatch.setattr(Beside, "ask", asking)
    assert unsolved(planned(2)) == unsolved(alone)
    assert len(own) == len(asked) == 1
    assert sorted(own[0] + asked[0]) == [1, 2, 4, 8]


@pytest.mark.parametrize("how", ["killed", pytest.param("silent", marks=pytest.mark.slow)])
def test_what_a_lost_process_should_have_done_is_done_here(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, begun, lost = planned_alone(), Beside.start, []

    def start(job: SearchContext) -> Beside | None:
        found = begun(job)
        assert found is not None
        assert found.process.pid is not None
        lost.append(found)
        os.kill(found.process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return found

    monkeypatch.setattr(Beside, "start", staticmethod(start))
    # A process that is silent is waited for until a minute before the time limit.
    monkeypatch.setattr(search_processes, "LATE_SECONDS", -60.0)
    found = planned(2, time_limit_seconds=60.0)
    assert len(lost) == 1
    assert unsolved(found) == unsolved(alone)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_where_no_process_can_be_had_one_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beside, "start", staticmethod(lambda job: None))
    assert unsolved(planned(2)) == unsolved(planned_alone())


def test_what_nothing_fits_is_told_by_the_least_of_all() -> None:
    errors = []
    for processes in (1, 2):
        with pytest.raises(InfeasibleError) as caught:
            planned(processes, memory_limit_bytes=1_000_000)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert not multiprocessing.active_children()


def _double(job: SearchContext, rows: tuple[int, ...], more: int) -> tuple[int, int]:
    return os.getpid(), sum(rows) * 2 + more


def test_a_process_answers_for_its_part_and_ends() -> None:
    job = SearchContext.of(GRAPH, BLOCKS, CLUSTER, Request(32), rules=rules, basis=DEFAULT)
    workers = two_processes(job, (1, 2, 4, 8))

    def first(rows: tuple[int, ...]) -> tuple[int, int]:
        return _double(job, rows, 1)

    (here, own), (there, other) = workers.map(_double, 1, first=first)
    assert here == os.getpid() != there
    assert (own, other) == ((1 + 4) * 2 + 1, (2 + 8) * 2 + 1)
    workers.end()
    assert not multiprocessing.active_children()
    assert workers.map(_double, 1, first=first) == [(here, 11), (here, 21)]


def test_a_process_that_does_not_answer_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(32, time_limit_seconds=0.01)
    job = SearchContext.of(GRAPH, BLOCKS, CLUSTER, request, rules=rules, basis=DEFAULT)
    workers = two_processes(job, (1, 2, 4, 8))
    monkeypatch.setattr(search_processes, "LATE_SECONDS", 0.0)
    assert workers.map(named_here, "own", first=lambda rows: "first") == ["first", "own"]
    assert not multiprocessing.active_children()


def named_here(job: SearchContext, rows: tuple[int, ...], name: str) -> str:
    """Another process never answers."""
    while multiprocessing.parent_process() is not None:
        signal.pause()
    return name


def test_a_search_interrupted_before_its_first_plan_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    explore, own = pipelines._explored, os.getpid()

    def interrupted(
        job: SearchContext, pool: CandidatePool, sizes: tuple[int, ...]
    ) -> pipelines.Explored:
        if os.getpid() == own:
            raise KeyboardInterrupt
        return explore(job, pool, sizes)

    monkeypatch.setattr(pipelines, "_explored", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned(2)
    assert not multiprocessing.active_children()
