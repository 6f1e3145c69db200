"""What is said of a model that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from handmade import pipeline_plan

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.options.words import bytes_text
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.pins import parse_pin
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planning import infeasible as nearest_change


def test_a_plan_that_is_nearest_is_named_though_the_changes_took_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = pipeline_plan()
    peak = plan.prediction.peak_memory_bytes
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(
        "autoparallel.planning.repeated_search.time.perf_counter", lambda: clock.seconds
    )

    def search(cluster: Cluster, request: Request) -> Plan:
        clock.seconds += 1000.0
        assert request.time_limit_seconds > 0
        if cast(Any, request.memory_limit_bytes) < peak:
            raise InfeasibleError("AP301", "does not fit")
        return plan

    request = Request(global_batch=64, memory_limit_bytes=peak // 10, max_tp=2)
    error = nearest_change.with_nearest_change(
        InfeasibleError("AP301", "the model does not fit"), plan.cluster, request, search
    )
    assert f"needs {bytes_text(peak)}, the limit is" in error.what


EVERYTHING = Request(
    global_batch=64,
    forced=Forced(
        dp=2,
        tp=2,
        pp=2,
        zero=0,
        recompute="none",
        schedule="1f1b",
        num_microbatches=4,
        allreduce="ring",
    ),
    microbatch_size=2,
    pins=(parse_pin("layers.0.w=S(0)@tp"),),
    stage_at=("layers.3",),
    max_tp=2,
    memory_limit_bytes=10**9,
    features=Features(frozenset({"offload"})),
)


def test_each_change_gives_up_one_thing() -> None:
    cluster = pipeline_plan().cluster
    found = {words: request for words, _, request in nearest_change.changes(cluster, EVERYTHING)}
    assert [*found] == [
        "without a fixed micro-batch size",
        "without recompute=none",
        "without allreduce=ring",
        "without zero=0",
        "without schedule=1f1b",
        "without dp=2",
        "without tp=2",
        "without pp=2",
        f"without --pin {EVERYTHING.pins[0]}",
        "without --stage-at layers.3",
        "without --max-tp 2",
        "with offload allowed",
        "without any --parallel",
        "without --memory-limit",
    ]
    assert found["without dp=2"].forced == replace(EVERYTHING.forced, dp=None)
    assert found["with offload allowed"].features.denied == frozenset()
    assert found["without any --parallel"].forced == Forced()
    for words, request in found.items():
        given_up = [
            field.name
            for field in fields(Request)
            if getattr(request, field.name) != getattr(EVERYTHING, field.name)
        ]
        allowed = {"forced", "microbatch_size"} if "micro" in words or "any" in words else None
        assert len(given_up) == 1 or set(given_up) == allowed, words
    assert [*nearest_change.changes(cluster, Request(global_batch=64))] == []


def _error(
    request: Request, fits: Callable[[Cluster, Request], bool], mixing: str = ""
) -> InfeasibleError:
    """What is said where the search finds a plan for requests that ``fits`` takes."""
    plan = pipeline_plan()

    def search(cluster: Cluster, asked: Request) -> Plan:
        if not fits(cluster, asked):
            raise InfeasibleError("AP301", "does not fit")
        return plan

    error = InfeasibleError("AP301", "the model does not fit")
    return nearest_change.with_nearest_change(error, plan.cluster, request, search, mixing=mixing)


def test_changes_that_fit_are_named_with_their_memory() -> None:
    error = _error(EVERYTHING, lambda cluster, asked: asked.forced.zero is None)
    first, second, third = error.fix.splitlines()
    assert first == "these changes were tried and fit:"
    assert second.strip().startswith("without zero=0 (")
    assert "on the fullest device" in second
    assert third.strip().startswith("without any --parallel")
    assert error.what == "the model does not fit"


def test_more_hosts_are_doubled_until_there_is_a_plan() -> None:
    hosts = len(pipeline_plan().cluster.hosts)
    error = _error(
        Request(64, forced=Forced(dp=2, tp=2, pp=1)),
        lambda cluster, asked: len(cluster.hosts) >= 4 * hosts and asked.forced.dp is None,
    )
    count = 4 * pipeline_plan().cluster.num_devices
    assert f"tried and fit:\n       {count} devices on {4 * hosts} hosts (" in error.fix


def test_rows_that_see_each_other_are_first_put_into_micro_batches() -> None:
    def fits(cluster: Cluster, asked: Request) -> bool:
        return (asked.forced.num_microbatches or 1) >= 3

    error = _error(Request(64), fits, mixing="norm (batch norm)")
    assert "--parallel microbatches=4, each of which norm (batch norm) then sees" in error.fix
    fixed = Request(64, forced=Forced(num_microbatches=2))
    assert "microbatches=" not in _error(fixed, fits, mixing="norm").fix


def test_the_nearest_of_the_larger_limits_is_named_with_all_that_was_fixed() -> None:
    peak = pipeline_plan().prediction.peak_memory_bytes
    limit = peak // 3
    request = replace(EVERYTHING, memory_limit_bytes=limit)
    error = _error(request, lambda _, asked: (asked.memory_limit_bytes or 0) >= 2 * limit)
    assert f"needs {bytes_text(peak)}, the limit is {bytes_text(limit)}" in error.what
    fixed = ("micro-batches of 2 samples a rank", "--pin", "--max-tp 2", "denied: offload")
    for said in ("dp=2", *fixed):
        assert said in error.why
