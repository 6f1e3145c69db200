"""Other processes that search: the same plan, whatever becomes of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.planner import rules
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.plan import Plan, SolverInfo
from autoparallel.planner.pricing.basis import DEFAULT
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search import beside, ranking
from autoparallel.planner.search.beside import Beside, Company
from autoparallel.planner.search.job import Job

GRAPH, BLOCKS = mlp(14, rows=8, width=512, inner=2048)
CLUSTER = cluster(8, num_hosts=2)


def planned(processes: int, **options: Any) -> Plan:
    return plan(GRAPH, BLOCKS, CLUSTER, Request(32, processes=processes, **options))


@cache
def planned_alone() -> Plan:
    """The plan that one process finds."""
    return planned(1)


def unsolved(found: Plan) -> Plan:
    """Without how long it took."""
    return replace(found, solver=SolverInfo(found.solver.gap, 0, {}, found.solver.bound_seconds))


def test_a_plan_is_the_same_however_many_processes_search() -> None:
    assert unsolved(planned(2)) == unsolved(planned_alone())
    assert not multiprocessing.active_children()


def test_each_micro_batch_size_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[tuple[int, ...]] = []
    asked: list[tuple[int, ...]] = []
    explore, ask = ranking.Ranking._explore, Beside.ask

    def explored(self: ranking.Ranking, rows: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        own.append(rows)
        explore(self, rows, numbers)

    def asking(self: Beside, function: Any, *args: Any) -> None:
        if function is ranking.explored:
            asked.append(args[0])
        ask(self, function, *args)

    monkeypatch.setattr(ranking.Ranking, "_explore", explored)
    monkeypatch.setattr(Beside, "ask", asking)
    planned(2)
    assert len(own) == len(asked) == 1
    assert sorted(own[0] + asked[0]) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_what_a_lost_process_should_have_done_is_done_here(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, begun, lost = planned_alone(), Beside.start, []

    def start(job: Job) -> Beside | None:
        found = begun(job)
        assert found is not None
        assert found.process.pid is not None
        lost.append(found)
        os.kill(found.process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return found

    monkeypatch.setattr(Beside, "start", staticmethod(start))
    monkeypatch.setattr(beside, "LATE_SECONDS", 0.0)
    limit = 60.0 if how == "killed" else 15.0  # as long is a process waited for that is silent
    found = planned(2, time_limit_seconds=limit)
    assert len(lost) == 1
    assert found.stages == alone.stages
    assert how == "silent" or unsolved(found) == unsolved(alone)
    assert not multiprocessing.active_children()


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


def _double(job: Job, rows: tuple[int, ...], more: int) -> tuple[int, int]:
    return os.getpid(), sum(rows) * 2 + more


def test_a_process_answers_for_its_part_and_ends() -> None:
    job = Job.of(GRAPH, BLOCKS, CLUSTER, Request(32, processes=2), rules=rules, basis=DEFAULT)
    company = Company.of(job, (1, 2, 4, 8))

    def first(rows: tuple[int, ...]) -> tuple[int, int]:
        return _double(job, rows, 1)

    (here, own), (there, other) = company.over(_double, 1, first=first)
    assert here == os.getpid() != there
    assert (own, other) == ((1 + 4) * 2 + 1, (2 + 8) * 2 + 1)
    company.end()
    assert not multiprocessing.active_children()
    assert company.over(_double, 1, first=first) == [(here, 11), (here, 21)]


def test_a_process_that_does_not_answer_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(32, processes=2, time_limit_seconds=0.01)
    job = Job.of(GRAPH, BLOCKS, CLUSTER, request, rules=rules, basis=DEFAULT)
    company = Company.of(job, (1, 2, 4, 8))
    monkeypatch.setattr(beside, "LATE_SECONDS", 0.2)
    assert company.over(named_slowly, "own", first=lambda rows: "first") == ["first", "own"]
    assert not multiprocessing.active_children()


def named_slowly(job: Job, rows: tuple[int, ...], name: str) -> str:
    """In another process later than is waited for."""
    if multiprocessing.parent_process() is not None:
        time.sleep(0.6)
    return name


def test_a_search_interrupted_before_its_first_plan_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, own = ranking.Ranking._begin, os.getpid()

    def interrupted(self: ranking.Ranking, quests: list[Any]) -> None:
        if os.getpid() == own:
            raise KeyboardInterrupt
        first(self, quests)

    monkeypatch.setattr(ranking.Ranking, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned(2)
    assert not multiprocessing.active_children()
