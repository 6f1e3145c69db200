"""Clusters whose hosts differ: orders, runs of ranks, and plans whose optimum is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import factorial

import pytest
from one_stage import plan
from small_graphs import mlp

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.inter_op.heterogeneous import (
    MOST_ORDERS,
    host_orders,
    in_given_ranks,
    pieces,
    run_sizes,
)
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request

WIRE = Link("wire", alpha_seconds=1e-9, bytes_per_second=1e15)
SLOW = Link("slow wire", alpha_seconds=1e-3, bytes_per_second=1e6)


def host(speed: float, *, num_devices: int = 1, memory_bytes: int = 10**12, rack: str = "") -> Host:
    """Devices of ``speed`` GFLOP/s that move bytes for nothing."""
    device = Device(
        f"toy{speed:g}",
        "cpu",
        memory_bytes,
        memory_bytes,
        1e18,
        {"float32": speed * 1e9},
        launch_seconds=0.0,
    )
    return Host(device, num_devices, WIRE, rack)


def toys(*hosts: Host, inter_link: Link = WIRE, rack_link: Link | None = None) -> Cluster:
    return Cluster("toys", hosts, inter_link, rack_link)


def layers_by_device(found: Plan) -> dict[str, list[int]]:
    """By device name how many layers each stage on such a device has."""
    layers: dict[str, list[int]] = {}
    for stage in found.stages:
        name = found.cluster.device(stage.devices[0]).name
        number = sum(block.kind == "layer" for block in stage.blocks)
        layers.setdefault(name, []).append(number)
    return {name: sorted(numbers) for name, numbers in layers.items()}


def test_hosts_that_are_alike_have_one_order() -> None:
    cluster = parse_cluster("4x8xH100")
    (order,) = host_orders(cluster)
    assert order.cluster == cluster
    assert order.ranks == tuple(range(32))


@pytest.mark.parametrize("text", ["8xA100+8xH100", "2x8xA100+2x8xH100", "8xA100+8xH100+8xV100"])
def test_every_distinct_order_of_few_hosts_is_tried_once(text: str) -> None:
    cluster = parse_cluster(text)
    orders = host_orders(cluster)
    kinds = [tuple(host.device.name for host in order.cluster.hosts) for order in orders]
    names = [host.device.name for host in cluster.hosts]
    number = factorial(len(names))
    for name in set(names):
        number //= factorial(names.count(name))
    assert len(set(kinds)) == len(kinds) == number
    assert kinds[0] == tuple(names)


def test_of_many_hosts_few_orders_are_tried() -> None:
    orders = host_orders(parse_cluster("16x8xA100+16x8xH100"))
    assert 3 <= len(orders) <= MOST_ORDERS


def test_the_hosts_of_a_rack_stay_together() -> None:
    cluster = toys(
        host(1, rack="a"), host(2, rack="b"), host(2, rack="a"), inter_link=WIRE, rack_link=SLOW
    )
    for order in host_orders(cluster)[1:]:
        racks = [each.rack for each in order.cluster.hosts]
        assert racks in (["a", "a", "b"], ["b", "a", "a"])


def test_ranks_lead_back_to_the_given_cluster() -> None:
    cluster = toys(host(1, num_devices=2), host(3), host(2, num_devices=3))
    for order in host_orders(cluster):
        assert sorted(order.ranks) == list(range(6))
        for rank, given in enumerate(order.ranks):
            assert order.cluster.device(rank) == cluster.device(given)


def test_runs_of_ranks_on_unequal_hosts() -> None:
    cluster = parse_cluster("2x8xH100+4xH100")
    assert pieces(cluster, 0, 20) == (8, 8, 4)
    assert run_sizes(cluster, 0) == (1, 2, 4, 8, 16, 20)
    assert run_sizes(cluster, 5) == (1, 2, 3, 11, 15)
    for first in range(20):
        assert max(run_sizes(cluster, first)) == 20 - first


@pytest.mark.parametrize("speeds", [(1, 3), (3, 1)])
def test_a_device_of_three_times_the_speed_has_three_times_the_layers(
    speeds: tuple[int, int],
) -> None:
    """8 equal layers on speeds 3 and 1: 6 and 2 of them take 2 each, any other cut over 2.

    Of 16 micro-batches; of few, 7 and 1 are faster: the slow stage's one layer then is all
    that the fast stage does not hide.
    """
    graph, blocks = mlp(8, inner=512)
    request = Request(16, forced=Forced(pp=2, num_microbatches=16))
    found = plan(graph, blocks, toys(*map(host, speeds)), request)
    assert layers_by_device(found) == {"toy1": [2], "toy3": [6]}


def test_two_fast_and_two_slow_devices_share_the_layers_by_speed() -> None:
    """8 layers on speeds 3, 3, 1, 1: all work over all speed is 1, reached by 3, 3, 1, 1.

    Then T = 4 + (B − 1), where fast devices alone, 4 layers each, take 8/3 + (B − 1)·4/3:
    of 16 micro-batches less.
    """
    graph, blocks = mlp(8, inner=512)
    request = Request(16, forced=Forced(pp=4, num_microbatches=16))
    found = plan(graph, blocks, toys(host(1), host(3), host(1), host(3)), request)
    assert layers_by_device(found) == {"toy1": [1, 1], "toy3": [3, 3]}
    assert sorted(rank for stage in found.stages for rank in stage.devices) == [0, 1, 2, 3]


def test_memory_is_that_of_a_stages_own_devices() -> None:
    """Only the device with memory can hold the layers; the small one holds the ends it can."""
    graph, blocks = mlp(6, rows=4, width=64, inner=256)
    request = Request(8, forced=Forced(pp=2, num_microbatches=2, zero=0, recompute="none"))
    alike = plan(graph, blocks, toys(host(1), host(1)), request)
    most = max(sum(stage.prediction.memory_bytes.values()) for stage in alike.stages)
    small, large = host(1, memory_bytes=int(most * 0.7)), host(1, memory_bytes=int(most * 2))
    small = replace(small, device=replace(small.device, name="small"))
    for cluster in (toys(small, large), toys(large, small)):
        found = plan(graph, blocks, cluster, request)
        for stage in found.stages:
            limit = cluster.device(stage.devices[0]).usable_memory_bytes
            assert sum(stage.prediction.memory_bytes.values()) <= limit
        counts = layers_by_device(found)
        assert counts["small"][0] < counts["toy1"][0]
    with pytest.raises(InfeasibleError, match="does not fit"):
        plan(graph, blocks, toys(small, replace(small)), request)


def test_what_the_plan_predicts_is_what_its_walk_finds_in_any_order_of_hosts() -> None:
    graph, blocks = mlp(6, inner=128)
    request = Request(16, forced=Forced(pp=2, num_microbatches=4))
    cluster = toys(host(1, num_devices=2), host(5, num_devices=2), inter_link=SLOW)
    found = plan(graph, blocks, cluster, request)
    again = evaluate(graph, blocks, found, cluster)
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)


def test_a_plan_in_another_order_keeps_its_devices_kinds() -> None:
    graph, blocks = mlp(4, inner=128)
    cluster = toys(host(1), host(3))
    order = host_orders(cluster)[1]
    request = Request(8, forced=Forced(pp=2, num_microbatches=4))
    there = plan(graph, blocks, order.cluster, request)
    back = in_given_ranks(there, order, cluster)
    for mine, theirs in zip(back.stages, there.stages, strict=True):
        assert cluster.device(mine.devices[0]) == order.cluster.device(theirs.devices[0])


def test_racks_that_are_far_apart_are_stages() -> None:
    """Within a rack any cut is free, between them only what a stage passes on is sent."""
    graph, blocks = mlp(3, rows=8, width=64, inner=2048)
    hosts = [host(1, rack=name) for name in "abab"]
    cluster = toys(*hosts, rack_link=SLOW)
    found = plan(graph, blocks, cluster, Request(8))
    racks = [{cluster.hosts[rank].rack for rank in stage.devices} for stage in found.stages]
    crossings = sum(first != second for first, second in pairwise(racks))
    assert all(len(own) == 1 for own in racks)
    assert crossings <= 1


def test_degrees_that_no_stages_can_have_are_an_error_of_the_request() -> None:
    """Two devices of one host and one of another: each stage with tp=2 leaves one without."""
    graph, blocks = mlp(3)
    on = toys(host(1.0, num_devices=2), host(2.0))
    with pytest.raises(UsageError, match="AP127"):
        plan(graph, blocks, on, Request(4, forced=Forced(tp=2)))


def test_a_stage_on_hosts_in_another_order_is_priced_as_it_was_searched() -> None:
    """The host of one device comes last: ranks 1, 2, 3 and 0, which do not follow each other."""
    graph, blocks = mlp(1, rows=8)
    on = toys(host(1), host(2, num_devices=3), inter_link=SLOW)
    found = plan(graph, blocks, on, Request(8, forced=Forced(pp=1)))
    (stage,) = found.stages
    swapped = replace(found, stages=(replace(stage, devices=(1, 2, 3, 0)),))
    for each in (found, swapped):
        priced = evaluate(graph, blocks, each, on)
        assert priced.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)
