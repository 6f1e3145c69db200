"""What a plan is best at: tokens per dollar, least memory, fewest devices within a deadline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.cluster_file import from_dict, to_dict
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.goal import Deadline, Goal
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planning.objectives import plan_for, sub_clusters

GRAPH, BLOCKS = mlp(2, rows=8, width=128, inner=512)
QUICK = Forced(zero=0, recompute="none", num_microbatches=2)
"""Searches for other degrees alone take a fraction of the time."""


def toys(num_devices: int = 4, num_hosts: int = 1) -> Cluster:
    return cluster(num_devices, num_hosts=num_hosts, bytes_per_second=1e11, flops=1e11)


def planned(goal: Goal, on: Cluster | None = None, **options: Any) -> Plan:
    request = Request(16, **{"goal": goal, "forced": QUICK, **options})
    return plan_for(GRAPH, BLOCKS, on or toys(), request)


def fastest(on: Cluster, forced: Forced = QUICK) -> Plan:
    """Without parameter servers, which are offered for the objective "time" alone."""
    features = Features(frozenset({"servers"}))
    return plan(GRAPH, BLOCKS, on, Request(16, features=features, forced=forced))


def test_the_most_tokens_per_dollar_are_those_of_the_best_part() -> None:
    """Every part is planned by itself; rows per dollar are 16 / (price / 3600 · step)."""
    prices = {"": 3.6}
    found = planned(Goal("cost", prices))
    every = {
        part.num_devices: 16 / (part.num_devices / 1000 * fastest(part).prediction.step_seconds)
        for part in sub_clusters(toys())
    }
    assert found.goal is not None
    assert found.goal.tokens_per_dollar == pytest.approx(max(every.values()), rel=1e-3)
    assert every[found.cluster.num_devices] == pytest.approx(max(every.values()), rel=1e-3)
    assert {each.num_devices: each.value for each in found.goal.tried} == pytest.approx(every, 1e-3)
    assert loads(dumps(found)) == found


@pytest.mark.slow
def test_of_two_kinds_of_devices_the_price_decides() -> None:
    slow = toys(2)
    quick = replace(slow.hosts[0].device, name="quick", peak_flops={"float32": 4e11})
    mixed = replace(slow, name="mixed", hosts=(*slow.hosts, replace(slow.hosts[0], device=quick)))
    cheap_quick = planned(Goal("cost", {"toy": 1.0, "quick": 1.0}), mixed)
    dear_quick = planned(Goal("cost", {"toy": 1.0, "quick": 100.0}), mixed)
    assert {host.device.name for host in cheap_quick.cluster.hosts} == {"quick"}
    assert {host.device.name for host in dear_quick.cluster.hosts} == {"toy"}


def test_prices_are_never_invented_and_come_from_the_cluster_file_too() -> None:
    with pytest.raises(UsageError) as caught:
        planned(Goal("cost"))
    assert caught.value.code == "AP188"
    priced = replace(
        toys(),
        hosts=(
            replace(toys().hosts[0], device=replace(toys().hosts[0].device, dollars_per_hour=2.0)),
        ),
    )
    assert from_dict(to_dict(priced)) == priced
    assert from_dict(to_dict(toys())) == toys()
    found = planned(Goal(), priced)
    assert found.goal is not None
    assert found.goal.dollars_per_hour == 8.0
    seconds = found.prediction.step_seconds
    assert found.goal.tokens_per_dollar == pytest.approx(16 / (8.0 / 3600 * seconds))
    assert planned(Goal()).goal is None


@pytest.mark.slow
def test_the_fewest_devices_that_meet_a_deadline_are_found() -> None:
    """A deadline between the steps of two and of three devices takes three."""
    parts = sub_clusters(toys())
    seconds = [fastest(part).prediction.step_seconds for part in parts]
    assert seconds[1] > seconds[3]
    for index, part in enumerate(parts):
        deadline = Deadline(seconds[index] * 100 * 1.001, 100, "steps")
        found = planned(Goal("devices", deadline=deadline))
        first = next(n for n, own in enumerate(seconds) if own <= seconds[index] * 1.001)
        assert found.cluster.num_devices == parts[first].num_devices, part.name
    tight = Deadline(min(seconds) / 2, 16, "tokens")
    with pytest.raises(InfeasibleError) as caught:
        planned(Goal("devices", deadline=tight))
    assert caught.value.code == "AP302"


def test_many_hosts_are_found_by_halving() -> None:
    many = toys(1, num_hosts=24)
    assert [part.num_devices for part in sub_clusters(many)] == [1, 2, 4, 8, 16, 24]


@pytest.mark.slow
def test_the_least_memory_is_at_the_edge_of_what_fits() -> None:
    """No plan is found for 2 % less, and the fastest plan holds more."""
    found = planned(Goal("memory"), forced=Forced())
    peak = found.prediction.peak_memory_bytes
    assert peak < fastest(toys(), Forced()).prediction.peak_memory_bytes
    with pytest.raises(InfeasibleError):
        plan(GRAPH, BLOCKS, toys(), Request(16, memory_limit_bytes=int(peak * 0.97)))
    assert found.goal is not None
    assert found.goal.objective == "memory"


def test_what_is_infeasible_says_what_would_fit() -> None:
    """Weights are 4.3 MB with AdamW; forced whole on each device, they do not fit in 4.2 MB."""
    forced = Forced(dp=4, zero=0, recompute="none", num_microbatches=2)
    with pytest.raises(InfeasibleError) as caught:
        planned(Goal(), forced=forced, memory_limit_bytes=4_200_000)
    error = caught.value
    assert error.code == "AP301"
    assert "without zero=0" in error.fix
    assert "without recompute=none" not in error.fix
    assert "the limit is 4.01 MiB" in error.what
    assert "optimizer 2.12 MiB" in error.why, "two states of 4 bytes of each of 278,528 weights"
    assert "dp=4" in error.why
    assert "zero=0" in error.why
    assert error.where == "rank 0"
    freed = Request(16, forced=replace(forced, zero=None), memory_limit_bytes=4_200_000)
    assert plan(GRAPH, BLOCKS, toys(), freed).prediction.peak_memory_bytes <= 4_200_000
