"""Which part of a cluster a goal takes, where the search is a table of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from handmade import flat_plan
from small_graphs import cluster

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.goal import Deadline, Goal
from autoparallel.planner.requests.request import Request
from autoparallel.planning.objectives import LINEAR, _Job, sub_clusters

PLAN = flat_plan()


def made(on: Cluster, *, seconds: float, num_bytes: int = 1) -> Plan:
    prediction = replace(PLAN.prediction, step_seconds=seconds, peak_memory_bytes=num_bytes)
    return replace(PLAN, cluster=on, prediction=prediction)


def found(
    goal: Goal, on: Cluster, search: Callable[[Cluster, Request], Plan], rows: int = 16
) -> Plan:
    return _Job(on, Request(rows, goal=goal), search).found()


def toys(num_devices: int, num_hosts: int = 1) -> Cluster:
    return cluster(num_devices, num_hosts=num_hosts, bytes_per_second=1e11, flops=1e11)


@pytest.mark.parametrize("wanted", [1, 3, 4])
def test_few_parts_are_tried_one_by_one_until_a_deadline_is_met(wanted: int) -> None:
    tried: list[int] = []

    def search(on: Cluster, request: Request) -> Plan:
        tried.append(on.num_devices)
        return made(on, seconds=8.0 / on.num_devices)

    deadline = Deadline(8.0 / wanted * 100.1, 100, "steps")
    plan = found(Goal("devices", deadline=deadline), toys(4), search)
    assert plan.cluster.num_devices == wanted
    assert tried == [*range(1, wanted + 1)]
    assert plan.goal is not None
    whole = "all 4 devices"
    assert plan.goal.chosen == (
        whole if wanted == 4 else f"{plan.cluster.name}: {wanted} of 4 devices"
    )
    reasons = [each.reason for each in plan.goal.tried]
    assert reasons == ["misses the deadline"] * (wanted - 1) + [""]


@pytest.mark.parametrize("least", [1, 5, 17, 200, 256])
def test_of_many_parts_the_fewest_are_found_by_halving(least: int) -> None:
    """Each part from the least on meets the deadline; the others have no plan or are late."""
    many = toys(8, num_hosts=512)
    parts = [part.num_devices for part in sub_clusters(many)]
    mixed = replace(
        many,
        hosts=many.hosts[:20]
        + tuple(
            replace(host, device=replace(host.device, name="other")) for host in many.hosts[20:40]
        ),
    )
    counts = [part.num_devices for part in sub_clusters(mixed)]
    assert len(counts) > LINEAR >= len(parts) - 1
    tried: list[int] = []

    def search(on: Cluster, request: Request) -> Plan:
        tried.append(on.num_devices)
        if on.num_devices < least / 2:
            raise InfeasibleError("AP301", "does not fit")
        return made(on, seconds=1.0 if on.num_devices >= least else 3.0)

    plan = found(Goal("devices", deadline=Deadline(200, 100, "steps")), mixed, search)
    assert plan.cluster.num_devices == min(count for count in counts if count >= least)
    assert len(tried) < len(counts) / 2


def test_a_deadline_that_no_part_meets_names_the_fastest() -> None:
    def search(on: Cluster, request: Request) -> Plan:
        return made(on, seconds=8.0 / on.num_devices)

    for objective in ("devices", "cost", "memory", "time"):
        goal = Goal(objective, {"": 1.0}, Deadline(100, 100, "steps"))
        with pytest.raises(InfeasibleError, match=r"AP302.*a step may take 1 s") as caught:
            found(goal, toys(4), search)
        assert "takes 2 s" in caught.value.why
        assert "2 times as long" in caught.value.fix


@pytest.mark.parametrize(("code", "count"), [("AP127", 3), ("AP130", 1)])
def test_an_error_of_degrees_ends_the_part_and_any_other_the_search(code: str, count: int) -> None:
    tried: list[int] = []

    def search(on: Cluster, request: Request) -> Plan:
        tried.append(on.num_devices)
        raise UsageError(code, "no such degrees")

    with pytest.raises(UsageError, match=code):
        found(Goal("cost", {"": 1.0}), toys(3), search)
    assert len(tried) == count


def test_the_least_memory_is_halved_down_to_one_percent() -> None:
    """Plans need at least 400 bytes, and hold as much as they may below 1000."""
    limits: list[int] = []

    def search(on: Cluster, request: Request) -> Plan:
        limit = request.memory_limit_bytes
        if limit is None:
            return made(on, seconds=1.0, num_bytes=1000)
        limits.append(limit)
        if limit < 400:
            raise InfeasibleError("AP301", "does not fit")
        return made(on, seconds=1000 / limit, num_bytes=limit)

    plan = found(Goal("memory"), toys(4), search)
    assert limits[:3] == [500, 250, 375]
    assert 400 <= plan.prediction.peak_memory_bytes <= 404
    assert plan.goal is not None
    assert "no plan was found for" in plan.goal.chosen
    late = Deadline(200, 100, "steps")
    plan = found(Goal("memory", deadline=late), toys(4), search)
    assert plan.prediction.peak_memory_bytes == pytest.approx(500, rel=0.01)


def test_the_cheapest_part_has_the_most_tokens_per_dollar() -> None:
    """Twice the devices are 1.5 times as fast: one device is the cheapest."""
    seconds = {1: 6.0, 2: 4.0, 3: 3.5, 4: 3.0}

    def search(on: Cluster, request: Request) -> Plan:
        return made(on, seconds=seconds[on.num_devices])

    plan = found(Goal("cost", {"": 3.6}), toys(4), search)
    assert plan.cluster.num_devices == 1
    assert plan.goal is not None
    assert plan.goal.tokens_per_dollar == pytest.approx(16 / (0.001 * 6.0))
    plan = found(Goal("cost", {"": 3.6}, Deadline(450, 100, "steps")), toys(4), search)
    assert plan.cluster.num_devices == 2
