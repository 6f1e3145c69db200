"""Ctrl-C at any moment of a search: the best so far, its bound, and that it was ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.find_plan import plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.proposers import uneven_shares
from autoparallel.planner.proposers.interleaved import Interleaving
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES, Forced, Request
from autoparallel.planner.search import bound
from autoparallel.planner.search.pool import CandidatePool

ALL = (*SCHEDULES, *CHUNKED_SCHEDULES)
SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
"""Compute and wires so slow that weights are better not copied: pipelines win."""


def found() -> Plan:
    request = Request(8, forced=Forced(pp=4, num_microbatches=8), features=features_of((), (), ALL))
    return plan(*mlp(8, rows=8), SLOW, request)


@cache
def undisturbed() -> Plan:
    return found()


class Interrupting:
    """A function whose n-th call is interrupted."""

    def __init__(self, function: Callable[..., object], call: int) -> None:
        self.function, self.call, self.calls = function, call, 0

    def __call__(self, *args: object, **options: object) -> object:
        self.calls += 1
        if self.calls == self.call:
            raise KeyboardInterrupt
        return self.function(*args, **options)


@pytest.mark.parametrize("call", [1, 2])
def test_an_interleaving_that_is_interrupted_leaves_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    whole = undisturbed()
    assert whole.num_chunks > 1
    assert whole.solver.stopped == ""
    make = Interrupting(Interleaving.candidate, call)
    monkeypatch.setattr(Interleaving, "candidate", lambda self: make(self))
    own = found()
    assert own.solver.stopped == "Ctrl-C"
    assert own.prediction.step_seconds >= whole.prediction.step_seconds
    assert (own.num_chunks == 1) == (call == 1)
    assert 0 < own.solver.bound_seconds <= whole.prediction.step_seconds
    assert loads(dumps(own)) == own


def test_a_bound_that_is_interrupted_is_that_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = undisturbed()
    monkeypatch.setattr(bound, "_parts", Interrupting(bound._parts, 1))
    own = found()
    assert own.solver.stopped == "Ctrl-C"
    assert own.stages == whole.stages
    assert 0 < own.solver.bound_seconds <= whole.solver.bound_seconds


def test_a_winner_that_is_simulated_when_ctrl_c_comes_is_still_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, settle = undisturbed(), CandidatePool.settle
    interrupting = Interrupting(settle, 1)
    monkeypatch.setattr(CandidatePool, "settle", lambda self: interrupting(self))
    own = found()
    assert own.solver.stopped == "Ctrl-C"
    assert own.prediction.step_seconds >= whole.prediction.step_seconds
    assert 0 < own.solver.bound_seconds <= whole.prediction.step_seconds


def two_hosts(first: float, second: float) -> Cluster:
    """Two hosts of one device each, with these FLOP/s."""
    own, other = cluster(1, flops=first), cluster(1, flops=second)
    return replace(own, hosts=(*own.hosts, *other.hosts))


def test_before_unequal_shares_are_tried_the_bound_knows_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a fast and a slow device a batch is best shared out by their speed."""
    unlike, graph = two_hosts(4e9, 1e9), mlp(3, rows=16)
    request = Request(16, forced=Forced(pp=1), max_tp=1)
    whole = plan(*graph, unlike, request)
    shared = uneven_shares.shared_candidates
    monkeypatch.setattr(uneven_shares, "shared_candidates", Interrupting(shared, 1))
    own = plan(*graph, unlike, request)
    assert own.solver.stopped == "Ctrl-C"
    assert own.prediction.step_seconds > whole.prediction.step_seconds
    assert 0 < own.solver.bound_seconds <= whole.prediction.step_seconds


def test_ctrl_c_in_a_later_order_of_the_hosts_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlike, graph = two_hosts(1e9, 4e9), mlp(3, rows=16)
    request = Request(16, forced=Forced(pp=2), max_tp=1)
    whole, settle = plan(*graph, unlike, request), CandidatePool.settle
    interrupting = Interrupting(settle, 2)
    monkeypatch.setattr(CandidatePool, "settle", lambda self: interrupting(self))
    own = plan(*graph, unlike, request)
    assert interrupting.calls == 2
    assert own.solver.stopped == "Ctrl-C"
    assert own.stages == whole.stages
