"""Unequal shares of the batch: the best ones, their price, and where the planner takes them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from brute_force_shares import divisions
from one_stage import plan
from random_suites import seeds
from small_graphs import mlp

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.graph.graph import Accumulation, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import SCHEDULES, Forced, Request
from autoparallel.planner.variants.shares import best_shares, share_of, why_not

WIRE = Link("wire", alpha_seconds=1e-9, bytes_per_second=1e15)


def host(speed: float, *, memory_bytes: int = 10**12) -> Host:
    """A device of ``speed`` GFLOP/s that moves bytes for nothing."""
    device = Device(
        f"toy{speed:g}",
        "cpu",
        memory_bytes,
        memory_bytes,
        1e18,
        {"float32": speed * 1e9},
        launch_seconds=0.0,
    )
    return Host(device, 1, WIRE)


def toys(*hosts: Host) -> Cluster:
    return Cluster("toys", hosts, WIRE)


@pytest.mark.parametrize("seed", seeds(12))
def test_no_division_of_the_rows_has_a_faster_slowest_rank(seed: int) -> None:
    """Seconds rise with the rows in steps of any size; some ranks hold few rows."""
    rng = random.Random(seed)
    parts = rng.randint(1, 4)
    total = rng.randint(parts, 12)
    most = [rng.choice((total, total, rng.randint(1, total))) for _ in range(parts)]
    table = []
    for rank in range(parts):
        rise, seconds = [0.0], rng.choice((0.0, 1.0, 5.0))
        for rows in range(1, total + 1):
            seconds += rng.choice((0, 1, 1, 2, 7)) * rng.choice((0.2, 1.0))
            rise.append(seconds if rows <= most[rank] else float("inf"))
        table.append(rise)
    speeds = [rng.choice((1.0, 2.0, 5.0)) for _ in range(parts)]
    found = best_shares(total, speeds, lambda rank, rows: table[rank][rows])
    every = [max(table[r][n] for r, n in enumerate(each)) for each in divisions(total, parts)]
    if found is None:
        assert min(every) == float("inf")
    else:
        assert sum(found) == total
        assert max(table[r][n] for r, n in enumerate(found)) == min(every)


def planned(cluster: Cluster, rows: int, *, deny: tuple[str, ...] = ()) -> Plan:
    graph, blocks = mlp(3, inner=256)
    request = Request(
        rows,
        forced=Forced(dp=cluster.num_devices, pp=1),
        features=features_of((), deny, SCHEDULES),
    )
    return plan(graph, blocks, cluster, request)


@pytest.mark.parametrize(
    ("speeds", "rows", "shares"),
    [((1, 3), 16, (4, 12)), ((3, 5), 8, (3, 5)), ((5, 3), 8, (5, 3)), ((1, 2, 4), 21, (3, 6, 12))],
)
def test_devices_take_rows_in_proportion_to_their_speed(
    speeds: tuple[int, ...], rows: int, shares: tuple[int, ...]
) -> None:
    """Every device then ends at the same time: nothing else is as fast."""
    found = planned(toys(*map(host, speeds)), rows)
    (stage,) = found.stages
    assert stage.shares == shares
    assert found.num_microbatches == 1


def test_an_even_split_is_slower_by_what_the_slow_device_takes_more() -> None:
    """16 rows on speeds 1 and 3: 4 rows of the slow one against 8."""
    cluster = toys(host(1), host(3))
    shared, even = planned(cluster, 16), planned(cluster, 16, deny=("uneven-shares",))
    assert even.stages[0].shares == ()
    ratio = even.prediction.step_seconds / shared.prediction.step_seconds
    assert ratio == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("seed", seeds(1))
def test_no_shares_zero_stage_or_micro_batch_is_faster(seed: int) -> None:
    """Against ``evaluate`` of every division at every number of micro-batches; it walks nodes."""
    rng = random.Random(seed)
    speeds = [rng.choice((1, 2, 3, 5, 7)) for _ in range(rng.choice((2, 3)))]
    if len(set(speeds)) == 1:
        speeds[0] += 1
    cluster, rows = toys(*map(host, speeds)), 6
    graph, blocks = mlp(3, inner=256)
    found = planned(cluster, rows)
    again = evaluate(graph, blocks, found, cluster)
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)
    (stage,) = found.stages
    for total in (rows, rows // 2):
        for shares in divisions(total, len(speeds)):
            for zero in range(4):
                other = replace(
                    found,
                    num_microbatches=rows // total,
                    stages=(replace(stage, shares=shares, zero=zero),),
                )
                seconds = evaluate(graph, blocks, other, cluster).step_seconds
                assert seconds >= found.prediction.step_seconds * (1 - 1e-9), (shares, zero)


def test_a_device_takes_no_more_rows_than_its_memory_holds() -> None:
    """By speed the second device has 12 rows; it holds what 6 take, and the first has 10."""
    request = Request(16, forced=Forced(dp=2, pp=1, zero=0, recompute="none", num_microbatches=1))
    graph, blocks = mlp(3, inner=256)
    cluster = toys(host(1), host(3))
    (stage,) = (free := plan(graph, blocks, cluster, request)).stages
    assert stage.shares == (4, 12)
    six = replace(
        free, stages=(replace(stage, shares=(6, 6)),), model=replace(free.model, global_batch=12)
    )
    held = evaluate(graph, blocks, six, cluster).peak_memory_bytes
    small = toys(host(1), host(3, memory_bytes=held))
    assert plan(graph, blocks, small, request).stages[0].shares == (10, 6)


def test_equal_devices_never_share_unequally() -> None:
    found = planned(toys(host(2), host(2)), 6)
    assert found.stages[0].shares == ()


def test_a_graph_in_which_rows_meet_is_not_shared_out() -> None:
    graph, _ = mlp(1)
    assert why_not(graph, (), lambda name: None) == ""
    apart = Graph(graph.nodes, graph.loss, graph.batch_size)
    assert why_not(apart, (), lambda name: None)
    mixing = replace(graph, accumulation=Accumulation(mixing=("stem",)))
    assert "stem" in why_not(mixing, (), lambda name: None)


def test_a_part_without_rows_has_no_weight_in_a_mean() -> None:
    parts = [share_of((0, 3, 5), coordinate) for coordinate in range(3)]
    assert [part.weight for part in parts if part is not None] == [0.0, 9 / 8, 15 / 8]
