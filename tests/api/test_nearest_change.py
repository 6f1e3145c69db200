"""What is said of a model that does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from handmade import pipeline_plan

from autoparallel import nearest_change
from autoparallel.cost_model.cluster import Cluster
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Request


def test_a_plan_that_is_nearest_is_named_though_the_changes_took_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = pipeline_plan()
    peak = plan.prediction.peak_memory_bytes
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(nearest_change.time, "perf_counter", lambda: clock.seconds)

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
    assert f"needs {peak / 1e9:.2f} GB, the limit is" in error.what
